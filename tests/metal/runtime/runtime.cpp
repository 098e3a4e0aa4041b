// The runtime in one translation unit: executes a compiled kernel thread by thread and checks what it does.
#include "failure.cpp"
#include "fibers.cpp"
#include "floats.cpp"
#include "traffic.cpp"
#include "memory.cpp"
#include "rendezvous.cpp"
#include "sanitizer.cpp"
#include "launch.cpp"
