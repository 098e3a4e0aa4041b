// Helpers (a header, not a kernel body): rows of GGUF blocks, read as 16-bit words.
//
// Every block format has an even size, so words are always aligned; nothing wider is assumed, since a block
// of Q6_K (210 bytes) starts at any multiple of 2. `Block` is one of the types of the other files here.

inline float half_of(const ushort word) {
  return float(as_type<half>(word));
}

// The signed byte number `which` (0 or 1) of a word.
inline int signed_byte(const ushort word, const int which) {
  return int(as_type<char>(uchar((word >> (8 * which)) & 0xff)));
}

template <typename Block>
struct BlockRows {
  typedef Block Unit;
  static constant constexpr int UNITS = Block::WEIGHTS / 32;

  const device ushort* words;
  int row_words;

  Unit load(const int row, const int unit) const {
    Unit held;
    held.load(words + row * row_words + unit / UNITS * Block::WORDS, unit % UNITS);
    return held;
  }

  // The column of x that meets the first weight of a unit.
  static int column(const int unit) {
    return unit / UNITS * Block::WEIGHTS + Block::first(unit % UNITS);
  }
};

// Row `row` of matrix `matrix`, of matrices of `rows` rows that are `columns` wide.
template <typename Block>
inline BlockRows<Block> block_rows(
    const device ushort* words, const int matrix, const int rows, const int row, const int columns) {
  const int row_words = columns / Block::WEIGHTS * Block::WORDS;
  return BlockRows<Block>{words + (long(matrix) * rows + row) * row_words, row_words};
}
