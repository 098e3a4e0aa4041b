// Body of moe_down_*: y [X, N] = sum over j of scores [X, j] * (h [X, j] down[e]^T) with e = indices [X, j],
// for h [X, k, F] and experts of N rows. The k products are added before the only reduction.
//
// A simdgroup takes ROWS = 4 rows for one row of x and goes through its k experts: grid (32,
// ceil(N / 8) * 2, X), threadgroup (32, 2, 1). MATRIX as in moe_gate_up. Registers: as matvec.metal for
// M = 1, and 4 more sums. No barrier, no threadgroup memory. An index out of range reads what is not there.

constexpr int ROWS = 4;
const int lane = int(thread_index_in_simdgroup);
const int row = (int(threadgroup_position_in_grid.y) * 2 + int(simdgroup_index_in_threadgroup)) * ROWS;
const int token = int(threadgroup_position_in_grid.z);
const int all_rows = down_shape[1];
const int slots = indices_shape[1];
const int columns = h_shape[2];
const int rows = min(ROWS, all_rows - row);
if (rows <= 0) {
  return;
}

float sums[ROWS] = {0.0f};
for (int slot = token * slots; slot < (token + 1) * slots; slot++) {
  float products[ROWS] = {0.0f};
  multiply_rows<ROWS, 1>(
      MATRIX(down, indices[slot], all_rows, row, columns), rows, h + long(slot) * columns, columns, 1, lane,
      products);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    sums[r] += scores[slot] * products[r];
  }
}
UNROLL
for (int r = 0; r < ROWS; r++) {
  const float sum = simd_sum(sums[r]);
  if (lane == 0 && r < rows) {
    y[long(token) * all_rows + row + r] = T(sum);
  }
}
