// Q4_0, Q4_1, Q5_0, Q5_1: 32 weights a block.
//
//   word 0   d
//   word 1   m, with OFFSET
//   2 words  fifth bits of weights 0-15 and 16-31, with FIFTH
//   8 words  byte l: low nibble weight l, high nibble weight l + 16
//
// weight = d * code + m; without m the offset is -8 d or, with a fifth bit, -16 d.

template <bool FIFTH, bool OFFSET>
struct Nibbles {
  static constant constexpr int WEIGHTS = 32;
  static constant constexpr int HEAD = 1 + (OFFSET ? 1 : 0);  // d, m
  static constant constexpr int WORDS = HEAD + (FIFTH ? 2 : 0) + 8;
  static constant constexpr int LENGTH = 16;
  static constant constexpr int STRIDE = 16;

  ushort low[8];
  ushort fifth[2];
  float d;
  float m;

  static int head_word(const int slot, const int) {
    return slot;
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int) {
    d = half_of(head.at(0));
    m = OFFSET ? half_of(head.at(HEAD - 1)) : (FIFTH ? -16.0f : -8.0f) * d;
    UNROLL
    for (int i = 0; i < 2; i++) {
      fifth[i] = FIFTH ? block[HEAD + i] : ushort(0);
    }
    UNROLL
    for (int i = 0; i < 8; i++) {
      low[i] = block[WORDS - 8 + i];
    }
  }

  static int first(const int) {
    return 0;
  }

  float code(const int part, const int i) const {
    const int nibble = (low[i / 2] >> (8 * (i % 2) + 4 * part)) & 15;
    return float(FIFTH ? nibble | (((fifth[part] >> i) & 1) << 4) : nibble);
  }

  float scale(const int) const {
    return d;
  }

  float offset(const int) const {
    return m;
  }
};
