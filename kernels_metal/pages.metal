// Helpers (a header, not a kernel body): keys and values as they lie in a pool of pages, read two
// neighbouring elements at a time. Both loaders have the same face; a header defines the macros KEYS and
// VALUES, by which a body names the loaders of its launch.
//
// The vector of (page, slot, K/V head) has number (page * page_size + slot) * HKV + head. A lane walks pairs
// of one vector through a `Row`. Pairs are read as single elements, since a buffer is only known to be aligned
// to its element. Lanes that share a vector take parts of each run of RUN elements, so that they are in one
// group of packed elements together and its scale and bias are loaded once for all.

#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

// As the model computes: T [NB, BS, HKV, SIZE].
template <typename T, int SIZE>
struct PlainPages {
  static constant constexpr int RUN = SIZE;
  const device T* values;

  struct Row {
    const device T* start;
  };

  Row row(const long vector) const {
    return {values + vector * SIZE};
  }

  float2 pair(thread Row& row, const int index) const {
    return float2(float(row.start[2 * index]), float(row.start[2 * index + 1]));
  }
};

// In BITS (8 or 4) as mx.quantize packs them, lowest bits first, w = scale * code + bias in groups of GROUP:
// words uint32 [NB, BS, HKV, SIZE * BITS / 32], here seen as bytes; scales and biases T
// [NB, BS, HKV, SIZE / GROUP].
template <typename T, int SIZE, int BITS, int GROUP>
struct PackedPages {
  static constant constexpr int RUN = GROUP;
  const device uchar* bytes;
  const device T* scales;
  const device T* biases;

  // The scale and bias of the last group that was met stay in registers.
  struct Row {
    const device uchar* bytes;
    long first_group;
    int group;
    float scale;
    float bias;
  };

  Row row(const long vector) const {
    return {bytes + vector * (SIZE * BITS / 8), vector * (SIZE / GROUP), -1, 0.0f, 0.0f};
  }

  float2 pair(thread Row& row, const int index) const {
    const int group = 2 * index / GROUP;
    if (group != row.group) {
      row.group = group;
      row.scale = float(scales[row.first_group + group]);
      row.bias = float(biases[row.first_group + group]);
    }
    float2 codes;
    if (BITS == 8) {
      codes = float2(float(row.bytes[2 * index]), float(row.bytes[2 * index + 1]));
    } else {
      const uint both = row.bytes[index];
      codes = float2(float(both & 15u), float(both >> 4));
    }
    return codes * row.scale + row.bias;
  }
};

// The first element of pair `step` (0 .. RUN / 8 - 1 in each run) of quarter `quarter` of the runs.
template <int RUN>
inline int in_quarter(const int quarter, const int step) {
  return step / (RUN / 8) * RUN + quarter * (RUN / 4) + step % (RUN / 8) * 2;
}

// Element `step` (0 .. RUN / 8 - 1 in each run) of eighth `eighth` of the runs.
template <int RUN>
inline int in_eighth(const int eighth, const int step) {
  return step / (RUN / 8) * RUN + eighth * (RUN / 8) + step % (RUN / 8);
}
