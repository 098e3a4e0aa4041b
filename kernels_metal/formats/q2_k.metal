// Q2_K: 256 weights a block.
//
//   words 0-7    16 bytes, one for 16 weights: scale in the low nibble, offset in the high one
//   words 8-39   byte 32 h + l: bit pair p is weight 128 h + 32 p + l
//   words 40-41  d, dmin
//
// A unit is 8 bytes of codes, l from 8 (unit % 4) on, in half h = unit / 4: four runs of 8 weights.
// weight = d * scale * code - dmin * offset.

struct BitPairs {
  static constant constexpr int WEIGHTS = 256;
  static constant constexpr int WORDS = 42;
  static constant constexpr int HEAD = 10;  // the scales and offsets, d, dmin
  static constant constexpr int LENGTH = 8;
  static constant constexpr int STRIDE = 32;

  ushort low[4];
  uchar scales[4];
  float d;
  float dmin;

  static int head_word(const int slot, const int) {
    return slot < 8 ? slot : 32 + slot;
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int unit) {
    const int h = unit / 4;
    const int quarter = unit % 4;
    UNROLL
    for (int i = 0; i < 4; i++) {
      low[i] = block[8 + 16 * h + 4 * quarter + i];
      scales[i] = uchar((head.either(h == 1, i, 4 + i) >> (8 * (quarter / 2))) & 0xff);
    }
    d = half_of(head.at(8));
    dmin = half_of(head.at(9));
  }

  static int first(const int unit) {
    return unit / 4 * 128 + unit % 4 * 8;
  }

  float code(const int part, const int i) const {
    return float((low[i / 2] >> (8 * (i % 2) + 2 * part)) & 3);
  }

  float scale(const int part) const {
    return d * float(scales[part] & 15);
  }

  float offset(const int part) const {
    return -dmin * float(scales[part] >> 4);
  }
};
