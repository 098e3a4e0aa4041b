// Body of moe_gate_up_*: h [X, k, F] = activation(x gate[e]^T) * (x up[e]^T) with e = indices [X, k], for
// x [X, K] and experts gate, up of F rows each. One launch, nothing in between is written.
//
// A simdgroup takes ROWS = 4 rows of both matrices of one expert for one row of x: grid (32,
// ceil(F / 8) * 2, X * k), threadgroup (32, 2, 1). The header's MATRIX(name, expert, rows, row, columns) says
// where weights lie: MLX's affine words or GGUF blocks. Registers: as matvec.metal for M = 1, and 4 more
// sums. No barrier, no threadgroup memory. An index out of range reads what is not there.

constexpr int ROWS = 4;
const int lane = int(thread_index_in_simdgroup);
const int row = (int(threadgroup_position_in_grid.y) * 2 + int(simdgroup_index_in_threadgroup)) * ROWS;
const int pair = int(threadgroup_position_in_grid.z);
const int all_rows = gate_shape[1];
const int columns = x_shape[1];
const int rows = min(ROWS, all_rows - row);
if (rows <= 0) {
  return;
}

const int expert = indices[pair];
const device T* vector = x + long(pair / indices_shape[1]) * columns;
float gates[ROWS] = {0.0f};
float ups[ROWS] = {0.0f};
multiply_rows<ROWS, 1>(MATRIX(gate, expert, all_rows, row, columns), rows, vector, columns, 1, lane, gates);
multiply_rows<ROWS, 1>(MATRIX(up, expert, all_rows, row, columns), rows, vector, columns, 1, lane, ups);
UNROLL
for (int r = 0; r < ROWS; r++) {
  const float gated = simd_sum(gates[r]);
  const float value = simd_sum(ups[r]);
  if (lane == 0 && r < rows) {
    h[long(pair) * all_rows + row + r] = T(activate<ACTIVATION>(gated, value));
  }
}
