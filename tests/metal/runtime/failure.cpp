// The first failure of a launch: what was wrong, which thread, where. It ends the run.
#include "state.h"

bool failed() { return run.failure->failed; }

static Location describe(const Fiber& fiber) {
  Location at{};
  at.known = 1;
  at.thread = fiber.thread.index;
  at.simdgroup = fiber.thread.simdgroup;
  at.lane = fiber.thread.lane;
  for (int k = 0; k < 3; k++) at.threadgroup[k] = fiber.thread.threadgroup_position[k];
  return at;
}

Location current_at(Place place) {
  Location at{};
  if (run.current) at = describe(*run.current);
  at.place = place;
  return at;
}

// A return address points behind the call; one byte back lies inside it.
Location current_at_instruction(u64 return_address) {
  Location at = current_at({nullptr, 0});
  at.offset = return_address - 1 - (u64)run.kernel->image_begin;
  return at;
}

Location current_at_origin(const Origin& origin) {
  return origin.return_address ? current_at_instruction(origin.return_address) : current_at(origin.place);
}

// A number for the instruction; a statement stands for its own.
u32 site_of(const Origin& origin) {
  if (origin.return_address) return (u32)(origin.return_address - 1 - (u64)run.kernel->image_begin);
  return (u32)((u64)origin.place.file * 31 + origin.place.line);
}

// A thread of any threadgroup, from its number over the grid.
Location thread_at_site(u32 number, u32 site) {
  const Launch& launch = *run.launch;
  Location at{};
  if (number == 0 || number == ATOMIC) return at;
  u32 size[3], groups[3], full = 1;
  for (int k = 0; k < 3; k++) {
    size[k] = launch.threadgroup[k] < launch.grid[k] ? launch.threadgroup[k] : launch.grid[k];
    groups[k] = (launch.grid[k] + size[k] - 1) / size[k];
    full *= size[k];
  }
  u32 group = (number - 1) / full, index = (number - 1) % full;
  at.known = 1;
  at.thread = index;
  at.simdgroup = index / LANES;
  at.lane = index % LANES;
  at.threadgroup[0] = group % groups[0];
  at.threadgroup[1] = group / groups[0] % groups[1];
  at.threadgroup[2] = group / groups[0] / groups[1];
  at.offset = site;
  return at;
}

// Only the first failure counts. Called by a fiber, this does not come back.
void fail(Location here, const char* format, ...) {
  if (!failed()) {
    __builtin_va_list arguments;
    __builtin_va_start(arguments, format);
    vsnprintf(run.failure->message, sizeof run.failure->message, format, arguments);
    __builtin_va_end(arguments);
    run.failure->here = here;
    run.failure->failed = 1;
  }
  if (run.current) switch_to_scheduler();
}
