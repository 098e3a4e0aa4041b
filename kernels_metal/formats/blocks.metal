// Helpers (a header, not a kernel body): rows of GGUF blocks, read as 16-bit words.
//
// Every block format has an even size, so words are always aligned; nothing wider is assumed, since a block
// of Q6_K (210 bytes) starts at any multiple of 2. `Block` is one of the types of the other files here.
//
// A block's head is the words that its units share: scales and offsets, and bits that lie apart from the
// codes. Slot s of it is word head_word(s, side) of the block, where side = unit % 2: in some formats even
// units share other words than odd ones. A unit is unpacked from its own words and a head, which stays in the
// block for a lane that takes one unit, and in registers for a lane that takes the units of a side in turn.

inline float half_of(const ushort word) {
  return float(as_type<half>(word));
}

// The signed byte number `which` (0 or 1) of a word.
inline int signed_byte(const ushort word, const int which) {
  return int(as_type<char>(uchar((word >> (8 * which)) & 0xff)));
}

// A head where it lies: what a unit asks for is loaded then, and nothing else.
template <typename Block>
struct HeadInPlace {
  const device ushort* block;
  int side;

  ushort at(const int slot) const {
    return block[Block::head_word(slot, side)];
  }

  ushort either(const bool second, const int slot, const int other) const {
    return block[second ? Block::head_word(other, side) : Block::head_word(slot, side)];
  }
};

// A head in registers. Slots must be constants once loops are unrolled, hence `either`: registers have no
// addresses.
template <typename Block>
struct HeadHeld {
  ushort words[Block::HEAD];

  void load(const device ushort* block, const int side) {
    UNROLL
    for (int slot = 0; slot < Block::HEAD; slot++) {
      words[slot] = block[Block::head_word(slot, side)];
    }
  }

  ushort at(const int slot) const {
    return words[slot];
  }

  ushort either(const bool second, const int slot, const int other) const {
    const ushort one = words[slot];
    const ushort two = words[other];
    return second ? two : one;
  }
};

template <typename Block>
struct BlockRows {
  typedef Block Unit;
  typedef HeadHeld<Block> Head;
  static constant constexpr int UNITS = Block::WEIGHTS / 32;
  static constant constexpr int STEPS = (UNITS + 1) / 2;  // units of one side in a block

  const device ushort* words;
  int row_words;

  const device ushort* block(const int row, const int unit) const {
    return words + row * row_words + unit / UNITS * Block::WORDS;
  }

  // A unit by itself.
  Unit load(const int row, const int unit) const {
    const device ushort* start = block(row, unit);
    Unit held;
    held.load(HeadInPlace<Block>{start, unit % 2}, start, unit % UNITS);
    return held;
  }

  // The head that a unit shares with the units of its block on its side.
  Head head(const int row, const int unit) const {
    Head held;
    held.load(block(row, unit), unit % 2);
    return held;
  }

  // A unit whose head is at hand.
  Unit load(const Head head, const int row, const int unit) const {
    Unit held;
    held.load(head, block(row, unit), unit % UNITS);
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
