// Every load and store of a kernel's memory comes by here: bounds, alignment, initialisation, races.
// Buffers lie 16 GiB apart, so no 32-bit index times four bytes reaches a neighbour.
#include "state.h"

static Region* region_of(const u8* p) {
  Region& last = run.regions[run.last_region];
  if (run.last_region < run.region_count && p >= last.begin && p < last.end) return &last;
  for (u32 i = 0; i < run.region_count; i++)
    if (p >= run.regions[i].begin && p < run.regions[i].end) {
      run.last_region = i;
      return &run.regions[i];
    }
  return nullptr;
}

static const char* kind_name(const Region& region) {
  return region.kind == THREADGROUP ? "threadgroup array" : "buffer";
}

// ---- bounds

static const Region* nearest_region(const u8* p) {
  const Region* nearest = nullptr;
  u64 least = ~0ul;
  for (u32 i = 0; i < run.region_count; i++) {
    const Region& r = run.regions[i];
    u64 distance = p < r.begin ? (u64)(r.begin - p) : (u64)(p - r.end);
    if (distance < least) least = distance, nearest = &r;
  }
  return nearest;
}

static void fail_out_of_bounds(const u8* p, u32 size, const char* verb, const Origin& from) {
  const Region* r = nearest_region(p);
  if (!r || p < (const u8*)65536)
    return fail(current_at_origin(from), "%s of %u bytes through a null or wild pointer", verb, size);
  fail(current_at_origin(from), "out-of-bounds %s of %u bytes at byte %ld of %s '%s', which has %ld bytes",
       verb, size, (long)(p - r->begin), kind_name(*r), r->name, (long)(r->end - r->begin));
}

// ---- races. An earlier access is ordered before this one if a barrier that covers this memory lies between.

struct Now { // the accessing thread's view of one region's memory
  u32 number, simdgroup, epoch, simd_epoch;
};

static Now now_in(const Region& region) {
  const Simdgroup& group = run.simdgroups[run.current->thread.simdgroup];
  bool shared = region.kind == THREADGROUP;
  return {run.current->number, run.current->thread.simdgroup,
          shared ? run.threadgroup_epoch : run.device_epoch,
          shared ? group.threadgroup_epoch : group.device_epoch};
}

static bool in_this_threadgroup(u32 number) {
  return number >= run.first_number && number < run.first_number + run.thread_count;
}

static u32 simdgroup_of(u32 number) { return (number - run.first_number) / LANES; }

static bool ordered_before(u32 number, u32 epoch, u32 simd_epoch, const Now& now) {
  if (!in_this_threadgroup(number)) return false;
  return epoch != now.epoch || (simdgroup_of(number) == now.simdgroup && simd_epoch != now.simd_epoch);
}

// An atomic leaves its threadgroup's number in place of a simd epoch: any thread of it may have been last.
static bool write_is_ordered(const Shadow& s, const Now& now) {
  if (!s.writer || s.writer == now.number) return true;
  if (s.writer == ATOMIC) return s.write_simd_epoch == run.group_number && s.write_epoch != now.epoch;
  return ordered_before(s.writer, s.write_epoch, s.write_simd_epoch, now);
}

static bool reads_are_ordered(const Shadow& s, const Now& now) {
  if (s.read_by == NOBODY) return true;
  if (s.read_by == ONE_THREAD && s.reader == now.number) return true;
  if (s.read_by == SEVERAL_SIMDGROUPS) return in_this_threadgroup(s.reader) && s.read_epoch != now.epoch;
  return ordered_before(s.reader, s.read_epoch, s.read_simd_epoch, now);
}

static void fail_for_race(const Region& r, u64 byte, const char* verb, const char* earlier, u32 number,
                          u32 site, const Origin& from) {
  run.failure->other = thread_at_site(number, site);
  fail(current_at_origin(from),
       "data race: %s of byte %lu of %s '%s', and an earlier %s by another thread, with no barrier between "
       "that orders them",
       verb, byte, kind_name(r), r.name, earlier);
}

// Keep enough of the readers since the last barrier to judge a later write.
static void note_read(Shadow& s, const Now& now, u32 site) {
  if (s.read_by != NOBODY && !in_this_threadgroup(s.reader)) return; // any write from here is a race already
  Readers readers = ONE_THREAD;
  if (!reads_are_ordered(s, now)) {
    bool same = s.read_by != SEVERAL_SIMDGROUPS && simdgroup_of(s.reader) == now.simdgroup;
    readers = same ? ONE_SIMDGROUP : SEVERAL_SIMDGROUPS;
  }
  s.read_by = readers;
  s.reader = now.number;
  s.read_epoch = now.epoch;
  s.read_simd_epoch = now.simd_epoch;
  s.read_site = site;
}

static void note_write(Shadow& s, const Now& now, u32 site) {
  s.writer = now.number;
  s.write_epoch = now.epoch;
  s.write_simd_epoch = now.simd_epoch;
  s.write_site = site;
  s.read_by = NOBODY;
}

static void fail_uninitialised(const Region& r, u64 byte, const char* verb, const Origin& from) {
  const char* what = r.kind == THREADGROUP ? "threadgroup array" : "output";
  fail(current_at_origin(from), "%s of byte %lu of %s '%s', which nothing has written yet", verb, byte, what,
       r.name);
}

