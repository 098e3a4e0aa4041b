// Body of gguf_gather_qmm_*: as gguf_gather_qmv for many rows x [P, K] that are sorted by expert.
//
// tiles i32 [TILES, 3]: expert, first row and number of rows (0 to 32) of each tile of vectors:
// grid (ceil(N / 64) * 128, TILES, 1), threadgroup (128, 1, 1). See matmat.metal.

const int tile = int(threadgroup_position_in_grid.y);
const int expert = tiles[3 * tile];
const int vector = tiles[3 * tile + 1];
const int vectors = tiles[3 * tile + 2];
const int row = int(threadgroup_position_in_grid.x) * TILE_ROWS;
const int all_rows = w_shape[1];
const int columns = x_shape[1];
threadgroup float pool[POOL_VALUES * sizeof(T) / sizeof(float)];
if (vectors == 0) {
  return;
}

multiply_tile(
    pool, block_rows<Block>(w, expert, all_rows, row, columns), min(TILE_ROWS, all_rows - row),
    x + long(vector) * columns, vectors, columns, y + long(vector) * all_rows + row, all_rows,
    int(thread_index_in_threadgroup));
