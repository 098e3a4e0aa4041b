// Body of gguf_qmm_*: y [V, N] = x [V, K] times the transpose of w [N, row words], for prompts.
//
// A threadgroup takes 32 vectors by 64 rows: grid (ceil(N / 64) * 128, ceil(V / 32), 1), threadgroup
// (128, 1, 1). Memory, barriers and registers: see matmat.metal.

const int row = int(threadgroup_position_in_grid.x) * TILE_ROWS;
const int vector = int(threadgroup_position_in_grid.y) * TILE_VECTORS;
const int all_rows = w_shape[0];
const int columns = x_shape[1];
threadgroup float pool[POOL_VALUES * sizeof(T) / sizeof(float)];
multiply_tile(
    pool, block_rows<Block>(w, 0, all_rows, row, columns), min(TILE_ROWS, all_rows - row),
    x + long(vector) * columns, min(TILE_VECTORS, x_shape[0] - vector), columns,
    y + long(vector) * all_rows + row, all_rows, int(thread_index_in_threadgroup));
