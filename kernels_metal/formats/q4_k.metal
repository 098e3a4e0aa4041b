// Q4_K and, with FIFTH, Q5_K: 256 weights a block in eight sub-blocks of 32.
//
//   words 0-1  d, dmin
//   words 2-7  twelve bytes with eight scales and eight offsets of six bits, see load()
//   16 words   byte l: bit j is the fifth bit of weight 32 j + l, with FIFTH
//   64 words   byte 32 g + l: low nibble weight 64 g + l, high nibble weight 64 g + 32 + l
//
// A unit is 16 bytes of nibbles, half of group g = unit / 2: two runs of 16 weights, of sub-blocks 2 g and
// 2 g + 1. weight = d * scale * code - dmin * offset.

template <bool FIFTH>
struct ScaledNibbles {
  static constant constexpr int WEIGHTS = 256;
  static constant constexpr int WORDS = 72 + (FIFTH ? 16 : 0);
  static constant constexpr int HEAD = 8 + (FIFTH ? 8 : 0);  // the first eight words, fifth bits of a side
  static constant constexpr int LENGTH = 16;
  static constant constexpr int STRIDE = 32;

  ushort low[8];
  ushort fifth[8];
  ushort scales;   // two bytes, for the two runs
  ushort offsets;
  float d;
  float dmin;

  static int head_word(const int slot, const int side) {
    return slot + (slot < 8 ? 0 : 8 * side);
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int unit) {
    const int group = unit / 2;
    const int half_group = unit % 2;
    d = half_of(head.at(0));
    dmin = half_of(head.at(1));
    // Sub-blocks 0-3 keep scale and offset in the low six bits of bytes 0-3 and 4-7; sub-blocks 4-7 their
    // low four bits in the nibbles of bytes 8-11 and the high two in the top of bytes 0-3 and 4-7.
    const ushort a = head.either(group % 2 == 1, 2, 3);
    const ushort b = head.either(group % 2 == 1, 4, 5);
    const ushort c = head.either(group % 2 == 1, 6, 7);
    scales = ushort(group < 2 ? a & 0x3f3f : (c & 0x0f0f) | ((a >> 2) & 0x3030));
    offsets = ushort(group < 2 ? b & 0x3f3f : ((c >> 4) & 0x0f0f) | ((b >> 2) & 0x3030));
    UNROLL
    for (int i = 0; i < 8; i++) {
      low[i] = block[WORDS - 64 + 16 * group + 8 * half_group + i];
      fifth[i] = FIFTH ? ushort((head.at(FIFTH ? 8 + i : 0) >> (2 * group)) & 0x0303) : ushort(0);
    }
  }

  static int first(const int unit) {
    return unit / 2 * 64 + unit % 2 * 16;
  }

  float code(const int part, const int i) const {
    const int nibble = (low[i / 2] >> (8 * (i % 2) + 4 * part)) & 15;
    return float(FIFTH ? nibble | (((fifth[i / 2] >> (8 * (i % 2) + part)) & 1) << 4) : nibble);
  }

  float scale(const int part) const {
    return d * float((scales >> (8 * part)) & 0xff);
  }

  float offset(const int part) const {
    return -dmin * float((offsets >> (8 * part)) & 0xff);
  }
};
