// V as e4m3: of heads whose values INT8 cannot hold (`accurate`), or of every head (`faithful`).
#pragma once

#include "primitives/values.cuh"

namespace nox {

// Would INT8 P V lose to FP8 P V? The expected rounding of V, from its scales, against its power;
// FP8 loses 0.0355 in all. In an order that does not depend on the grid; needs 256 threads.
__device__ __forceinline__ bool is_flagged(const PackParams& p, int head) {
  __shared__ float sum_of[3][8];
  if (p.is_faithful) return true;
  const long long first = static_cast<long long>(head) * p.num_query_tiles;
  float sum[3] = {0.0f, 0.0f, 0.0f};  // squares of tile scales, of channel scales, of values
  for (int tile = threadIdx.x; tile < 2 * p.num_query_tiles; tile += kPackThreads) {
    const float scale = p.header[2 * first + tile].v_scale;
    sum[0] = __fmaf_rn(scale, scale, sum[0]);
  }
  if (threadIdx.x < kHeadDim) {
    const float scale = p.v_channel_scale[static_cast<long long>(head) * kHeadDim + threadIdx.x];
    sum[1] = __fmul_rn(scale, scale);
  }
  for (int tile = threadIdx.x; tile < p.num_query_tiles; tile += kPackThreads) {
    sum[2] = __fadd_rn(sum[2], p.v_power[first + tile]);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) {
      sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(~0u, sum[i], lane));
    }
    if ((threadIdx.x & 31) == 0) sum_of[i][threadIdx.x >> 5] = sum[i];
  }
  __syncthreads();
  float total[3] = {0.0f, 0.0f, 0.0f};
  for (int warp = 0; warp < 8; ++warp) {
    for (int i = 0; i < 3; ++i) total[i] = __fadd_rn(total[i], sum_of[i][warp]);
  }
  const float num_tiles = static_cast<float>(2 * p.num_query_tiles);
  const float rounding = __fmul_rn(__fdiv_rn(__fdiv_rn(total[0], num_tiles), 12.0f),
                                   __fdiv_rn(total[1], 128.0f));
  const float num_values = __fmul_rn(static_cast<float>(p.num_rows), 128.0f);
  return rounding > __fmul_rn(0.035f * 0.035f, __fdiv_rn(total[2], num_values));
}

// Decides on a head and, if it is to be e4m3, finds each channel's largest value in kAmaxChunks
// parts of the rows. Grid (H, kAmaxChunks), 256 threads.
template <int kDtype>
__device__ __forceinline__ void flag_values(const PackParams& p) {
  __shared__ float part[16][kHeadDim];
  const int head = blockIdx.x, octet = threadIdx.x & 15, group = threadIdx.x >> 4;
  const bool flagged = is_flagged(p, head);
  if (blockIdx.y == 0 && threadIdx.x == 0) p.v_is_e4m3[head] = flagged;
  if (!flagged) return;
  const Rows rows = value_rows(p);
  float amax[8] = {};
  for (int row = 16 * blockIdx.y + group; row < p.num_rows; row += 16 * kAmaxChunks) {
    float x[8];
    unpack8<kDtype>(rows.load8(head, row, 8 * octet), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax[i] = fmaxf(amax[i], fabsf(x[i]));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) part[group][8 * octet + i] = amax[i];
  __syncthreads();
  if (threadIdx.x >= kHeadDim) return;
  float highest = 0.0f;
  for (int i = 0; i < 16; ++i) highest = fmaxf(highest, part[i][threadIdx.x]);
  p.v_amax[(static_cast<long long>(head) * kAmaxChunks + blockIdx.y) * kHeadDim + threadIdx.x] =
      highest;
}

// Packs the values of flagged heads. Grid (H, kAmaxChunks), 256 threads; a block takes every
// kAmaxChunks-th tile.
template <int kDtype>
__device__ __forceinline__ void pack_e4m3(const PackParams& p) {
  __shared__ float multiplier_of[kHeadDim];
  const int head = blockIdx.x;
  if (!p.v_is_e4m3[head]) return;
  if (threadIdx.x < kHeadDim) {
    const float* part =
        p.v_amax + static_cast<long long>(head) * kAmaxChunks * kHeadDim + threadIdx.x;
    float amax = 0.0f;
    for (int i = 0; i < kAmaxChunks; ++i) amax = fmaxf(amax, part[i * kHeadDim]);
    // Both divisions approximate, as SageAttention 2.2 compiles them; a channel of zeros stays 0.
    multiplier_of[threadIdx.x] = amax > 0.0f ? __fmul_rn(448.0f, reciprocal_approx(amax)) : 0.0f;
    if (blockIdx.y == 0) {
      p.v_channel_scale[static_cast<long long>(head) * kHeadDim + threadIdx.x] =
          __fmul_rn(amax, reciprocal_approx(448.0f));
    }
  }
  __syncthreads();
  const ValueSpread at;
  const Rows rows = value_rows(p);
  float multiplier[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) multiplier[c] = multiplier_of[at.channel() + c];
  for (int tile = blockIdx.y; tile < 2 * p.num_query_tiles; tile += kAmaxChunks) {
    const ValueTile values(rows, head, p.slot_row + tile * kKvTile, at);
    unsigned word[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float value[4];
      values.template channel<kDtype>(c, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = __fmul_rn(value[i], multiplier[c]);
      word[c] = pack_e4m3(value[0], value[1], value[2], value[3]);
    }
    const long long place = 2ll * head * p.num_query_tiles + tile;
    store_value_tile(word, at, p.v_image + place * kKvTileBytes);
    if (threadIdx.x == 0) {
      TileHeader& header = p.header[place];
      header.v_scale = 1.0f;
      header.log2_v_scale = 0.0f;
      header.inv_v_scale = 1.0f;
      header.valid_count = static_cast<float>(p.valid_count[tile]);
    }
  }
}

}  // namespace nox
