// Body of paged_reduce: joins the P shares of split keys.
//
// out float32 [rows, HQ, P, DV], top and total float32 [rows, HQ, P] as paged_decode and paged_prefill write
// them; sinks float32 [HQ]. result T [rows, HQ, DV]; zero where a row saw no key.
//
// A simdgroup takes one row and head: grid (HQ * 32, rows, 1), threadgroup (32, 1, 1). No barriers, no
// threadgroup memory. Registers: DV / 32 sums (8 at 256) and about 10 more.

constexpr int HELD = (DV + 31) / 32;
const int lane = int(thread_index_in_simdgroup);
const int head = int(threadgroup_position_in_grid.x);
const int splits = top_shape[2];
const long first = (long(threadgroup_position_in_grid.y) * top_shape[1] + head) * splits;

float high = MASKED;
for (int p = lane; p < splits; p += 32) {
  high = max(high, top[first + p]);
}
high = simd_max(high);
float sums[HELD] = {0.0f};
float weight = 0.0f;
for (int p = 0; p < splits; p++) {
  const float shrink = exp2(top[first + p] - high);
  weight += total[first + p] * shrink;
  UNROLL
  for (int i = 0; i < HELD; i++) {
    const int d = i * 32 + lane;
    if (d < DV) {
      sums[i] += out[(first + p) * DV + d] * shrink;
    }
  }
}
const float factor = normaliser(high, weight, SINKING, SINKING ? sinks[head] : 0.0f);
UNROLL
for (int i = 0; i < HELD; i++) {
  const int d = i * 32 + lane;
  if (d < DV) {
    result[(first / splits) * DV + d] = T(sums[i] * factor);
  }
}
