// Softmax of one step: the scores of 128 keys become weights, in one shared body for every GPU.
//
// A thread holds rows g and g + 8 (r = 0, 1) of 16 and, of each 8 columns n, columns 2 t and
// 2 t + 1: c[4 n + 2 r + e]. Every tensor core instruction of 16 x 8 blocks lays them out so.
// Columns 0..63 belong to the step's first KV tile, 64..127 to its second.
#pragma once

#include "../params.h"
#include "arithmetic.cuh"

namespace nox {

// The two KV tiles of a step. Only whether they are full is read ahead; the scales are read where
// they are needed, while the largest score is still sought: registers are short.
struct StepTiles {
  const TileHeader* header;
  bool has_both;  // false for an odd last tile, whose partner is never weighed
  bool is_full;

  __device__ __forceinline__ StepTiles(const TileHeader* header, bool has_both)
      : header(header),
        has_both(has_both),
        is_full(has_both && header[0].valid_count + header[1].valid_count == 2.0f * kKvTile) {}

  __device__ __forceinline__ float k_scale(int half, int t) const {
    return header[half].k_scale[t];
  }

  __device__ __forceinline__ float log2_v_scale(int half) const {
    return header[half].log2_v_scale;
  }

  // Which of this thread's 32 columns are real keys: bit 2 n + e is column 8 n + 2 t + e. They come
  // first in each half, so of each half the lowest bits are set.
  __device__ __forceinline__ unsigned key_bits(int t) const {
    unsigned bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int count = half == 0 || has_both ? __float2int_rz(header[half].valid_count) : 0;
      const int columns = 2 * (count >> 3) + min(max((count & 7) - 2 * t, 0), 2);
      bits |= ((1u << columns) - 1) << (16 * half);
    }
    return bits;
  }
};

// Tests the bits anew: 32 predicates kept from one pass to the next would spill.
__device__ __forceinline__ unsigned reread(unsigned bits) {
  asm("" : "+r"(bits));
  return bits;
}

__device__ __forceinline__ bool is_key(unsigned bits, int n, int e) {
  return bits >> (2 * n + e) & 1;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

constexpr int kNoScore = -(1 << 30);  // below every sum of 128 products of two signed bytes

// Largest score of row r in one half; of real keys only where masked, kNoScore if there is none.
template <bool kMasked>
__device__ __forceinline__ int half_max(const int (&c)[64], unsigned keys, int r, int half) {
  keys = reread(keys);
  int highest = kNoScore;
#pragma unroll
  for (int n = 8 * half; n < 8 * half + 8; ++n) {
    int a = c[4 * n + 2 * r], b = c[4 * n + 2 * r + 1];
    if (kMasked) {
      a = is_key(keys, n, 0) ? a : kNoScore;
      b = is_key(keys, n, 1) ? b : kNoScore;
    }
    highest = max(max(a, b), highest);
  }
  return highest;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// ---- u8 weights, s8 values -------------------------------------------------------------------

// Two rows' softmax with INT8 P V. O and the denominator are kept in units of 2^level: the step's
// maximum less log2(255), but within 24 bits of the running maximum, so that O cannot overflow.
// The tile scale of V rides in the exponent and is divided out of the denominator again.
struct Int8Softmax {
  using Sum = int;  // of P V
  static constexpr bool kIsE4m3 = false;

  float running[2] = {-1e30f, -1e30f};
  float level[2] = {-1e30f, -1e30f};
  float denominator[2] = {0.0f, 0.0f};  // this thread's columns

  // Scores -> weights in 0..255, as float bits in place, unrounded; and what O is to be carried by.
  __device__ __forceinline__ void weigh(int (&c)[64], float (&carry)[2], const float (&q_scale)[2],
                                        const StepTiles& tiles, float log2_scale, int t, bool) {
    int highest_score[2][2];  // [row][half]
    const bool is_full = tiles.is_full;
    if (is_full) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        highest_score[i >> 1][i & 1] = half_max<false>(c, 0, i >> 1, i & 1);
      }
    } else {
      const unsigned keys = tiles.key_bits(t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        highest_score[i >> 1][i & 1] = half_max<true>(c, keys, i >> 1, i & 1);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float factor[2], highest[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int score = highest_score[r][half];
        factor[half] = __fmul_rn(__fmul_rn(q_scale[r], tiles.k_scale(half, t)), log2_scale);
        highest[half] =
            __fmaf_rn(__int2float_rn(score), factor[half], tiles.log2_v_scale(half));
        if (score == kNoScore) highest[half] = minus_infinity();
      }
      const float step = quad_max(fmaxf(highest[0], highest[1]));
      running[r] = fmaxf(running[r], step);
      const float fresh = fmaxf(__fadd_rn(step, -7.994f), __fadd_rn(running[r], -24.0f));
      carry[r] = exp2_approx(__fadd_rn(level[r], -fresh));
      level[r] = fresh;
      const float addend[2] = {__fadd_rn(tiles.log2_v_scale(0), -fresh),
                               __fadd_rn(tiles.log2_v_scale(1), -fresh)};
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int& x = c[4 * n + 2 * r + e];
          x = __float_as_int(
              exp2_approx(__fmaf_rn(__int2float_rn(x), factor[n >> 3], addend[n >> 3])));
        }
      }
    }
    // The block border here also keeps ptxas from moving the wait for P V, which follows, up
    // before the exponentials that are to hide it.
    if (!is_full) {
      const unsigned keys = tiles.key_bits(t);
#pragma unroll
      for (int i = 0; i < 64; ++i) c[i] = is_key(keys, i >> 2, i & 1) ? c[i] : 0;
    }
  }

  // Weights -> A operands of four k32 steps; adds them to the denominator, as rounded.
  __device__ __forceinline__ void pack(const int (&c)[64], unsigned (&a)[16],
                                       const float (&carry)[2], const TileHeader* header) {
    unsigned sum[2][2] = {{0, 0}, {0, 0}};  // [row][half]
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // 16 columns
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int* x = &c[8 * j + 2 * r];
        const unsigned packed = pack_u8(__int_as_float(x[0]), __int_as_float(x[1]),
                                        __int_as_float(x[4]), __int_as_float(x[5]));
        a[4 * (j >> 1) + 2 * (j & 1) + r] = packed;
        sum[r][j >> 2] = __dp4a(packed, 0x01010101u, sum[r][j >> 2]);
      }
    }
    const float inv[2] = {header[0].inv_v_scale, header[1].inv_v_scale};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mine = __fmaf_rn(__uint2float_rn(sum[r][1]), inv[1],
                                   __fmul_rn(__uint2float_rn(sum[r][0]), inv[0]));
      denominator[r] = __fmaf_rn(denominator[r], carry[r], mine);
    }
  }

  static __device__ __forceinline__ float to_float(int sum) { return __int2float_rn(sum); }
};

