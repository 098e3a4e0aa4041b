// Body of paged_decode_*: attention of up to 8 queries of one sequence and one K/V head over paged keys.
//
// q [Tq, HQ, D] T; pages as KEYS and VALUES say; table int32 [S, MB]; tasks int32 [N, 8] (attention.metal);
// sinks float32 [HQ]; scale (with log2(e) unless CAPPED) and softcap float32. Rows of a task times G = HQ / HKV
// are at most 8. Outputs, for task rows in their own order: out O [rows, HQ, P, DV], top and total float32
// [rows, HQ, P]. P = 1 (SPLIT false): out is the attention, in T. Otherwise out is float32, the sum of
// weighted values relative to 2^top, and paged_reduce joins the P shares.
//
// Grid (HKV * 32, N * GROUPS, P), threadgroup (32, GROUPS, 1): a threadgroup takes all queries of one task
// and K/V head, so that a key is read once for the group's heads and the task's rows. Its simdgroups take
// blocks of 32 keys in turn, straight from the pool into 8 x 8 matrices, and meet only at the end.
//
// A product over D may take its terms in any order. Terms k of step f, two by two, are pair f of quarter k / 2
// of a key, so that a lane reads contiguous elements; likewise row r of output matrix f is element f of
// eighth r of a value (pages.metal says of what). D, DV and groups are multiples of 16.
//
// Threadgroup memory: 32 * max(D, DV) bytes for queries and then outputs (8 KiB at 256), 64 * GROUPS for
// tops and totals. Barriers: none an iteration; 2 + GROUPS in all.
// Registers (32-bit live values at the innermost loop): output DV / 4 (32 at 128, 64 at 256), scores 8, two
// operands 4, four rows of keys 8 (packed: 28), query state 8, addresses and counters about 15. For plain pages
// 75 at 128 and 107 at 256, for packed ones 95 and 127, of the 128 that a thread may have.

constexpr int BLOCK = 32;
constexpr int TILES = BLOCK / 8;
constexpr int QUERIES = 8;
constexpr int LARGEST = D > DV ? D : DV;
constexpr int HQ = HKV * G;
const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int thread_index = group * 32 + lane;
const int row = matrix_row(lane);
const int column = matrix_column(lane);
const int kv_head = int(threadgroup_position_in_grid.x);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const Task task = read_task(tasks + threadgroup_position_in_grid.y * 8);
const int queries = task.rows * G;

threadgroup float shared[LARGEST * QUERIES];
threadgroup float tops[GROUPS * QUERIES];
threadgroup float totals[GROUPS * QUERIES];

