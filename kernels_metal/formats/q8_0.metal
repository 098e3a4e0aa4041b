// Q8_0: 32 weights a block.
//
//   word 0      d
//   words 1-16  signed bytes
//
// weight = d * code.

struct Bytes {
  static constant constexpr int WEIGHTS = 32;
  static constant constexpr int WORDS = 17;
  static constant constexpr int HEAD = 1;  // d
  static constant constexpr int LENGTH = 32;
  static constant constexpr int STRIDE = 32;

  ushort codes[16];
  float d;

  static int head_word(const int slot, const int) {
    return slot;
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int) {
    d = half_of(head.at(0));
    UNROLL
    for (int i = 0; i < 16; i++) {
      codes[i] = block[1 + i];
    }
  }

  static int first(const int) {
    return 0;
  }

  float code(const int, const int i) const {
    return float(signed_byte(codes[i / 2], i % 2));
  }

  float scale(const int) const {
    return d;
  }

  float offset(const int) const {
    return 0.0f;
  }
};
