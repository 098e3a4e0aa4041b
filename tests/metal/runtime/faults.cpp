// A fault that no check foresaw (a smashed stack, a function that calls itself) ends the launch, not the
// process. The handler runs on a stack of its own and leaves it by switching to the scheduler.
#include "state.h"

enum { SIG_ILLEGAL = 4, SIG_BUS = 7, SIG_SEGMENT = 11 };

struct SignalAction { // glibc's struct sigaction
  void (*handler)(int, void* info, void* context);
  u64 mask[16];
  int flags;
  void (*restorer)();
};
struct SignalStack { // glibc's stack_t
  void* base;
  int flags;
  size_t size;
};
extern "C" int sigaction(int, const SignalAction*, SignalAction*);
extern "C" int sigaltstack(const SignalStack*, SignalStack*);

constexpr int SIGNALS[] = {SIG_ILLEGAL, SIG_BUS, SIG_SEGMENT};
constexpr size_t SIGNAL_STACK = 64 * 1024;
static SignalAction before[3];
static SignalStack stack_before;

// Where the program counter lies in a ucontext_t.
static u64 program_counter(const void* context) {
#if defined(__x86_64__)
  return *(const u64*)((const u8*)context + 168);
#else
  return *(const u64*)((const u8*)context + 440);
#endif
}

static u64 faulting_address(const void* info) { return *(const u64*)((const u8*)info + 16); }

static void on_fault(int signal, void* info, void* context) {
  if (!run.current) { // not a kernel's doing: let it happen again under whoever handled it before
    for (int k = 0; k < 3; k++) sigaction(SIGNALS[k], &before[k], nullptr);
    return;
  }
  Location here = current_at_instruction(program_counter(context) + 1);
  fail(here,
       "the thread faulted (signal %d) at address %#lx: a smashed stack, or an access that no check saw",
       signal, faulting_address(info));
}

static void catch_faults() {
  static u8* memory = map_pages(SIGNAL_STACK);
  SignalStack stack{memory, 0, SIGNAL_STACK};
  sigaltstack(&stack, &stack_before);
  SignalAction action{on_fault, {}, 0x4 | 0x08000000 | 0x40000000, nullptr}; // SIGINFO, ONSTACK, NODEFER
  for (int k = 0; k < 3; k++) sigaction(SIGNALS[k], &action, &before[k]);
}

static void release_faults() {
  for (int k = 0; k < 3; k++) sigaction(SIGNALS[k], &before[k], nullptr);
  sigaltstack(&stack_before, nullptr);
}
