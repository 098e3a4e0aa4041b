// A launch: lay out the buffers, run threadgroup after threadgroup, count what was never written.
#include "state.h"

Run run;
u8 *stacks, *arena;
Shadow* arena_shadow;

// ---- buffers

constexpr u64 PAGE = 4096, GAP = 16ul << 30;

struct Mapping {
  u8* base;
  u64 pages; // bytes between the gaps
};
static Mapping mappings[MAX_BUFFERS];

// Where the buffer starts inside its pages: aligned as promised, and to nothing greater.
static u64 start_of(const Buffer& buffer) { return buffer.alignment >= PAGE ? 0 : buffer.alignment; }

// Without address space there is no run; the kernel is not to blame.
static u8* map_or_fail(u64 size, int protection = READ_WRITE) {
  u8* pages = map_pages(size, protection);
  if (pages == (u8*)-1) fail({}, "the system grants no %lu bytes of address space for this launch", size);
  return pages;
}

static void map_buffer(u32 i) {
  const Buffer& buffer = run.launch->buffers[i];
  u64 pages = (start_of(buffer) + buffer.size + PAGE - 1) / PAGE * PAGE;
  mappings[i] = {map_or_fail(pages + 2 * GAP, NO_ACCESS), pages};
  if (failed()) return;
  mprotect(mappings[i].base + GAP, pages, READ_WRITE);
  u8* begin = mappings[i].base + GAP + start_of(buffer);
  if (buffer.kind == OUTPUT)
    memset(begin, 0xff, buffer.size); // NaN, -1
  else
    memcpy(begin, buffer.data, buffer.size);
  bool input = buffer.kind == INPUT;
  Shadow* shadow = input ? nullptr : (Shadow*)map_or_fail(buffer.size * sizeof(Shadow) + 1);
  u32* read_by = (u32*)map_or_fail(buffer.size * sizeof(u32) + 1);
  run.arguments[i] = begin;
  run.regions[run.region_count++] = {begin,
                                     begin + buffer.size,
                                     input ? READ_ONLY : DEVICE,
                                     buffer.kind == FILLED_OUTPUT,
                                     buffer.name,
                                     shadow,
                                     read_by,
                                     nullptr};
}

static u64 never_written(const Region& r) {
  u64 count = 0;
  for (u64 byte = 0; byte < (u64)(r.end - r.begin); byte++) count += !r.shadow[byte].writer;
  return count;
}

static void unmap_buffer(u32 i) {
  const Buffer& buffer = run.launch->buffers[i];
  Region& r = run.regions[i];
  if (buffer.kind != INPUT) memcpy(buffer.data, r.begin, buffer.size);
  if (buffer.kind == OUTPUT && !failed())
    if (u64 missing = never_written(r))
      fail({}, "%lu of %lu bytes of output '%s' were never written", missing, buffer.size, buffer.name);
  if (r.shadow) munmap(r.shadow, buffer.size * sizeof(Shadow) + 1);
  munmap(r.read_by, buffer.size * sizeof(u32) + 1);
  munmap(mappings[i].base, mappings[i].pages + 2 * GAP);
}

// ---- one threadgroup

struct Shape {
  u32 size[3], groups[3], full; // threads of a full threadgroup, and their product
};

static Shape shape_of(const Launch& launch) {
  Shape s;
  s.full = 1;
  for (int k = 0; k < 3; k++) {
    s.size[k] = launch.threadgroup[k] < launch.grid[k] ? launch.threadgroup[k] : launch.grid[k];
    s.groups[k] = (launch.grid[k] + s.size[k] - 1) / s.size[k];
    s.full *= s.size[k];
  }
  return s;
}

