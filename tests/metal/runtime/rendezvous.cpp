// Where threads meet: threadgroup barriers, and operations of a simdgroup's lanes.
// A thread that arrives waits; the last one to arrive wakes all. Whoever can never be met is a failure.
#include "state.h"

struct msl_exchange_result {
  u32 lanes;
  const char* slots;
};

enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

static void wait(FiberState state, Place at, const char* what) {
  run.current->state = state;
  run.current->waits_at = at;
  run.current->waits_for = what;
  switch_to_scheduler();
}

static void wake(FiberState state, u32 first, u32 last) {
  for (u32 i = first; i < last; i++)
    if (run.fibers[i].state == state) run.fibers[i].state = READY;
}

// A barrier orders the memory that its flags name: a new epoch begins there.
static void open_barrier(int flags) {
  if (flags & MEM_THREADGROUP) run.threadgroup_epoch++;
  if (flags & MEM_DEVICE) run.device_epoch++;
  flush_traffic();
  run.at_barrier = 0;
  wake(AT_BARRIER, 0, run.thread_count);
}

static Location first_waiting(FiberState state) {
  for (u32 i = 0; i < run.thread_count; i++)
    if (run.fibers[i].state == state) return thread_at_site(run.fibers[i].number, 0);
  return {};
}

// One line can hold two barriers: a helper's, called from two places.
static void check_barrier(Place at, const void* call) {
  if (run.at_barrier && call != run.barrier_call) {
    run.failure->other = first_waiting(AT_BARRIER);
    run.failure->other.place = run.barrier_at;
    fail(current_at(at),
         "barrier divergence: %u threads wait at the barrier of line %u, this thread comes to that of line "
         "%u%s",
         run.at_barrier, run.barrier_at.line, at.line,
         at.line == run.barrier_at.line ? " by another call" : "");
  }
  if (run.returned)
    fail(current_at(at),
         "barrier divergence: %u of %u threads of the threadgroup have returned and will never come to this "
         "barrier",
         run.returned, run.thread_count);
}

extern "C" u32 msl_lane() { return run.current->thread.lane; }

extern "C" void msl_fail(Place at, const char* what) { fail(current_at(at), "%s", what); }

extern "C" void msl_threadgroup_barrier(Place at, int flags) {
  const void* call = __builtin_return_address(0);
  run.current->barriers++;
  check_barrier(at, call);
  run.barrier_at = at;
  run.barrier_call = call;
  if (++run.at_barrier < run.thread_count) return wait(AT_BARRIER, at, "threadgroup_barrier");
  open_barrier(flags);
  // In the forward order the last to arrive goes on at once; in the others it queues up behind.
  if (run.launch->order != 0) switch_to_scheduler();
}

static void check_exchange(Simdgroup& group, Place at, const void* call, const char* what) {
  if (group.arrived && call != group.call)
    fail(current_at(at),
         "simdgroup divergence: lanes %08x wait in %s at line %u, this lane comes to %s at line %u%s",
         group.arrived, group.what, group.at.line, what, at.line,
         at.line == group.at.line ? " by another call" : "");
  if (group.returned)
    fail(current_at(at), "simdgroup divergence: lanes %08x have returned and will never come to %s",
         group.returned, what);
}

// The last lane to arrive opens the round for all; a barrier's flags then begin a new epoch.
static void open_exchange(Simdgroup& group, int flags) {
  u32 first = run.current->thread.simdgroup * LANES;
  group.took_part[group.parity & 1] = group.arrived;
  group.arrived = 0;
  group.parity++;
  if (flags & MEM_THREADGROUP) group.threadgroup_epoch++;
  if (flags & MEM_DEVICE) group.device_epoch++;
  wake(AT_EXCHANGE, first, first + LANES < run.thread_count ? first + LANES : run.thread_count);
}

static msl_exchange_result exchange(Place at, const void* call, const char* what, const void* operand,
                                    u32 size, int flags) {
  Thread& me = run.current->thread;
  Simdgroup& group = run.simdgroups[me.simdgroup];
  check_exchange(group, at, call, what);
  group.at = at;
  group.call = call;
  group.what = what;
  // Two rows of slots take turns: a lane may read this round's operands while another leaves its next.
  u32 row = group.parity & 1;
  memcpy(group.slots[row] + SLOT * me.lane, operand, size);
  group.arrived |= 1u << me.lane;
  if (group.arrived == group.members)
    open_exchange(group, flags);
  else
    wait(AT_EXCHANGE, at, what);
  return {group.took_part[row], (const char*)group.slots[row]};
}

extern "C" msl_exchange_result msl_exchange(Place at, const void* call, const char* what, const void* operand,
                                            u32 size) {
  run.current->simdgroup_operations++;
  return exchange(at, call, what, operand, size, 0);
}

extern "C" void msl_simdgroup_barrier(Place at, int flags) {
  run.current->simdgroup_barriers++;
  exchange(at, __builtin_return_address(0), "simdgroup_barrier", &flags, sizeof flags, flags);
}

// ---- no thread can go on, yet not all have returned

static u32 count_waiting(FiberState state, Place& at) {
  u32 count = 0;
  for (u32 i = 0; i < run.thread_count; i++)
    if (run.fibers[i].state == state) {
      if (!count) at = run.fibers[i].waits_at;
      count++;
    }
  return count;
}

static void fail_for_deadlock() {
  Place barrier{"", 0}, exchange{"", 0};
  u32 at_barrier = count_waiting(AT_BARRIER, barrier), at_exchange = count_waiting(AT_EXCHANGE, exchange);
  Location here = first_waiting(at_exchange ? AT_EXCHANGE : AT_BARRIER);
  here.place = at_exchange ? exchange : barrier;
  if (at_exchange && at_barrier) {
    run.failure->other = first_waiting(AT_BARRIER);
    run.failure->other.place = barrier;
  }
  fail(here,
       "divergence: no thread can go on: %u wait at a threadgroup_barrier (line %u), %u in a simdgroup "
       "operation (line %u), %u returned",
       at_barrier, barrier.line, at_exchange, exchange.line, run.returned);
}
