// Helpers (a header, not a kernel body): one row of logits, ranked without a sort by a threadgroup of 1024.
//
// Rank: decreasing logit, then increasing id. A token's key packs both into 64 bits, so that keys are
// distinct and a larger key is an earlier rank; a set of leading ranks is "all keys >= cut".

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int GROUPS = 32;      // simdgroups of the threadgroup
constant constexpr int THREADS = 1024;
constant constexpr int CAPACITY = 512;   // candidates that are ranked exactly
constant constexpr int PIVOTS = 3;
constant constexpr int VALUE_ROUNDS = 6;  // rounds that split the range of logits; later ones split the bits

struct Place {
  int index;  // thread in the threadgroup
  int lane;
  int group;  // simdgroup in the threadgroup
};

// Unsigned integers in the order of the floats they stand for; -0 counts as 0.
inline uint ordered(const float value) {
  uint bits = as_type<uint>(value);
  bits = bits == 0x80000000u ? 0u : bits;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The float that `ordered` made an integer of.
inline float unordered(const uint bits) {
  return as_type<float>((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}

// One row of logits; Logits is a pointer in whichever address space MLX chose.
template <typename Logits>
struct Row {
  Logits logits;
  int vocabulary;
  float top;          // the largest logit
  float temperature;  // above 0

  float value(const int id) const {
    return float(logits[id]);
  }

  float weight(const int id) const {
    return exp((value(id) - top) / temperature);
  }

  ulong key(const int id) const {
    return (ulong(ordered(value(id))) << 32) | (0xffffffffu - uint(id));
  }
};

template <typename Logits>
inline Row<Logits> make_row(Logits logits, const int vocabulary, const float top, const float temperature) {
  return Row<Logits>{logits, vocabulary, top, temperature};
}

// The sum over the threadgroup, for all threads. Two barriers: earlier readers of `partial` [GROUPS] are
// done; all sums are there.
template <typename V>
inline V group_sum(const V value, threadgroup V* partial, const Place place) {
  const V sum = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (place.lane == 0) {
    partial[place.group] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(partial[place.lane]);
}

// The maximum over the threadgroup; barriers as in group_sum.
template <typename V>
inline V group_max(const V value, threadgroup V* partial, const Place place) {
  const V largest = simd_max(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (place.lane == 0) {
    partial[place.group] = largest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(partial[place.lane]);
}

// What threads share: 6.4 KiB.
struct Shared {
  threadgroup float* floats;   // [GROUPS]
  threadgroup int* integers;   // [GROUPS]
  threadgroup ulong* keys;     // [CAPACITY]
  threadgroup float* weights;  // [CAPACITY]
  threadgroup ulong* cut;      // [1]
};

// Leading ranks: all keys >= low stay, of which those >= high are known to.
struct Bounds {
  ulong low;
  ulong high;
  int count_low;     // keys >= low
  int count_high;    // keys >= high
  float mass_low;    // their weights
  float mass_high;
  float value_low;   // logits that bound the keys in between
  float value_high;
};

// Move the bounds together until at most CAPACITY keys lie between them: `high` stays above the rank that
// reaches `target` (a count, or a mass), `low` at or below it. A round reads the row once, and has four
// barriers a pivot.
template <typename Logits>
inline void narrow(
    const Row<Logits> row, const bool by_mass, const float target, thread Bounds& bounds, const Shared shared,
    const Place place) {
  for (int round = 0; bounds.count_low - bounds.count_high > CAPACITY; round++) {
    float values[PIVOTS];
    ulong pivots[PIVOTS];
    int counts[PIVOTS] = {0};
    float masses[PIVOTS] = {0.0f};
    UNROLL
    for (int i = 0; i < PIVOTS; i++) {
      const float share = float(i + 1) / float(PIVOTS + 1);
      values[i] = bounds.value_low + (bounds.value_high - bounds.value_low) * share;
      const ulong by_value = ulong(ordered(values[i])) << 32;
      const ulong by_bits = bounds.low + (bounds.high - bounds.low) / (PIVOTS + 1) * (i + 1);
      pivots[i] = max(round < VALUE_ROUNDS ? by_value : by_bits, bounds.low);
    }
    for (int id = place.index; id < row.vocabulary; id += THREADS) {
      const ulong key = row.key(id);
      const float weight = row.weight(id);
      UNROLL
      for (int i = 0; i < PIVOTS; i++) {
        counts[i] += key >= pivots[i] ? 1 : 0;
        masses[i] += key >= pivots[i] ? weight : 0.0f;
      }
    }
    UNROLL
    for (int i = 0; i < PIVOTS; i++) {
      const int count = group_sum(counts[i], shared.integers, place);
      const float mass = group_sum(masses[i], shared.floats, place);
      if (by_mass ? mass >= target : float(count) >= target) {
        bounds.low = pivots[i];
        bounds.count_low = count;
        bounds.mass_low = mass;
        bounds.value_low = values[i];
      } else if (pivots[i] < bounds.high) {
        bounds.high = pivots[i];
        bounds.count_high = count;
        bounds.mass_high = mass;
        bounds.value_high = values[i];
      }
    }
  }
}

// Copy keys and weights between the bounds into shared memory, in an order that does not depend on timing;
// returns how many. Reads the row twice; the barriers of group_sum and one more.
template <typename Logits>
inline int gather(const Row<Logits> row, const Bounds bounds, const Shared shared, const Place place) {
  int mine = 0;
  for (int id = place.index; id < row.vocabulary; id += THREADS) {
    const ulong key = row.key(id);
    mine += key >= bounds.low && key < bounds.high ? 1 : 0;
  }
  const int all = group_sum(mine, shared.integers, place);
  const int groups_before = simd_sum(place.lane < place.group ? shared.integers[place.lane] : 0);
  int slot = groups_before + simd_prefix_exclusive_sum(mine);
  for (int id = place.index; id < row.vocabulary; id += THREADS) {
    const ulong key = row.key(id);
    if (key >= bounds.low && key < bounds.high) {
      shared.keys[slot] = key;
      shared.weights[slot] = row.weight(id);
      slot++;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // all candidates are there
  return all;
}

// Cut the leading ranks at `target`: a count to keep, or the mass before which a rank must begin. The first
// rank always stays. On return nothing lies between the bounds: low is the cut, count_low and mass_low are
// what stays. Each candidate finds its rank by counting, n comparisons for n of them.
template <typename Logits>
inline void cut_ranks(
    const Row<Logits> row, const bool by_mass, const float target, thread Bounds& bounds, const Shared shared,
    const Place place) {
  narrow(row, by_mass, target, bounds, shared, place);
  const int candidates = gather(row, bounds, shared, place);
  int rank = candidates;
  bool stays = false;
  float weight = 0.0f;
  if (place.index < candidates) {
    const ulong key = shared.keys[place.index];
    float before = bounds.mass_high;
    rank = 0;
    for (int i = 0; i < candidates; i++) {
      const bool earlier = shared.keys[i] > key;
      rank += earlier ? 1 : 0;
      before += earlier ? shared.weights[i] : 0.0f;
    }
    const int ranks_before = bounds.count_high + rank;
    stays = ranks_before == 0 || (by_mass ? before < target : float(ranks_before) < target);
    weight = stays ? shared.weights[place.index] : 0.0f;
  }
  const int staying = group_sum(stays ? 1 : 0, shared.integers, place);
  const float mass = group_sum(weight, shared.floats, place);
  if (rank == staying - 1) {
    shared.cut[0] = shared.keys[place.index];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the cut is known
  // Where rounding has left nothing in between, everything from `high` on stays.
  bounds.low = staying > 0 ? shared.cut[0] : bounds.high;
  bounds.value_low = unordered(uint(bounds.low >> 32));
  bounds.count_low = bounds.count_high + staying;
  bounds.mass_low = bounds.mass_high + mass;
}
