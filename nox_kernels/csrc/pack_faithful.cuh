// Q and K as SageAttention 2.2 quantises them for sm_90, per thread: no rotation, K smoothed.
#pragma once

#include "primitives/rows.cuh"

namespace nox {

// amax / 127 + 1e-7 with one rounding, as Triton's quantiser compiles.
__device__ __forceinline__ float faithful_scale(float amax) {
  return __fmaf_rn(amax, __uint_as_float(0x3c010204), __uint_as_float(0x33d6bf95));
}

// Half away from zero: add 0.5 with the sign of the value, then cut.
__device__ __forceinline__ int round_away(float x) {
  return __float2int_rz(__fadd_rn(x, x >= 0.0f ? 0.5f : -0.5f));
}

__device__ __forceinline__ void store_row_faithful(const float (&y)[32], float scale,
                                                   const Spread& at, int slot,
                                                   signed char* image) {
  const float inverse = reciprocal_approx(scale);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    unsigned word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned byte = round_away(__fmul_rn(y[8 * j + i], inverse)) & 0xff;
      word[i >> 2] |= byte << (8 * (i & 3));
    }
    *reinterpret_cast<uint2*>(image + at.image_offset(slot, j)) = make_uint2(word[0], word[1]);
  }
}

template <int kDtype>
__device__ __forceinline__ void load_rows(const Rows& rows, int head, const int* slot_row,
                                          const Spread& at, float (&y)[2][32]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = slot_row[at.slot(r)];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float x[8];
      unpack8<kDtype>(rows.load8(head, row, at.channel(j)), x);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[r][8 * j + i] = x[i];
    }
  }
}

__device__ __forceinline__ float pair_max(const float (&y)[2][32]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fmaxf(fabsf(y[0][i]), fabsf(y[1][i])));
  return amax;
}

// 16 rows have 8 scales, rows r and r + 8 share one.
template <int kDtype>
__device__ __forceinline__ void pack_queries_faithful(const PackParams& p, int head, int tile) {
  const Spread at;
  const Rows rows = query_rows(p);
  const long long place = static_cast<long long>(head) * p.num_query_tiles + tile;
  float y[2][32];
  load_rows<kDtype>(rows, head, p.slot_row + tile * kQueryTile, at, y);
  const float scale = faithful_scale(warp_max(pair_max(y), 1, 2));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    store_row_faithful(y[r], scale, at, at.slot(r), p.q_image + place * kQueryTileBytes);
    if (at.t == 0) p.q_scale[place * kQueryTile + at.slot(r)] = scale;
  }
  pool_tile<kDtype>(p, rows, head, tile, false);
}

// 128 keys have 4 scales, keys j with the same (j % 8) / 2 share one.
template <int kDtype>
__device__ __forceinline__ void pack_keys_faithful(const PackParams& p, int head, int tile) {
  __shared__ float amax_of[8][4];  // [warp][group of keys]
  const Spread at;
  const Rows rows = key_rows(p);
  const int* slot_row = p.slot_row + tile * kQueryTile;
  const long long place = 2 * (static_cast<long long>(head) * p.num_query_tiles + tile);
  float y[2][32];
  load_rows<kDtype>(rows, head, slot_row, at, y);
  if (p.k_smooth_mean != nullptr) {
    const Rows mean = {static_cast<const unsigned short*>(p.k_smooth_mean), kHeadDim, 0, true};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float centre[8];
      unpack8<kDtype>(mean.load8(head, 0, at.channel(j)), centre);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool is_real = slot_row[at.slot(r)] >= 0;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          float* pair = &y[r][8 * j + i];
          // upstream subtracts in half precision, so the difference is rounded
          const float2 rounded = unpack_half(
              pack_half(__fadd_rn(pair[0], -centre[i]), __fadd_rn(pair[1], -centre[i + 1]), kDtype),
              kDtype);
          pair[0] = is_real ? rounded.x : 0.0f;
          pair[1] = is_real ? rounded.y : 0.0f;
        }
      }
    }
  }
  const int group = at.g >> 1;
  amax_of[at.warp][group] = warp_max(pair_max(y), 1, 4);
  __syncthreads();
  float amax = 0.0f;
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) amax = fmaxf(amax, amax_of[warp][group]);
  const float scale = faithful_scale(amax);
  const int half = at.warp >> 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    store_row_faithful(y[r], scale, at, at.slot(r) - kKvTile * half,
                       p.k_image + (place + half) * kKvTileBytes);
  }
  if ((at.warp & 3) == 0 && at.t == 0 && (at.g & 1) == 0) {
    p.header[place + half].k_scale[group] = scale;
  }
  pool_tile<kDtype>(p, rows, head, tile, true);
}

// Grid (H, Nq, 2).
template <int kDtype>
__device__ __forceinline__ void pack_faithful(const PackParams& p) {
  if (blockIdx.z == 0) {
    pack_queries_faithful<kDtype>(p, blockIdx.x, blockIdx.y);
  } else {
    pack_keys_faithful<kDtype>(p, blockIdx.x, blockIdx.y);
  }
}

}  // namespace nox
