// Q6_K: 256 weights a block.
//
//   words 0-63    byte 64 h + 32 q + l: low four bits, weight 128 h + 32 q + l in the low nibble and
//                 128 h + 64 + 32 q + l in the high one
//   words 64-95   byte 32 h + l: bit pair p is the high bits of weight 128 h + 32 p + l
//   words 96-103  sixteen signed scales, one for 16 weights
//   word 104      d
//
// A unit takes l from 8 (unit % 4) on in half h = unit / 4: 16 bytes of nibbles and 8 of bit pairs are four
// runs of 8 weights. weight = d * scale * (code - 32).

struct SixBits {
  static constant constexpr int WEIGHTS = 256;
  static constant constexpr int WORDS = 105;
  static constant constexpr int HEAD = 9;  // the scales, d
  static constant constexpr int LENGTH = 8;
  static constant constexpr int STRIDE = 32;

  ushort low[8];
  ushort high[4];
  float scales[4];

  static int head_word(const int slot, const int) {
    return 96 + slot;
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int unit) {
    const int h = unit / 4;
    const int quarter = unit % 4;
    const float d = half_of(head.at(8));
    UNROLL
    for (int i = 0; i < 4; i++) {
      low[i] = block[32 * h + 4 * quarter + i];
      low[4 + i] = block[32 * h + 16 + 4 * quarter + i];
      high[i] = block[64 + 16 * h + 4 * quarter + i];
      scales[i] = d * float(signed_byte(head.either(h == 1, i, 4 + i), quarter / 2));
    }
  }

  static int first(const int unit) {
    return unit / 4 * 128 + unit % 4 * 8;
  }

  float code(const int part, const int i) const {
    const int bits = (low[4 * (part % 2) + i / 2] >> (8 * (i % 2) + 4 * (part / 2))) & 15;
    const int top = (high[i / 2] >> (8 * (i % 2) + 2 * part)) & 3;
    return float(bits | (top << 4));
  }

  float scale(const int part) const {
    return scales[part];
  }

  float offset(const int part) const {
    return -32.0f * scales[part];
  }
};
