// What one launch knows: its threads (fibers), simdgroups, memory regions and the first failure.
// One launch runs at a time in a process; all of it lives in the one object `run`.
#pragma once
#include "libc.h"

constexpr u32 MAX_THREADS = 1024, LANES = 32, MAX_SIMDGROUPS = MAX_THREADS / LANES;
constexpr u32 MAX_BUFFERS = 64, MAX_VARIABLES = 64, SLOT = 64;
constexpr u32 THREADGROUP_LIMIT = 32 * 1024, ARENA = MAX_VARIABLES * 3 * THREADGROUP_LIMIT;

// ---- shared with run.py (ctypes): keep both alike

struct Place {
  const char* file;
  u32 line;
};

// What a kernel sees of its position; the launcher that edit.py writes reads these fields by name.
struct Thread {
  u32 position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  u32 threadgroups[3], grid[3], threadgroup_size[3], full_threadgroup_size[3];
  u32 lane, simdgroup, index, simdgroups;
};

enum BufferKind { INPUT = 0, OUTPUT = 1, FILLED_OUTPUT = 2 };

struct Buffer {
  void* data;
  u64 size;
  u32 kind;
  u32 alignment; // the buffer starts at a multiple of this and of no greater power of two
  const char* name;
};

struct Traffic { // bytes; see Traffic in run.py
  u64 read, written, read_once, read_distinct, written_distinct;
};

struct Totals {
  u64 accesses, blocks, switches, threadgroup_bytes;
  u64 barriers, simdgroup_barriers, simdgroup_operations; // the most that one thread executed
};

struct Location { // one thread at one instruction
  u32 known;
  u32 thread, simdgroup, lane;
  u32 threadgroup[3];
  u64 offset; // of the instruction in the kernel's image; 0: use `place`
  Place place;
};

// Where an access comes from, to be looked up only if it fails: an instruction, or else a statement.
struct Origin {
  u64 return_address;
  Place place;
};

struct Failure {
  u32 failed;
  char message[512];
  Location here, other;
};

struct Launch {
  const Buffer* buffers;
  u32 buffer_count;
  u32 grid[3], threadgroup[3];
  u32 order; // 0 forward, 1 reverse, 2 rotating
  u32 seed;
  u64 block_limit;
};

struct Kernel { // what the compiled kernel hands over
  void (*entry)(void** buffers, const Thread*);
  const u8 *image_begin, *image_end;
};

// ---- the runtime's own

// Who last touched one byte. Threads are numbered over the whole grid, from 1; 0 is nobody.
constexpr u32 ATOMIC = 0xffffffff;
struct Shadow {
  u32 writer, write_epoch, write_simd_epoch, write_site;
  u32 reader, read_epoch, read_simd_epoch, read_site;
  u32 read_by; // Readers
};
enum Readers { NOBODY = 0, ONE_THREAD, ONE_SIMDGROUP, SEVERAL_SIMDGROUPS };

enum RegionKind { READ_ONLY, DEVICE, THREADGROUP };
struct Region {
  u8 *begin, *end;
  RegionKind kind;
  bool filled; // an output with an init_value: reading before writing is fine
  const char* name;
  Shadow* shadow; // one a byte, for what may be written
  u32* read_by;   // one a byte: last threadgroup that read it, from 1 (device memory)
  Traffic* traffic;
};

enum FiberState { READY, AT_BARRIER, AT_EXCHANGE, RETURNED };
struct Fiber {
  void* stack_pointer;
  FiberState state;
  Place waits_at;
  const char* waits_for;
  u32 number; // over the whole grid, from 1
  u32 barriers, simdgroup_barriers, simdgroup_operations;
  Thread thread;
};

struct Simdgroup {
  u32 members, arrived, returned; // bit i: lane i
  Place at;
  const void* call;
  const char* what;
  u32 parity; // which of the two slot rows is being filled
  u32 device_epoch, threadgroup_epoch;
  u32 took_part[2];
  u8 slots[2][LANES * SLOT];
};

struct Variable {
  const void* key;
  u8* memory;
};

struct Run {
  const Launch* launch;
  const Kernel* kernel;
  Failure* failure;
  Totals totals;
  void* arguments[MAX_BUFFERS];
  Region regions[MAX_BUFFERS + MAX_VARIABLES];
  u32 region_count, last_region;

  Fiber fibers[MAX_THREADS];
  Fiber* current; // null in the scheduler
  void* scheduler_stack;
  Simdgroup simdgroups[MAX_SIMDGROUPS];
  u32 random;

  // of the threadgroup being run
  u32 thread_count, returned, first_number, group_number;
  u32 at_barrier;
  Place barrier_at;
  const void* barrier_call;
  u32 device_epoch, threadgroup_epoch;
  Variable variables[MAX_VARIABLES];
  u32 variable_count, arena_used, variable_bytes;
};

extern Run run;
extern u8 *stacks, *arena;
extern Shadow* arena_shadow;

// ---- fibers.cpp
void switch_to_scheduler();
// ---- failure.cpp
void fail(Location here, const char* format, ...) __attribute__((format(printf, 2, 3)));
bool failed();
Location current_at(Place);
Location current_at_instruction(u64 return_address);
Location current_at_origin(const Origin&);
u32 site_of(const Origin&);
Location thread_at_site(u32 number, u32 site);
// ---- memory.cpp
void check_access(const void* address, u32 size, bool write, u64 return_address);
// ---- traffic.cpp
void note_traffic(Region&, const u8* address, u32 size, bool write, const Origin&);
void flush_traffic();
void forget_traffic();
