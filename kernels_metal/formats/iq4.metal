// IQ4_NL (32 weights a block) and, with SCALED, IQ4_XS (256 in eight sub-blocks of 32).
//
//   word 0     d
//   word 1     bit pair j: high bits of the scale of sub-block j, with SCALED
//   words 2-3  nibble j: low bits of that scale, with SCALED
//   8 words a sub-block  byte l: low nibble weight l, high nibble weight l + 16
//
// A nibble picks one of sixteen levels. A unit is a sub-block. weight = d * (scale - 32) * level, or d *
// level. The table is read by index, a lane its own: 64 bytes of constant memory that stay in the cache.

constant float LEVELS[16] = {
    -127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
    1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f};

template <bool SCALED>
struct Levels {
  static constant constexpr int WEIGHTS = SCALED ? 256 : 32;
  static constant constexpr int HEAD = SCALED ? 4 : 1;  // the words before the nibbles
  static constant constexpr int WORDS = HEAD + WEIGHTS / 4;
  static constant constexpr int LENGTH = 16;
  static constant constexpr int STRIDE = 16;

  ushort low[8];
  float d;

  static int head_word(const int slot, const int) {
    return slot;
  }

  template <typename Head>
  void load(const Head head, const device ushort* block, const int unit) {
    d = half_of(head.at(0));
    if (SCALED) {
      const int bits = (head.either(unit >= 4, SCALED ? 2 : 0, SCALED ? 3 : 0) >> (4 * (unit % 4))) & 15;
      const int top = (head.at(SCALED ? 1 : 0) >> (2 * unit)) & 3;
      d *= float((bits | (top << 4)) - 32);
    }
    UNROLL
    for (int i = 0; i < 8; i++) {
      low[i] = block[HEAD + 8 * unit + i];
    }
  }

  static int first(const int unit) {
    return 32 * unit;
  }

  float code(const int part, const int i) const {
    return LEVELS[(low[i / 2] >> (8 * (i % 2) + 4 * part)) & 15];
  }

  float scale(const int) const {
    return d;
  }

  float offset(const int) const {
    return 0.0f;
  }
};