static void place_thread(Fiber& fiber, u32 index, const Shape& s, const u32* group, const u32* size) {
  Thread& t = fiber.thread;
  u32 within[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  for (int k = 0; k < 3; k++) {
    t.position_in_threadgroup[k] = within[k];
    t.threadgroup_position[k] = group[k];
    t.position_in_grid[k] = group[k] * s.size[k] + within[k];
    t.threadgroups[k] = s.groups[k];
    t.grid[k] = run.launch->grid[k];
    t.threadgroup_size[k] = size[k];
    t.full_threadgroup_size[k] = s.size[k];
  }
  t.index = index;
  t.lane = index % LANES;
  t.simdgroup = index / LANES;
  t.simdgroups = (run.thread_count + LANES - 1) / LANES;
}

static void start_fiber(u32 index, const Shape& s, const u32* group, const u32* size) {
  Fiber& fiber = run.fibers[index];
  place_thread(fiber, index, s, group, size);
  fiber.state = READY;
  fiber.number = run.first_number + index;
  fiber.barriers = fiber.simdgroup_barriers = fiber.simdgroup_operations = 0;
  prepare_stack(fiber);
}

static void start_simdgroups() {
  for (u32 i = 0; i * LANES < run.thread_count; i++) {
    u32 lanes = run.thread_count - i * LANES;
    Simdgroup& group = run.simdgroups[i];
    group.members = lanes >= LANES ? ~0u : (1u << lanes) - 1;
    group.arrived = group.returned = 0;
    group.device_epoch++;
    group.threadgroup_epoch++;
  }
}

// The last threadgroup of an axis may be partial: `grid` counts threads.
static void start_threadgroup(u32 number, const Shape& s) {
  u32 group[3] = {number % s.groups[0], number / s.groups[0] % s.groups[1],
                  number / s.groups[0] / s.groups[1]};
  u32 size[3];
  run.thread_count = 1;
  for (int k = 0; k < 3; k++) {
    u32 left = run.launch->grid[k] - group[k] * s.size[k];
    size[k] = left < s.size[k] ? left : s.size[k];
    run.thread_count *= size[k];
  }
  run.group_number = number;
  run.first_number = number * s.full + 1;
  run.returned = run.at_barrier = 0;
  run.variable_count = run.arena_used = run.variable_bytes = 0;
  run.region_count = run.launch->buffer_count;
  run.threadgroup_epoch++;
  run.device_epoch++;
  start_simdgroups();
  for (u32 i = 0; i < run.thread_count; i++) start_fiber(i, s, group, size);
}

// ---- schedules

static u32 next_random() {
  run.random = run.random * 1664525u + 1013904223u;
  return run.random >> 8;
}

// One turn for every thread that can go on; false if none can.
static bool run_round() {
  bool any = false;
  u32 n = run.thread_count, offset = run.launch->order == 2 ? next_random() % n : 0;
  for (u32 turn = 0; turn < n && !failed(); turn++) {
    u32 i = (run.launch->order == 1 ? n - 1 - turn : turn + offset) % n;
    if (run.fibers[i].state != READY) continue;
    any = true;
    switch_to(run.fibers[i]);
  }
  return any;
}

static void most(u64& so_far, u32 value) {
  if (value > so_far) so_far = value;
}

static void run_threadgroup(u32 number, const Shape& s) {
  start_threadgroup(number, s);
  while (!failed() && run.returned < run.thread_count)
    if (!run_round() && !failed()) fail_for_deadlock();
  flush_traffic();
  for (u32 i = 0; i < run.thread_count; i++) {
    most(run.totals.barriers, run.fibers[i].barriers);
    most(run.totals.simdgroup_barriers, run.fibers[i].simdgroup_barriers);
    most(run.totals.simdgroup_operations, run.fibers[i].simdgroup_operations);
  }
}

static void run_grid() {
  Shape s = shape_of(*run.launch);
  if (s.full > MAX_THREADS)
    return fail({}, "a threadgroup of %u threads, more than the limit of %u", s.full, MAX_THREADS);
  u32 count = s.groups[0] * s.groups[1] * s.groups[2];
  for (u32 i = 0; i < count && !failed(); i++) run_threadgroup(run.launch->order == 1 ? count - 1 - i : i, s);
}

static void map_once() {
  if (arena) return;
  map_stacks();
  arena_shadow = (Shadow*)map_pages(ARENA * sizeof(Shadow));
  arena = map_pages(ARENA);
}

// The door from Python: runs the kernel over the grid, fills in `failure`, `totals` and one Traffic a buffer.
extern "C" void msl_launch(const Kernel* kernel, const Launch* launch, Failure* failure, Totals* totals,
                           Traffic* traffic) {
  map_once();
  run.launch = launch;
  run.kernel = kernel;
  run.failure = failure;
  run.totals = {};
  run.current = nullptr;
  run.region_count = run.last_region = 0;
  run.random = launch->seed * 2654435761u + 12345;
  for (u32 i = 0; i < launch->buffer_count && !failed(); i++) {
    map_buffer(i);
    run.regions[i].traffic = &traffic[i];
  }
  u32 mapped = run.region_count;
  catch_faults();
  if (!failed()) run_grid();
  release_faults();
  forget_traffic();
  for (u32 i = 0; i < mapped; i++) unmap_buffer(i);
  *totals = run.totals;
}
