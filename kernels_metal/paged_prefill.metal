// Body of paged_prefill_*: attention of a tile of 32 queries of one sequence and one K/V head, on matrices.
//
// Inputs and outputs as paged_decode. A task's tile holds pairs first_pair .. first_pair + 31 of its segment:
// all heads of the group for 32 / G rows, so that a key is read once for the group.
//
// Grid (HKV * 128, N, P), threadgroup (128, 1, 1): four simdgroups of 8 queries each. They load blocks of
// KEYS_A_BLOCK keys and values together, unpacking packed ones, and share them.
//
// Threadgroup memory: KEYS_A_BLOCK * (D + DV + 2 * PAD) values of T, at most 32 KiB; the launch takes the
// largest of 32, 16 and 8 keys that fits (float16: 17 KiB at 128 and 32 keys). PAD spare values keep rows apart
// in the banks. Barriers: two a block (it is full; it is used up).
// Registers (32-bit live values at the innermost loop): output DV / 4 (32 at 128, 64 at 256), queries D / 4
// where they are held (D up to 128, else read again for each block), scores KEYS_A_BLOCK / 4 (8), operands 4,
// query state 8, addresses and counters about 15: 99 at 128 and 99 at 256, of the 128 that a thread may have.

constexpr int TILES = KEYS_A_BLOCK / 8;
constexpr int QUERIES = 8;
constexpr int PAD = 16 / sizeof(T);
constexpr int KEY_PITCH = D + PAD;
constexpr int VALUE_PITCH = DV + PAD;
constexpr bool HELD = D <= 128;
constexpr int HQ = HKV * G;
const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int row = matrix_row(lane);
const int column = matrix_column(lane);
const int kv_head = int(threadgroup_position_in_grid.x);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const Task task = read_task(tasks + threadgroup_position_in_grid.y * 8);
const int pairs = task.rows * G;
const int tile_stop = min(task.first_pair + 4 * QUERIES, pairs);
const int first_pair = task.first_pair + group * QUERIES + column;  // this lane's queries: it and the next

threadgroup T key_block[KEYS_A_BLOCK * KEY_PITCH];
threadgroup T value_block[KEYS_A_BLOCK * VALUE_PITCH];

const auto keys = KEYS;
const auto values = VALUES;
const device int* pages = table + long(task.table_row) * table_shape[1];
const Keys all = {task.first_key(task.first_pair / G), task.position((tile_stop - 1) / G) + 1};
const Keys share = share_of<KEYS_A_BLOCK>(all, split, splits);
Query query = start_query<G>(task, first_pair);
const device T* vectors[2];
UNROLL
for (int i = 0; i < 2; i++) {
  const int pair = min(first_pair + i, pairs - 1);  // a query that is not there computes, and is not written
  vectors[i] = q + (long(task.query_row + pair / G) * HQ + kv_head * G + pair % G) * D;
}
Matrix held[HELD ? D / 8 : 1];
if (HELD) {
  UNROLL
  for (int f = 0; f < D / 8; f++) {
    held[f].thread_elements()[0] = float(vectors[0][f * 8 + row]) * scale;
    held[f].thread_elements()[1] = float(vectors[1][f * 8 + row]) * scale;
  }
}
Matrix output[DV / 8];
UNROLL
for (int f = 0; f < DV / 8; f++) {
  output[f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int first = share.first; first < share.stop; first += KEYS_A_BLOCK) {
  const int slot = slot_of<BS>(pages, task, first + lane, share.stop);
  for (int key = group; key < KEYS_A_BLOCK; key += 4) {
    const bool there = first + key < share.stop;
    const long vector = long(simd_shuffle(slot, ushort(key))) * HKV + kv_head;
    auto key_row = keys.row(vector);
    for (int i = lane; i < D / 2; i += 32) {
      const float2 pair = there ? keys.pair(key_row, i) : float2(0.0f, 0.0f);
      key_block[key * KEY_PITCH + 2 * i] = T(pair.x);
      key_block[key * KEY_PITCH + 2 * i + 1] = T(pair.y);
    }
    auto value_row = values.row(vector);
    for (int i = lane; i < DV / 2; i += 32) {
      const float2 pair = there ? values.pair(value_row, i) : float2(0.0f, 0.0f);
      value_block[key * VALUE_PITCH + 2 * i] = T(pair.x);
      value_block[key * VALUE_PITCH + 2 * i + 1] = T(pair.y);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the block is full
  // scores = keys x queries
  Matrix scores[TILES];
  UNROLL
  for (int t = 0; t < TILES; t++) {
    scores[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL
  for (int f = 0; f < D / 8; f++) {
    Matrix right;
    if (HELD) {
      right = held[f];
    } else {
      right.thread_elements()[0] = float(vectors[0][f * 8 + row]) * scale;
      right.thread_elements()[1] = float(vectors[1][f * 8 + row]) * scale;
    }
    UNROLL
    for (int t = 0; t < TILES; t++) {
      const threadgroup T* place = key_block + (t * 8 + row) * KEY_PITCH + f * 8 + column;
      Matrix left;
      left.thread_elements()[0] = float(place[0]);
      left.thread_elements()[1] = float(place[1]);
      simdgroup_multiply_accumulate(scores[t], left, right, scores[t]);
    }
  }
  soften<CAPPED>(scores, output, query, first, row, softcap);
  // output += values transposed x weights
  UNROLL
  for (int t = 0; t < TILES; t++) {
    UNROLL
    for (int f = 0; f < DV / 8; f++) {
      const threadgroup T* place = value_block + (t * 8 + column) * VALUE_PITCH + f * 8 + row;
      Matrix left;
      left.thread_elements()[0] = float(place[0]);
      left.thread_elements()[1] = float(place[VALUE_PITCH]);
      simdgroup_multiply_accumulate(output[f], left, scores[t], output[f]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the block is used up
}

UNROLL
for (int i = 0; i < 2; i++) {
  const float sum = column_sum(query.total[i]);
  const int pair = first_pair + i;
  if (pair < tile_stop) {
    const int head = kv_head * G + pair % G;
    const long place = (long(task.output_row + pair / G) * HQ + head) * splits + split;
    const float factor = SPLIT ? 1.0f : normaliser(query.top[i], sum, SINKING, SINKING ? sinks[head] : 0.0f);
    UNROLL
    for (int f = 0; f < DV / 8; f++) {
      out[place * DV + f * 8 + row] = O(output[f].thread_elements()[i] * factor);
    }
    if (row == 0) {
      top[place] = query.top[i];
      total[place] = sum;
    }
  }
}
