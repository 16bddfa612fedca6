// The pre-pass of `accurate`: one read of Q, K and V -> tile images, scales and pooled rows.
#pragma once

#include "primitives/hadamard.cuh"
#include "primitives/values.cuh"

namespace nox {

constexpr float kTiny = 0x1p-100f;              // smallest amax that is scaled
constexpr float kInvSqrtHeadDim = 0.088388346f;  // of the normalised rotation

// 32 values of a row -> INT8 in an image.
__device__ __forceinline__ void store_row(const float (&y)[32], float multiplier, const Spread& at,
                                          int slot, signed char* image) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(y[8 * j + i], multiplier);
    *reinterpret_cast<uint2*>(image + at.image_offset(slot, j)) =
        make_uint2(pack_s8(x[0], x[1], x[2], x[3]), pack_s8(x[4], x[5], x[6], x[7]));
  }
}

__device__ __forceinline__ float absolute_max(const float (&y)[32]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fabsf(y[i]));
  return amax;
}

template <int kDtype>
__device__ __forceinline__ void pack_queries(const PackParams& p, int head, int tile) {
  const Spread at;
  const Rows rows = query_rows(p);
  const int* slot_row = p.slot_row + tile * kQueryTile;
  const long long place = static_cast<long long>(head) * p.num_query_tiles + tile;
  uint4 x[2][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = slot_row[at.slot(r)];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[r][j] = rows.load8(head, row, at.channel(j));
  }
  float y[2][32];
  rotate<kDtype>(x, hadamard_signs<kDtype>(at), y);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float amax = fmaxf(warp_max(absolute_max(y[r]), 1, 2), kTiny);
    store_row(y[r], __fdiv_rn(127.0f, amax), at, at.slot(r), p.q_image + place * kQueryTileBytes);
    if (at.t == 0) {
      p.q_scale[place * kQueryTile + at.slot(r)] =
          __fdiv_rn(__fmul_rn(amax, kInvSqrtHeadDim), 127.0f);
    }
  }
  pool_tile<kDtype>(p, rows, head, tile, false);
}

template <int kDtype>
__device__ __forceinline__ void pack_keys(const PackParams& p, int head, int tile) {
  __shared__ float amax_of[8][4];  // [warp][group of keys]
  const Spread at;
  const Rows rows = key_rows(p);
  const int* slot_row = p.slot_row + tile * kQueryTile;
  const long long place = 2 * (static_cast<long long>(head) * p.num_query_tiles + tile);
  uint4 x[2][4];
  bool is_real[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = slot_row[at.slot(r)];
    is_real[r] = row >= 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) x[r][j] = rows.load8(head, row, at.channel(j));
  }
  float y[2][32];
  rotate<kDtype>(x, hadamard_signs<kDtype>(at), y);
  // The mean is taken from the rotated rows, which need not be rounded to half precision again.
  const float* mean = p.k_mean_rotated + static_cast<long long>(head) * kHeadDim;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float centre = mean[at.channel(j) + i];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        y[r][8 * j + i] = is_real[r] ? __fadd_rn(y[r][8 * j + i], -centre) : 0.0f;
      }
    }
  }
  // Keys j with the same (j % 8) / 2 share a scale: eight lanes of each of a tile's four warps.
  const float mine = warp_max(fmaxf(absolute_max(y[0]), absolute_max(y[1])), 1, 4);
  const int group = at.g >> 1;
  amax_of[at.warp][group] = mine;
  __syncthreads();
  const int half = at.warp >> 2;
  float amax = kTiny;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) amax = fmaxf(amax, amax_of[4 * half + warp][group]);
  const float multiplier = __fdiv_rn(127.0f, amax);
  signed char* image = p.k_image + (place + half) * kKvTileBytes;
#pragma unroll
  for (int r = 0; r < 2; ++r) store_row(y[r], multiplier, at, at.slot(r) - kKvTile * half, image);
  if ((at.warp & 3) == 0 && at.t == 0 && (at.g & 1) == 0) {
    p.header[place + half].k_scale[group] = __fdiv_rn(__fmul_rn(amax, kInvSqrtHeadDim), 127.0f);
  }
  pool_tile<kDtype>(p, rows, head, tile, true);
}

template <int kDtype>
__device__ __forceinline__ void pack_values(const PackParams& p, int head, int tile) {
  __shared__ float amax_of[8];
  __shared__ float power_of[8];
  const ValueSpread at;
  const Rows rows = value_rows(p);
  const int* slot_row = p.slot_row + tile * kQueryTile;
  const long long query_tile = static_cast<long long>(head) * p.num_query_tiles + tile;
  const ValueTile half_tile[2] = {{rows, head, slot_row, at}, {rows, head, slot_row + kKvTile, at}};
  float inverse[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    inverse[c] = __fdiv_rn(
        1.0f, p.v_channel_scale[static_cast<long long>(head) * kHeadDim + at.channel() + c]);
  }
  float power = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float amax = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float value[4];
      half_tile[half].template channel<kDtype>(c, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        amax = fmaxf(amax, fabsf(__fmul_rn(value[i], inverse[c])));
        power = __fmaf_rn(value[i], value[i], power);
      }
    }
    __syncthreads();  // the last half's amax is read
    amax = warp_max(amax, 1, 16);
    if ((threadIdx.x & 31) == 0) amax_of[threadIdx.x >> 5] = amax;
    __syncthreads();
    amax = 1.0f;  // a quiet tile must not make its own weights vanish beside the others'
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) amax = fmaxf(amax, amax_of[warp]);
    const float multiplier = __fdiv_rn(127.0f, amax);
    unsigned word[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float value[4];
      half_tile[half].template channel<kDtype>(c, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[i] = __fmul_rn(__fmul_rn(value[i], inverse[c]), multiplier);
      }
      word[c] = pack_s8(value[0], value[1], value[2], value[3]);
    }
    const long long place = 2 * query_tile + half;
    store_value_tile(word, at, p.v_image + place * kKvTileBytes);
    if (threadIdx.x == 0) {
      const float scale = __fdiv_rn(amax, 127.0f);
      TileHeader& header = p.header[place];
      header.v_scale = scale;
      header.log2_v_scale = log2_approx(scale);
      header.inv_v_scale = __fdiv_rn(1.0f, scale);
      header.valid_count = static_cast<float>(p.valid_count[2 * tile + half]);
    }
  }
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) {
    power = __fadd_rn(power, __shfl_xor_sync(~0u, power, lane));
  }
  if ((threadIdx.x & 31) == 0) power_of[threadIdx.x >> 5] = power;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int warp = 0; warp < 8; ++warp) total = __fadd_rn(total, power_of[warp]);
    p.v_power[query_tile] = total;
  }
}

// Grid (H, Nq, 3): heads run fastest, so that 56 of them read whole rows of a fused buffer.
template <int kDtype>
__device__ __forceinline__ void pack(const PackParams& p) {
  switch (blockIdx.z) {
    case 0:
      return pack_queries<kDtype>(p, blockIdx.x, blockIdx.y);
    case 1:
      return pack_keys<kDtype>(p, blockIdx.x, blockIdx.y);
    default:
      return pack_values<kDtype>(p, blockIdx.x, blockIdx.y);
  }
}

}  // namespace nox