static void check_byte(Region& r, u64 byte, bool write, const Now& now, const Origin& from) {
  Shadow& s = r.shadow[byte];
  const char* verb = write ? "write" : "read";
  if (!write && !s.writer && !r.filled) return fail_uninitialised(r, byte, verb, from);
  if (!write_is_ordered(s, now))
    return fail_for_race(r, byte, verb, s.writer == ATOMIC ? "atomic" : "write", s.writer, s.write_site,
                         from);
  if (write && !reads_are_ordered(s, now))
    return fail_for_race(r, byte, verb, "read", s.reader, s.read_site, from);
}

// ---- the checks in order

static bool passes_as_a_whole(Region& r, const u8* p, u32 size, bool write, const Origin& from) {
  const char* verb = write ? "write" : "read";
  if (p + size > r.end) {
    fail(current_at_origin(from),
         "out-of-bounds %s of %u bytes runs over the end of %s '%s', which has %ld bytes", verb, size,
         kind_name(r), r.name, (long)(r.end - r.begin));
    return false;
  }
  if (write && r.kind == READ_ONLY) {
    fail(current_at_origin(from), "write to byte %ld of input '%s', which is read-only", (long)(p - r.begin),
         r.name);
    return false;
  }
  return true;
}

// A thread's own stack, and the position and argument list that the launcher reads.
static bool is_private(const u8* p) {
  return on_a_stack(p) || (p >= (const u8*)&run && p < (const u8*)(&run + 1));
}

void check_access(const void* address, u32 size, bool write, u64 return_address) {
  run.totals.accesses++;
  if (!run.current || failed() || !size) return;
  const u8* p = (const u8*)address;
  const Origin from{return_address, {}};
  if (is_private(p)) return;
  Region* r = region_of(p);
  if (!r) {
    bool constant_table = !write && p >= run.kernel->image_begin && p < run.kernel->image_end;
    if (!constant_table) fail_out_of_bounds(p, size, write ? "write" : "read", from);
    return;
  }
  if (!passes_as_a_whole(*r, p, size, write, from)) return;
  u32 site = site_of(from);
  if (r->kind != THREADGROUP) note_traffic(*r, p, size, write, from);
  if (!r->shadow) return;
  Now now = now_in(*r);
  u64 first = (u64)(p - r->begin);
  for (u64 byte = first; byte < first + size; byte++) {
    check_byte(*r, byte, write, now, from);
    if (write)
      note_write(r->shadow[byte], now, site);
    else
      note_read(r->shadow[byte], now, site);
  }
}

// An atomic is ordered with other atomics, not with plain accesses.
extern "C" void msl_atomic_access(Place at, void* address, u32 size, bool reads) {
  run.totals.accesses++;
  const u8* p = (const u8*)address;
  const Origin from{0, at};
  Region* r = region_of(p);
  if (!r) return fail_out_of_bounds(p, size, "atomic access", from);
  if (!passes_as_a_whole(*r, p, size, true, from)) return;
  if (r->kind != THREADGROUP) note_traffic(*r, p, size, true, from);
  Now now = now_in(*r);
  u64 first = (u64)(p - r->begin);
  for (u64 byte = first; byte < first + size; byte++) {
    Shadow& s = r->shadow[byte];
    if (reads && !s.writer && !r->filled) return fail_uninitialised(*r, byte, "atomic update", from);
    if (s.writer != ATOMIC) check_byte(*r, byte, true, now, from);
    s.writer = ATOMIC;
    s.write_epoch = now.epoch;
    s.write_simd_epoch = run.group_number;
    s.write_site = 0;
  }
}

// ---- threadgroup variables: an arena, fresh for every threadgroup. Between them lies more than a
// threadgroup may have, so that no index of one reaches another.

constexpr u32 RED_ZONE = 2 * THREADGROUP_LIMIT;

extern "C" void* msl_threadgroup_variable(Place at, const void* key, const char* name, u32 size, u32 align) {
  for (u32 i = 0; i < run.variable_count; i++)
    if (run.variables[i].key == key) return run.variables[i].memory;
  run.variable_bytes += size;
  if (run.variable_bytes > run.totals.threadgroup_bytes) run.totals.threadgroup_bytes = run.variable_bytes;
  u32 offset = (run.arena_used + RED_ZONE + align - 1) / align * align;
  if (run.variable_bytes > THREADGROUP_LIMIT)
    fail(current_at(at), "threadgroup memory: %u bytes with '%s', more than the limit of %u",
         run.variable_bytes, name, THREADGROUP_LIMIT);
  if (run.variable_count == MAX_VARIABLES)
    fail(current_at(at), "more than %u threadgroup variables", MAX_VARIABLES);
  u8* memory = arena + offset;
  Shadow* shadow = arena_shadow + offset;
  memset(memory, 0xff, size);
  memset(shadow, 0, size * sizeof(Shadow));
  run.variables[run.variable_count++] = {key, memory};
  run.regions[run.region_count++] = {memory, memory + size, THREADGROUP, false,
                                     name,   shadow,        nullptr,     nullptr};
  run.arena_used = offset + size;
  return memory;
}
