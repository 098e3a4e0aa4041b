// Helpers (a header, not a kernel body): rows of packed weights times 1 to M vectors, by one simdgroup.
//
// Weights come through a type `Rows` that knows where they lie, and `Rows::Unit`, what one lane holds of
// 32 weights of a row. The weights of a unit lie in PARTS runs of LENGTH each, STRIDE columns apart, and
// weight i of run p is scale(p) * code(p, i) + offset(p). Its codes stay packed in 16- or 32-bit
// registers and are taken out by constant shifts, one bit-field extraction each.
//
// A simdgroup takes ROWS rows. Lane l takes units l, l + 32, ...: eight lanes share a superblock of 256
// weights, so four are in flight, and each byte of a row is loaded once, by one lane, for all M vectors.
// The offset costs one running sum of x per run, shared by the rows. Nothing is reduced before the end.
//
// Registers, counted as 32-bit live values at the innermost loop with ROWS = 4: packed codes 4 x 4 to 4 x 8
// (16 bytes of nibbles are 8 ushorts, two a register), scales and offsets 4 x 2 to 4 x 4, unpacked codes
// of 8 weights 4 x 8 = 32, x 8, sums 4 x M. About 85 for M = 1 and 115 for M = 8, under the 128 that a
// thread may have before values spill. Processing 8 weights at a time, and not all 32, keeps it there.

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int UNIT_WEIGHTS = 32;
constant constexpr int RUN = 8;

// sums[r * M + m] += rows r of the weights times vector m, this lane's share. `rows` and `vectors` say how
// many of ROWS and M exist. x: vectors of `columns` values each, a multiple of UNIT_WEIGHTS.
template <int ROWS, int M, typename Rows, typename T>
inline void multiply_rows(
    const Rows weights, const int rows, const device T* x, const int columns, const int vectors,
    const int lane, thread float* sums) {
  typedef typename Rows::Unit Unit;
  for (int unit = lane; unit < columns / UNIT_WEIGHTS; unit += 32) {
    Unit held[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      held[r] = Unit();
      if (r < rows) {
        held[r] = weights.load(r, unit);
      }
    }
    const device T* start = x + Rows::column(unit);
    UNROLL
    for (int first = 0; first < UNIT_WEIGHTS; first += RUN) {
      const int part = first / Unit::LENGTH;
      const int inside = first % Unit::LENGTH;
      float codes[ROWS][RUN];
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int i = 0; i < RUN; i++) {
          codes[r][i] = held[r].code(part, inside + i);
        }
      }
      UNROLL
      for (int m = 0; m < M; m++) {
        if (m < vectors) {
          const device T* values = start + m * columns + part * Unit::STRIDE + inside;
          float value[RUN];
          float total = 0.0f;
          UNROLL
          for (int i = 0; i < RUN; i++) {
            value[i] = float(values[i]);
            total += value[i];
          }
          UNROLL
          for (int r = 0; r < ROWS; r++) {
            float product = 0.0f;
            UNROLL
            for (int i = 0; i < RUN; i++) {
              product += codes[r][i] * value[i];
            }
            sums[r * M + m] += held[r].scale(part) * product + held[r].offset(part) * total;
          }
        }
      }
    }
  }
}
