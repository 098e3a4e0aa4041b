// One fiber a thread: a stack each, and a switch that saves the registers a call must keep.
// Knows nothing of memory or barriers.
#include "state.h"

constexpr u64 STACK = 256 * 1024, GUARD = 4096;

// The switch: push what the caller must find again, swap stack pointers, pop, return into the other.
#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
msl_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the fiber switch is written for x86-64 and arm64"
#endif
extern "C" void msl_switch(void** save, void* to);

// The bottom page of each stack is a guard: running over it is a fault, not a silent overwrite.
static void map_stacks() {
  if (stacks) return;
  stacks = map_pages(STACK * MAX_THREADS);
  for (u32 i = 0; i < MAX_THREADS; i++) mprotect(stacks + STACK * i, GUARD, NO_ACCESS);
}

static bool on_a_stack(const u8* p) { return p >= stacks && p < stacks + STACK * MAX_THREADS; }

void switch_to_scheduler() {
  run.totals.switches++;
  msl_switch(&run.current->stack_pointer, run.scheduler_stack);
}

static void switch_to(Fiber& fiber) {
  run.current = &fiber;
  msl_switch(&run.scheduler_stack, fiber.stack_pointer);
  run.current = nullptr;
}

// What each fiber executes: the kernel once, then never again.
static void fiber_main() {
  run.kernel->entry(run.arguments, &run.current->thread);
  run.current->state = RETURNED;
  run.returned++;
  run.simdgroups[run.current->thread.simdgroup].returned |= 1u << run.current->thread.lane;
  switch_to_scheduler();
  __builtin_trap();
}

// A stack on which msl_switch's pops find zeros and its return finds fiber_main.
static void prepare_stack(Fiber& fiber) {
  u64* top = (u64*)(stacks + STACK * (fiber.thread.index + 1));
#if defined(__x86_64__)
  *--top = 0; // fiber_main's own return address, never used; keeps the stack aligned as after a call
  *--top = (u64)fiber_main;
  top -= 6;
  memset(top, 0, 6 * sizeof(u64));
#else
  top -= 20;
  memset(top, 0, 20 * sizeof(u64));
  top[11] = (u64)fiber_main;
#endif
  fiber.stack_pointer = top;
}
