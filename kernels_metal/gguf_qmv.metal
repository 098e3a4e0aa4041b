// Body of gguf_qmv_*: y [V, N] = x [V, K] times the transpose of w [N, row words], V vectors of up to M.
//
// One simdgroup takes ROWS = 4 rows of w for all M vectors, two simdgroups a threadgroup:
// grid (32, ceil(N / 8) * 2, ceil(V / M)), threadgroup (32, 2, 1). Weights are read once for M vectors.
// No barrier, no threadgroup memory; registers: see matvec.metal.

constexpr int ROWS = 4;
const int lane = int(thread_index_in_simdgroup);
const int row = (int(threadgroup_position_in_grid.y) * 2 + int(simdgroup_index_in_threadgroup)) * ROWS;
const int vector = int(threadgroup_position_in_grid.z) * M;
const int all_rows = w_shape[0];
const int columns = x_shape[1];
const int rows = min(ROWS, all_rows - row);
const int vectors = min(M, x_shape[0] - vector);
if (rows <= 0) {
  return;
}

float sums[ROWS * M] = {0.0f};
multiply_rows<ROWS, M>(
    block_rows<Block>(w, 0, all_rows, row, columns), rows, x + long(vector) * columns, columns, vectors, lane,
    sums);
UNROLL
for (int r = 0; r < ROWS; r++) {
  UNROLL
  for (int m = 0; m < M; m++) {
    if (r < rows && m < vectors) {
      const float sum = simd_sum(sums[r * M + m]);
      if (lane == 0) {
        y[long(vector + m) * all_rows + row + r] = T(sum);
      }
    }
  }
}
