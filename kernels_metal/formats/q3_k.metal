// Q3_K: 256 weights a block.
//
//   words 0-15   byte l: bit 4 h + p is the third bit of weight 128 h + 32 p + l
//   words 16-47  byte 32 h + l: bit pair p is the low bits of weight 128 h + 32 p + l
//   words 48-51  low nibbles of the scales: byte s % 8, low nibble for s < 8, high for the others
//   words 52-53  high bits of the scales: byte s % 4, bit pair s / 4
//   word 54      d
//
// Scale s holds for weights 16 s and up. A unit is as in Q2_K: its four scales are s = 8 h + 2 p +
// (unit % 4) / 2. weight = d * (scale - 32) * (code - 4).

struct BitTriples {
  static constant constexpr int WEIGHTS = 256;
  static constant constexpr int WORDS = 55;
  static constant constexpr int HEAD = 15;  // the third bits of a side, the scales, d
  static constant constexpr int LENGTH = 8;
  static constant constexpr int STRIDE = 32;

  ushort low[4];
  ushort high[4];
  float scales[4];

  static int head_word(const int slot, const int side) {
    return slot < 8 ? slot / 4 * 8 + 4 * side + slot % 4 : 40 + slot;
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int unit) {
    const int h = unit / 4;
    const int quarter = unit % 4;
    const int shift = 8 * (quarter / 2) + 4 * h;
    const float d = half_of(head.at(14));
    const ushort tops[2] = {head.at(12), head.at(13)};
    UNROLL
    for (int i = 0; i < 4; i++) {
      low[i] = block[16 + 16 * h + 4 * quarter + i];
      high[i] = ushort((head.either(quarter / 2 == 1, i, 4 + i) >> (4 * h)) & 0x0f0f);
      const int bits = (head.at(8 + i) >> shift) & 15;
      const int top = (tops[i % 2] >> (shift + 2 * (i / 2))) & 3;
      scales[i] = d * float((bits | (top << 4)) - 32);
    }
  }

  static int first(const int unit) {
    return unit / 4 * 128 + unit % 4 * 8;
  }

  float code(const int part, const int i) const {
    const int bits = (low[i / 2] >> (8 * (i % 2) + 2 * part)) & 3;
    const int third = (high[i / 2] >> (8 * (i % 2) + part)) & 1;
    return float(bits | (third << 2));
  }

  float scale(const int part) const {
    return scales[part];
  }

  float offset(const int part) const {
    return -4.0f * scales[part];
  }
};
