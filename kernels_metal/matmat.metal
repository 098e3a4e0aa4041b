// Helpers (a header, not a kernel body): a tile of 32 vectors by 64 rows of packed weights, by a threadgroup
// of four simdgroups, on 8 x 8 matrices. Comes after matvec.metal, whose `Rows` and units it uses.
//
// A step takes two units (64 weights) of every row: thread t unpacks unit t % 2 of row t / 2, whole, so that
// a byte is loaded once by one lane; the columns of x are gathered in the same order (runs of 8 or more),
// since the order of a sum is free. Weights are read once for 32 vectors: what the units of a block share
// (`Rows::Head`) stays in registers for the Rows::STEPS steps in which the thread goes through the block.
//
// Threadgroup memory: (64 + 32) rows of 64 + 8 values of T; 13.5 KiB for 16-bit T, 27 KiB for float32. The 8
// spare values keep rows apart in the banks. The result passes through the same memory.
// Barriers: two a step (the tiles are full; the tiles are used up), three at the end.
// Registers: 8 accumulators of 2 values, 6 operands of 2, a head (up to 16 words of 16 bits, so 8), one unit
// (up to 12) with its addresses: about 60. A head lives from step to step; a unit goes to the tile at once.

constant constexpr int TILE_VECTORS = 32;
constant constexpr int TILE_ROWS = 64;
constant constexpr int STEP = 2 * UNIT_WEIGHTS;
constant constexpr int PITCH = STEP + 8;
constant constexpr int POOL_VALUES = (TILE_VECTORS + TILE_ROWS) * PITCH;

// Unpack this thread's unit of step `step` into its place in `tile` [TILE_ROWS, PITCH]; zeros beyond the end.
// `head` is the thread's own, of the block that it is in: loaded with the block's first step.
template <typename Rows, typename T>
inline void fill_weights(
    threadgroup T* tile, const Rows weights, thread typename Rows::Head& head, const int rows,
    const int units, const int step, const int thread_index) {
  typedef typename Rows::Unit Unit;
  const int row = thread_index / 2;
  const int unit = step * 2 + thread_index % 2;
  threadgroup T* values = tile + row * PITCH + thread_index % 2 * UNIT_WEIGHTS;
  if (row < rows && unit < units) {
    if (step % Rows::STEPS == 0) {
      head = weights.head(row, unit);
    }
    const Unit held = weights.load(head, row, unit);
    UNROLL
    for (int i = 0; i < UNIT_WEIGHTS; i++) {
      const int part = i / Unit::LENGTH;
      values[i] = T(held.scale(part) * held.code(part, i % Unit::LENGTH) + held.offset(part));
    }
  } else {
    for (int i = 0; i < UNIT_WEIGHTS; i++) {
      values[i] = T(0.0f);
    }
  }
}

// Copy the columns of x that meet step `step` into `tile` [TILE_VECTORS, PITCH]; zeros beyond the end.
template <typename Rows, typename T>
inline void fill_vectors(
    threadgroup T* tile, const device T* x, const int vectors, const int columns, const int step,
    const int thread_index) {
  typedef typename Rows::Unit Unit;
  const int place = thread_index % STEP;
  const int unit = step * 2 + place / UNIT_WEIGHTS;
  const int i = place % UNIT_WEIGHTS;
  const int column = Rows::column(unit) + i / Unit::LENGTH * Unit::STRIDE + i % Unit::LENGTH;
  const bool inside = unit < columns / UNIT_WEIGHTS;
  for (int vector = thread_index / STEP; vector < TILE_VECTORS; vector += 2) {
    tile[vector * PITCH + place] = inside && vector < vectors ? x[long(vector) * columns + column] : T(0.0f);
  }
}

// sums += the 16 vectors by 32 rows of this simdgroup, over the step in the tiles.
template <typename T>
inline void multiply_tiles(
    const threadgroup T* x_tile, const threadgroup T* w_tile,
    thread simdgroup_matrix<float, 8, 8> (&sums)[2][4]) {
  simdgroup_matrix<T, 8, 8> left[2];
  simdgroup_matrix<T, 8, 8> right[4];
  for (int k = 0; k < STEP; k += 8) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      simdgroup_load(left[i], x_tile + i * 8 * PITCH + k, PITCH);
    }
    UNROLL
    for (int j = 0; j < 4; j++) {
      simdgroup_load(right[j], w_tile + j * 8 * PITCH + k, PITCH, ulong2(0, 0), true);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
      UNROLL
      for (int j = 0; j < 4; j++) {
        simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
      }
    }
  }
}

// y [vectors, rows] of a matrix with `pitch` rows in all, from up to TILE_VECTORS vectors x and TILE_ROWS
// rows of weights. All 128 threads call it, with the same arguments but their index.
template <typename Rows, typename T>
inline void multiply_tile(
    threadgroup float* pool, const Rows weights, const int rows, const device T* x, const int vectors,
    const int columns, device T* y, const int pitch, const int thread_index) {
  threadgroup T* w_tile = (threadgroup T*)pool;
  threadgroup T* x_tile = w_tile + TILE_ROWS * PITCH;
  const int simdgroup_index = thread_index / 32;
  const int first_vector = simdgroup_index / 2 * 16;
  const int first_row = simdgroup_index % 2 * 32;
  simdgroup_matrix<float, 8, 8> sums[2][4];
  UNROLL
  for (int i = 0; i < 2; i++) {
    UNROLL
    for (int j = 0; j < 4; j++) {
      sums[i][j] = simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  typename Rows::Head head = typename Rows::Head();
  const int units = columns / UNIT_WEIGHTS;
  for (int step = 0; step < (units + 1) / 2; step++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step's tiles are used up
    fill_weights(w_tile, weights, head, rows, units, step, thread_index);
    fill_vectors<Rows>(x_tile, x, vectors, columns, step, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles are full
    multiply_tiles(x_tile + first_vector * PITCH, w_tile + first_row * PITCH, sums);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles give way to the result
  UNROLL
  for (int i = 0; i < 2; i++) {
    UNROLL
    for (int j = 0; j < 4; j++) {
      simdgroup_store(sums[i][j], pool + (first_vector + i * 8) * PITCH + first_row + j * 8, PITCH);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the result is whole
  const int row = thread_index % TILE_ROWS;
  for (int vector = thread_index / TILE_ROWS; vector < vectors; vector += 2) {
    if (row < rows) {
      y[long(vector) * pitch + row] = T(pool[vector * PITCH + row]);
    }
  }
}
