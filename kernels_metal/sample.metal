// Body of sample: token [B] and logprob [B] of logits [B, V]; the definition is in sample.py.
//
// A threadgroup of 1024 takes a row: grid (1024, B, 1), threadgroup (1024, 1, 1). The row is read twice for
// maximum and sums, four to ten times for a filter that has to search (ranking.metal), and little more than
// once for the draw. A search ends when 512 candidates are left, which are ranked exactly; there is no sort.
// Threadgroup memory 6.4 KiB. Barriers: two a sum; they are met by all, since every condition is a sum.
// Registers: bounds 10, pivots 6, values, counts and masses 9, row 5, addresses and a key 6: about 40, so
// that 1024 threads fit.

const int batch = int(threadgroup_position_in_grid.y);
const int vocabulary = logits_shape[1];
threadgroup float shared_floats[GROUPS];
threadgroup int shared_integers[GROUPS];
threadgroup ulong shared_keys[CAPACITY];
threadgroup float shared_weights[CAPACITY];
threadgroup ulong shared_cut[1];
const Shared shared = {shared_floats, shared_integers, shared_keys, shared_weights, shared_cut};
const Place place = {
    int(thread_index_in_threadgroup), int(thread_index_in_simdgroup), int(simdgroup_index_in_threadgroup)};
const float temperature = params[4 * batch];
const float top_k = params[4 * batch + 1];
const float top_p = params[4 * batch + 2];
const float min_p = params[4 * batch + 3];
auto start = logits + long(batch) * vocabulary;

float top = -INFINITY;
float bottom = INFINITY;
for (int id = place.index; id < vocabulary; id += THREADS) {
  const float value = float(start[id]);
  top = max(top, value);
  bottom = value > -INFINITY ? min(bottom, value) : bottom;
}
top = group_max(top, shared.floats, place);
bottom = -group_max(-bottom, shared.floats, place);

const auto row = make_row(start, vocabulary, top, temperature > 0.0f ? temperature : 1.0f);
float plain = 0.0f;
float mass = 0.0f;
int first = vocabulary;
for (int id = place.index; id < vocabulary; id += THREADS) {
  const float value = row.value(id);
  plain += exp(value - top);
  mass += row.weight(id);
  first = value == top ? min(first, id) : first;
}
plain = group_sum(plain, shared.floats, place);
mass = group_sum(mass, shared.floats, place);
int chosen = -group_max(-first, shared.integers, place);

if (temperature > 0.0f) {
  Bounds bounds = {0, ~ulong(0), vocabulary, 0, mass, 0.0f, bottom, top};
  if (top_k > 0.0f && top_k < float(vocabulary)) {
    cut_ranks(row, false, top_k, bounds, shared, place);
  }
  if (top_p < 1.0f) {
    bounds.high = ~ulong(0);
    bounds.count_high = 0;
    bounds.mass_high = 0.0f;
    bounds.value_high = top;
    cut_ranks(row, true, max(top_p * bounds.mass_low, 1e-30f), bounds, shared, place);
  }

  // Inverse CDF: of 32 parts of the ids, the one in which the running sum passes what remains of the
  // target; then the same within it, down to one id.
  int begin = 0;
  int length = vocabulary;
  float remaining = 0.0f;
  while (length > 1) {
    const int part = (length + GROUPS - 1) / GROUPS;
    const int from = begin + place.group * part;
    float sum = 0.0f;
    for (int id = from + place.lane; id < min(from + part, begin + length); id += 32) {
      const float weight = row.weight(id);
      sum += row.key(id) >= bounds.low && weight >= min_p ? weight : 0.0f;
    }
    const float total = group_sum(sum, shared.floats, place);
    const float own = shared.floats[place.lane];
    const float end = simd_prefix_inclusive_sum(own);
    remaining = length == vocabulary ? u[batch] * total : remaining;
    const int last = simd_max(own > 0.0f ? place.lane : 0);
    const int passed = simd_min(own > 0.0f && end > remaining ? place.lane : last);
    remaining = max(remaining - simd_shuffle(end - own, ushort(passed)), 0.0f);
    length = min(part, length - passed * part);
    begin += passed * part;
  }
  chosen = begin;
}

if (place.index == 0) {
  token[batch] = chosen;
  logprob[batch] = row.value(chosen) - top - log(plain);
}
