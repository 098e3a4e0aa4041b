// Bytes that a launch moves between device memory and its threads.
//
// `read` and `written` count, for every load or store instruction and every time a simdgroup executes it, the
// distinct bytes that its 32 lanes touch: a broadcast counts once. "The same time" is the n-th time a lane
// comes to that instruction since the last threadgroup barrier. `read_once`: each byte once a threadgroup.
#include "state.h"

constexpr u32 MAX_SITES = 4096, HASH = 2 * MAX_SITES;
// Executions that can be remembered until the next barrier: 1 GiB of them, far beyond what a test should run.
constexpr u32 MAX_ROWS = 4 << 20;

struct Log { // one load or store instruction of one simdgroup, since the last flush
  const u8* (*addresses)[LANES];
  u32 used, capacity;
  u32 times[LANES];
};

struct Site {
  u64 key; // instruction and size
  u32 size;
  bool write;
};

static Site sites[MAX_SITES];
static u32 site_count;
static u32 hash_table[HASH]; // index + 1 of a site
static Log* logs;            // [site][simdgroup]
static u32 row_count;        // of all logs

static u32 find_site(const Origin& from, u32 size, bool write) {
  u64 key = (u64)site_of(from) << 32 | size << 1 | write;
  for (u32 slot = (u32)(key * 0x9e3779b97f4a7c15ul >> 40) % HASH;; slot = (slot + 1) % HASH) {
    u32 index = hash_table[slot];
    if (index && sites[index - 1].key == key) return index - 1;
    if (index) continue;
    if (site_count == MAX_SITES)
      fail(current_at_origin(from), "more than %u load and store instructions", MAX_SITES);
    sites[site_count] = {key, size, write};
    hash_table[slot] = ++site_count;
    return site_count - 1;
  }
}

static void grow(Log& log, const Origin& from) {
  u32 capacity = log.capacity ? log.capacity * 2 : 16;
  u64 row = sizeof *log.addresses;
  row_count += capacity - log.capacity;
  if (row_count > MAX_ROWS)
    fail(current_at_origin(from),
         "more than %u loads and stores by simdgroups between two barriers: an endless loop?", MAX_ROWS);
  log.addresses = (const u8*(*)[LANES])realloc(log.addresses, capacity * row);
  log.capacity = capacity;
}

static void append(Log& log, u32 lane, const u8* address, const Origin& from) {
  u32 time = log.times[lane]++;
  if (time >= log.capacity) grow(log, from);
  if (time >= log.used) {
    memset(log.addresses[time], 0, sizeof *log.addresses);
    log.used = time + 1;
  }
  log.addresses[time][lane] = address;
}

void note_traffic(Region& region, const u8* address, u32 size, bool write, const Origin& from) {
  if (!logs) logs = (Log*)map_pages(sizeof(Log) * MAX_SITES * MAX_SIMDGROUPS);
  u32 site = find_site(from, size, write);
  const Thread& me = run.current->thread;
  append(logs[site * MAX_SIMDGROUPS + me.simdgroup], me.lane, address, from);
  u64 first = (u64)(address - region.begin);
  for (u64 byte = first; byte < first + size; byte++) {
    if (write) {
      if (!region.shadow[byte].writer) region.traffic->written_distinct++;
    } else if (region.read_by[byte] != run.group_number + 1) {
      region.traffic->read_once++;
      if (!region.read_by[byte]) region.traffic->read_distinct++;
      region.read_by[byte] = run.group_number + 1;
    }
  }
}

static void sort(const u8** p, u32 n) {
  for (u32 i = 1; i < n; i++) {
    const u8* x = p[i];
    u32 j = i;
    for (; j && p[j - 1] > x; j--) p[j] = p[j - 1];
    p[j] = x;
  }
}

static void add(const u8* address, u64 bytes, bool write) {
  for (u32 i = 0; i < run.region_count; i++) {
    Region& r = run.regions[i];
    if (address < r.begin || address >= r.end) continue;
    (write ? r.traffic->written : r.traffic->read) += bytes;
    return;
  }
}

// One execution by one simdgroup: the union of its lanes' byte ranges.
static void count_once(const u8* const* row, const Site& site) {
  const u8* sorted[LANES];
  u32 n = 0;
  for (u32 lane = 0; lane < LANES; lane++)
    if (row[lane]) sorted[n++] = row[lane];
  sort(sorted, n);
  const u8* counted_to = nullptr;
  for (u32 i = 0; i < n; i++) {
    const u8* from = sorted[i] > counted_to ? sorted[i] : counted_to;
    const u8* to = sorted[i] + site.size;
    if (to > from) add(sorted[i], (u64)(to - from), site.write);
    if (to > counted_to) counted_to = to;
  }
}

// At a threadgroup barrier and at a threadgroup's end, when no instruction is half executed.
void flush_traffic() {
  for (u32 site = 0; site < site_count; site++)
    for (u32 group = 0; group < MAX_SIMDGROUPS; group++) {
      Log& log = logs[site * MAX_SIMDGROUPS + group];
      for (u32 time = 0; time < log.used; time++) count_once(log.addresses[time], sites[site]);
      log.used = 0;
      memset(log.times, 0, sizeof log.times);
    }
}

void forget_traffic() {
  for (u32 i = 0; i < site_count * MAX_SIMDGROUPS; i++) {
    free(logs[i].addresses);
    logs[i] = {};
  }
  site_count = row_count = 0;
  memset(hash_table, 0, sizeof hash_table);
}
