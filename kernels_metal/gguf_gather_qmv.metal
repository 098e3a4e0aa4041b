// Body of gguf_gather_qmv_*: y [P, N], row p = x [X, K] row p / (P / X) times the transpose of expert
// indices[p] of w [E, N, row words].
//
// Launched as gguf_qmv with one vector: grid (32, ceil(N / 8) * 2, P), threadgroup (32, 2, 1). An index out
// of range is the caller's fault and reads what is not there.

constexpr int ROWS = 4;
const int lane = int(thread_index_in_simdgroup);
const int row = (int(threadgroup_position_in_grid.y) * 2 + int(simdgroup_index_in_threadgroup)) * ROWS;
const int pair = int(threadgroup_position_in_grid.z);
const int all_rows = w_shape[1];
const int columns = x_shape[1];
const int rows = min(ROWS, all_rows - row);
const int vector = pair / (indices_shape[0] / x_shape[0]);
if (rows <= 0) {
  return;
}

float sums[ROWS] = {0.0f};
multiply_rows<ROWS, 1>(
    block_rows<Block>(w, indices[pair], all_rows, row, columns), rows, x + long(vector) * columns, columns, 1,
    lane, sums);
UNROLL
for (int r = 0; r < ROWS; r++) {
  const float sum = simd_sum(sums[r]);
  if (lane == 0 && r < rows) {
    y[long(pair) * all_rows + row + r] = T(sum);
  }
}