// queries, [D, 8]
for (int i = thread_index; i < D * QUERIES; i += GROUPS * 32) {
  const int pair = i / D;
  const int d = i % D;
  float value = 0.0f;
  if (pair < queries) {
    const long vector = long(task.query_row + pair / G) * HQ + kv_head * G + pair % G;
    value = float(q[vector * D + d]) * scale;
  }
  shared[d * QUERIES + pair] = value;
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // the queries are there

const auto keys = KEYS;
const auto values = VALUES;
constexpr int KEY_RUN = decltype(KEYS)::RUN;
constexpr int VALUE_RUN = decltype(VALUES)::RUN;
const device int* pages = table + long(task.table_row) * table_shape[1];
const Keys all = {task.first_key(0), task.length};
const Keys share = share_of<BLOCK>(all, split, splits);
Query query = start_query<G>(task, column);
Matrix output[DV / 8];
UNROLL
for (int f = 0; f < DV / 8; f++) {
  output[f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int first = share.first + group * BLOCK; first < share.stop; first += GROUPS * BLOCK) {
  const int slot = slot_of<BS>(pages, task, first + lane, share.stop);
  // scores = keys x queries
  Matrix scores[TILES];
  decltype(keys.row(0)) rows[TILES];
  UNROLL
  for (int t = 0; t < TILES; t++) {
    scores[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    rows[t] = keys.row(long(simd_shuffle(slot, ushort(t * 8 + row))) * HKV + kv_head);
  }
  for (int f = 0; f < D / 8; f++) {
    const int d = in_quarter<KEY_RUN>(row / 2, f) + row % 2;
    Matrix right;
    right.thread_elements()[0] = shared[d * QUERIES + column];
    right.thread_elements()[1] = shared[d * QUERIES + column + 1];
    UNROLL
    for (int t = 0; t < TILES; t++) {
      float2 pair = float2(0.0f, 0.0f);
      if (first + t * 8 + row < share.stop) {
        pair = keys.pair(rows[t], in_quarter<KEY_RUN>(column / 2, f) / 2);
      }
      Matrix left;
      left.thread_elements()[0] = pair.x;
      left.thread_elements()[1] = pair.y;
      simdgroup_multiply_accumulate(scores[t], left, right, scores[t]);
    }
  }
  soften<CAPPED>(scores, output, query, first, row, softcap);
  // out += values transposed x weights
  UNROLL
  for (int t = 0; t < TILES; t++) {
    const int key = first + t * 8 + column;
    auto even = values.row(long(simd_shuffle(slot, ushort(t * 8 + column))) * HKV + kv_head);
    auto odd = values.row(long(simd_shuffle(slot, ushort(t * 8 + column + 1))) * HKV + kv_head);
    UNROLL
    for (int f = 0; f < DV / 8; f += 2) {
      const int index = in_eighth<VALUE_RUN>(row, f) / 2;
      float2 one = float2(0.0f, 0.0f);
      float2 two = float2(0.0f, 0.0f);
      if (key < share.stop) {
        one = values.pair(even, index);
      }
      if (key + 1 < share.stop) {
        two = values.pair(odd, index);
      }
      Matrix left;
      left.thread_elements()[0] = one.x;
      left.thread_elements()[1] = two.x;
      simdgroup_multiply_accumulate(output[f], left, scores[t], output[f]);
      left.thread_elements()[0] = one.y;
      left.thread_elements()[1] = two.y;
      simdgroup_multiply_accumulate(output[f + 1], left, scores[t], output[f + 1]);
    }
  }
}

// the simdgroups' shares meet: first their tops and totals, then, one after another, their outputs [DV, 8]
UNROLL
for (int i = 0; i < 2; i++) {
  const float sum = column_sum(query.total[i]);
  if (row == 0) {
    tops[group * QUERIES + column + i] = query.top[i];
    totals[group * QUERIES + column + i] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // tops and totals are there, the queries are used up
float shrink[2];
UNROLL
for (int i = 0; i < 2; i++) {
  float high = MASKED;
  for (int g = 0; g < GROUPS; g++) {
    high = max(high, tops[g * QUERIES + column + i]);
  }
  shrink[i] = exp2(query.top[i] - high);
}
for (int g = 0; g < GROUPS; g++) {
  if (g == group) {
    UNROLL
    for (int f = 0; f < DV / 8; f++) {
      threadgroup float* place = shared + in_eighth<VALUE_RUN>(row, f) * QUERIES + column;
      UNROLL
      for (int i = 0; i < 2; i++) {
        const float value = output[f].thread_elements()[i] * shrink[i];
        place[i] = g == 0 ? value : place[i] + value;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // simdgroup g has added its share
}
for (int i = thread_index; i < queries * DV; i += GROUPS * 32) {
  const int pair = i / DV;
  const int d = i % DV;
  float high = MASKED;
  for (int g = 0; g < GROUPS; g++) {
    high = max(high, tops[g * QUERIES + pair]);
  }
  float sum = 0.0f;
  for (int g = 0; g < GROUPS; g++) {
    sum += totals[g * QUERIES + pair] * exp2(tops[g * QUERIES + pair] - high);
  }
  const int head = kv_head * G + pair % G;
  const long place = (long(task.output_row + pair / G) * HQ + head) * splits + split;
  const float factor = SPLIT ? 1.0f : normaliser(high, sum, SINKING, SINKING ? sinks[head] : 0.0f);
  out[place * DV + d] = O(shared[d * QUERIES + pair] * factor);
  if (d == 0) {
    top[place] = high;
    total[place] = sum;
  }
}
