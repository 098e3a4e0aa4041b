// Helpers (a header, not a kernel body): what decode and prompt kernels share. Comes after pages.metal.
//
// Scores are kept transposed, keys x queries, in 8 x 8 matrices: the softmax of a query then runs down a
// column, a lane keeps the same two queries in scores, weights and output alike, and weights go into the
// second product (values transposed x weights) without moving between lanes.
//
// A query is a (query row, query head of the group) pair; pair i of a segment is row i / G, head i % G.
// Softmax runs in base 2: queries are scaled by log2(e), except under a soft-cap, which scales afterwards.

typedef simdgroup_matrix<float, 8, 8> Matrix;

// Stands for "not visible"; finite, so that no difference of two is NaN. Real scores lie far above.
constant constexpr float MASKED = -1.0e37f;
constant constexpr float LOG2_E = 1.4426950408889634f;

// Where a lane's two elements (row, column), (row, column + 1) of an 8 x 8 matrix lie: Apple's map.
inline int matrix_row(const int lane) {
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
}

inline int matrix_column(const int lane) {
  return ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
}

// One unit of work, 8 integers of the array `tasks`: queries of a segment that a threadgroup takes together.
struct Task {
  int table_row;   // of the page table
  int query_row;   // of q, where the segment begins
  int output_row;  // of the outputs, where the segment begins
  int rows;        // query rows of the segment; the last sees position length - 1
  int length;      // keys of the sequence, these rows' own included
  int first_page;  // index, counted from position 0, of the page in column 0 of the table
  int first_pair;  // of the segment's pairs, where this task begins
  int window;      // keys a row sees at most; 0 for all

  int position(const int row) const {
    return length - rows + row;
  }

  int first_key(const int row) const {
    return window > 0 ? max(0, position(row) - window + 1) : 0;
  }
};

inline Task read_task(const device int* numbers) {
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]};
}

// Half-open range of keys.
struct Keys {
  int first;
  int stop;
};

// The share of split `split` of `splits` in keys first .. stop, in whole blocks of BLOCK keys.
template <int BLOCK>
inline Keys share_of(const Keys all, const int split, const int splits) {
  const int blocks = (max(all.stop - all.first, 0) + BLOCK - 1) / BLOCK;
  const int each = (blocks + splits - 1) / splits * BLOCK;
  const int first = min(all.first + split * each, all.stop);
  return {first, min(first + each, all.stop)};
}

// The place in the pool, page * BS + slot, of the key at `position`; 0 from `stop` on.
template <int BS>
inline int slot_of(const device int* pages, const Task task, const int position, const int stop) {
  if (position >= stop) {
    return 0;
  }
  return pages[position / BS - task.first_page] * BS + position % BS;
}

// What one lane knows of its two queries.
struct Query {
  int first_key[2];
  int last_key[2];
  float top[2];    // greatest score so far
  float total[2];  // of this lane's weights so far, relative to top
};

template <int G>
inline Query start_query(const Task task, const int pair) {
  Query query;
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int row = min((pair + i) / G, task.rows - 1);
    query.first_key[i] = task.first_key(row);
    query.last_key[i] = task.position(row);
    query.top[i] = MASKED;
    query.total[i] = 0.0f;
  }
  return query;
}

// The sum or the greatest of a column, over the eight lanes that share it.
inline float column_max(float value) {
  value = max(value, simd_shuffle_xor(value, ushort(2)));
  value = max(value, simd_shuffle_xor(value, ushort(4)));
  return max(value, simd_shuffle_xor(value, ushort(16)));
}

inline float column_sum(float value) {
  value += simd_shuffle_xor(value, ushort(2));
  value += simd_shuffle_xor(value, ushort(4));
  return value + simd_shuffle_xor(value, ushort(16));
}

// Turn scores [TILES * 8 keys from `first`, 8 queries] into weights, and bring sums and outputs to the new top.
template <bool CAPPED, int TILES, int OUT>
inline void soften(
    thread Matrix (&scores)[TILES], thread Matrix (&out)[OUT], thread Query& query, const int first,
    const int row, const float softcap) {
  UNROLL
  for (int i = 0; i < 2; i++) {
    float top = MASKED;
    UNROLL
    for (int t = 0; t < TILES; t++) {
      const int key = first + t * 8 + row;
      float score = scores[t].thread_elements()[i];
      if (CAPPED) {
        score = precise::tanh(score / softcap) * (softcap * LOG2_E);
      }
      score = key >= query.first_key[i] && key <= query.last_key[i] ? score : MASKED;
      scores[t].thread_elements()[i] = score;
      top = max(top, score);
    }
    top = max(column_max(top), query.top[i]);
    const float shrink = exp2(query.top[i] - top);
    float total = 0.0f;
    UNROLL
    for (int t = 0; t < TILES; t++) {
      const float score = scores[t].thread_elements()[i];
      const float weight = score > MASKED ? exp2(score - top) : 0.0f;
      scores[t].thread_elements()[i] = weight;
      total += weight;
    }
    query.top[i] = top;
    query.total[i] = query.total[i] * shrink + total;
    UNROLL
    for (int f = 0; f < OUT; f++) {
      out[f].thread_elements()[i] *= shrink;
    }
  }
}

// A sink takes weight and adds nothing: its factor on the output, with top and total of all keys. Zero where
// a query sees no key.
inline float normaliser(const float top, const float total, const bool sinking, const float sink) {
  if (total == 0.0f) {
    return 0.0f;
  }
  if (!sinking) {
    return 1.0f / total;
  }
  const float high = max(top, sink * LOG2_E);
  return exp2(top - high) / (total * exp2(top - high) + exp2(sink * LOG2_E - high));
}