// ---- e4m3 weights and values -----------------------------------------------------------------

// Two rows' softmax as SageAttention 2.2 computes it on sm_90. The level stays log2(448) less a
// hair under the running maximum, so that weights fill e4m3's range.
struct E4m3Softmax {
  using Sum = float;
  static constexpr bool kIsE4m3 = true;

  float level[2] = {-5000000.0f, -5000000.0f};
  float denominator[2] = {1.0f, 1.0f};

  static constexpr float kOffset = -8.807f;

  // Scores -> weights up to 448, as float bits in place, unrounded; and what O is to be carried by.
  // Two bodies: the block border also keeps ptxas from moving the wait for P V up.
  __device__ __forceinline__ void weigh(int (&c)[64], float (&carry)[2], const float (&q_scale)[2],
                                        const StepTiles& tiles, float log2_scale, int t,
                                        bool is_last) {
    if (tiles.is_full && !is_last) {
      weigh_some<false>(c, carry, q_scale, tiles, log2_scale, t, false);
    } else {
      weigh_some<true>(c, carry, q_scale, tiles, log2_scale, t, is_last);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void weigh_some(int (&c)[64], float (&carry)[2], const float (&q_scale)[2],
                                        const StepTiles& tiles, float log2_scale, int t,
                                        bool is_last) {
    const unsigned keys = kMasked ? tiles.key_bits(t) : ~0u;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float factor[2], highest[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = __fmul_rn(q_scale[r], tiles.k_scale(half, t));
        factor[half] = __fmul_rn(log2_scale, scale);
        if (kMasked) {
          // the last step rounds its scores once more, before the softmax scale
          const float early = is_last ? scale : 1.0f;
          factor[half] = is_last ? log2_scale : factor[half];
          highest[half] = minus_infinity();
          const unsigned mine = reread(keys);
#pragma unroll
          for (int n = 8 * half; n < 8 * half + 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              int& x = c[4 * n + 2 * r + e];
              const float score = __fmul_rn(__int2float_rn(x), early);
              x = __float_as_int(score);
              if (is_key(mine, n, e)) highest[half] = fmaxf(highest[half], score);
            }
          }
        } else {
          highest[half] = __int2float_rn(half_max<false>(c, keys, r, half));
        }
        const float level_of_half = __fmaf_rn(highest[half], factor[half], kOffset);
        // no key: minus infinity times a scale of 0 would be NaN
        highest[half] = kMasked && highest[half] == minus_infinity() ? highest[half] : level_of_half;
      }
      const float fresh = fmaxf(level[r], quad_max(fmaxf(highest[0], highest[1])));
      carry[r] = exp2_approx(__fadd_rn(level[r], -fresh));
      level[r] = fresh;
      const unsigned mine = reread(keys);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int& x = c[4 * n + 2 * r + e];
          const float score = kMasked ? __int_as_float(x) : __int2float_rn(x);
          float weight = exp2_approx(__fmaf_rn(score, factor[n >> 3], -fresh));
          if (kMasked && !is_key(mine, n, e)) weight = 0.0f;
          x = __float_as_int(weight);
        }
      }
    }
  }

  // The denominator takes the weights before they are rounded.
  __device__ __forceinline__ void pack(const int (&c)[64], unsigned (&a)[16],
                                       const float (&carry)[2], const TileHeader*) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int* x = &c[8 * j + 2 * r];
        const float p[4] = {__int_as_float(x[0]), __int_as_float(x[1]), __int_as_float(x[4]),
                            __int_as_float(x[5])};
        const float sum = __fadd_rn(__fadd_rn(__fadd_rn(p[0], p[1]), p[2]), p[3]);
        denominator[r] =
            j == 0 ? __fmaf_rn(denominator[r], carry[r], sum) : __fadd_rn(denominator[r], sum);
        a[4 * (j >> 1) + 2 * (j & 1) + r] = pack_e4m3(p[0], p[1], p[2], p[3]);
      }
    }
  }

  static __device__ __forceinline__ float to_float(float sum) { return sum; }
};

}  // namespace nox
