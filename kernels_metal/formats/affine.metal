// Helpers (a header, not a kernel body): matrices as mx.quantize stores them, BITS a weight.
//
// Row-major uint words hold the codes as one little-endian stream of bits, so 32 weights are BITS words; a
// scale and a bias serve GROUP (32 or more) weights. weight = scale * code + bias. A unit is 32 weights in a
// row. Some codes of 3, 5 and 6 bits lie in two words. S is the type of scales and biases.

template <int BITS>
struct AffineUnit {
  static constant constexpr int LENGTH = 32;
  static constant constexpr int STRIDE = 32;

  uint words[BITS];
  float factor;
  float bias;

  float code(const int, const int i) const {
    const int word = i * BITS / 32;
    const int shift = i * BITS % 32;
    uint bits = words[word] >> shift;
    if (shift + BITS > 32) {
      bits |= words[min(word + 1, BITS - 1)] << (32 - shift);
    }
    return float(bits & ((1u << BITS) - 1));
  }

  float scale(const int) const {
    return factor;
  }

  float offset(const int) const {
    return bias;
  }
};

template <typename S, int BITS, int GROUP>
struct AffineRows {
  typedef AffineUnit<BITS> Unit;

  const device uint* words;
  const device S* scales;
  const device S* biases;
  int row_units;

  Unit load(const int row, const int unit) const {
    Unit held;
    const device uint* start = words + (row * row_units + unit) * BITS;
    UNROLL
    for (int i = 0; i < BITS; i++) {
      held.words[i] = start[i];
    }
    const int group = row * (row_units * 32 / GROUP) + unit * 32 / GROUP;
    held.factor = float(scales[group]);
    held.bias = float(biases[group]);
    return held;
  }

  static int column(const int unit) {
    return unit * 32;
  }
};

// Row `row` of matrix `matrix`, of matrices of `rows` rows that are `columns` wide.
template <int BITS, int GROUP, typename S>
inline AffineRows<S, BITS, GROUP> affine_rows(
    const device uint* words, const device S* scales, const device S* biases, const int matrix,
    const int rows, const int row, const int columns) {
  const long line = long(matrix) * rows + row;
  const long groups = line * (columns / GROUP);
  const device uint* start = words + line * (columns / 32) * BITS;
  return AffineRows<S, BITS, GROUP>{start, scales + groups, biases + groups, columns / 32};
}
