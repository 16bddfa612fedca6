// Rows of Q, K and V: loads of any alignment, and the way a warp spreads 16 of them.
#pragma once

#include "../params.h"
#include "arithmetic.cuh"

namespace nox {

constexpr int kPackThreads = 256;

// One of Q, K and V.
struct Rows {
  const unsigned short* data;
  long long head_stride;  // elements
  long long row_stride;
  bool is_aligned;

  // Eight channels of a row; zeros for row -1.
  __device__ __forceinline__ uint4 load8(int head, int row, int channel) const {
    if (row < 0) return make_uint4(0, 0, 0, 0);
    const unsigned short* from = data + head * head_stride + row * row_stride + channel;
    if (is_aligned) return *reinterpret_cast<const uint4*>(from);
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | static_cast<unsigned>(from[2 * i + 1]) << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

__device__ __forceinline__ Rows query_rows(const PackParams& p) {
  return {static_cast<const unsigned short*>(p.q), p.q_head_stride, p.q_row_stride,
          p.is_aligned != 0};
}

__device__ __forceinline__ Rows key_rows(const PackParams& p) {
  return {static_cast<const unsigned short*>(p.k), p.k_head_stride, p.k_row_stride,
          p.is_aligned != 0};
}

__device__ __forceinline__ Rows value_rows(const PackParams& p) {
  return {static_cast<const unsigned short*>(p.v), p.v_head_stride, p.v_row_stride,
          p.is_aligned != 0};
}

template <int kDtype>
__device__ __forceinline__ void unpack8(const uint4& x, float (&y)[8]) {
  const unsigned word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_half(word[i], kDtype);
    y[2 * i] = pair.x;
    y[2 * i + 1] = pair.y;
  }
}

// How a warp spreads 16 rows, as the operands of its matrix instructions lie: thread g * 4 + t has
// rows g and g + 8 and, for j = 0..3, their channels 8 (t + 4 j) .. + 7.
struct Spread {
  int warp, g, t;

  __device__ __forceinline__ Spread()
      : warp(threadIdx.x >> 5), g((threadIdx.x & 31) >> 2), t(threadIdx.x & 3) {}

  __device__ __forceinline__ int slot(int r) const { return 16 * warp + g + 8 * r; }
  __device__ __forceinline__ int channel(int j) const { return 8 * (t + 4 * j); }

  // Where the eight bytes of channel(j) lie in an image of rows of 128 bytes: chunks of 16 bytes,
  // exchanged within each 8 rows (the 128-byte swizzle).
  __device__ __forceinline__ int image_offset(int slot, int j) const {
    const int chunk = 2 * j + (t >> 1);
    return slot * kHeadDim + ((chunk ^ (slot & 7)) << 4) + 8 * (t & 1);
  }
};

__device__ __forceinline__ float warp_max(float x, int first, int last) {
#pragma unroll
  for (int lane = first; lane <= last; lane *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// Mean, max and min of real rows of num_slots slots, each from its 16-byte chunks. The rows were
// just read, so they come from a cache. 16 threads a row, 16 rows at a time.
template <int kDtype>
__device__ __forceinline__ void pool_rows(const Rows& rows, int head, const int* slot_row,
                                          int num_slots, int count, int num_stats, float* out) {
  __shared__ float part[3][16][kHeadDim];
  const int octet = threadIdx.x & 15, group = threadIdx.x >> 4;
  float sum[8], high[8], low[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] = 0.0f;
    high[i] = __int_as_float(0xff800000);
    low[i] = __int_as_float(0x7f800000);
  }
  for (int slot = group; slot < num_slots; slot += 16) {
    const int row = slot_row[slot];
    if (row < 0) continue;
    float x[8];
    unpack8<kDtype>(rows.load8(head, row, 8 * octet), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] = __fadd_rn(sum[i], x[i]);
      high[i] = fmaxf(high[i], x[i]);
      low[i] = fminf(low[i], x[i]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    part[0][group][8 * octet + i] = sum[i];
    part[1][group][8 * octet + i] = high[i];
    part[2][group][8 * octet + i] = low[i];
  }
  __syncthreads();
  if (threadIdx.x < kHeadDim) {
    const int channel = threadIdx.x;
    float total = 0.0f, highest = part[1][0][channel], lowest = part[2][0][channel];
    for (int i = 0; i < 16; ++i) {
      total = __fadd_rn(total, part[0][i][channel]);
      highest = fmaxf(highest, part[1][i][channel]);
      lowest = fminf(lowest, part[2][i][channel]);
    }
    out[channel] = count ? __fdiv_rn(total, static_cast<float>(count)) : 0.0f;
    if (num_stats == 3) {
      out[kHeadDim + channel] = count ? highest : 0.0f;
      out[2 * kHeadDim + channel] = count ? lowest : 0.0f;
    }
  }
}

// What a route wants to know of a query tile, or of the two KV tiles of the same slots.
template <int kDtype>
__device__ __forceinline__ void pool_tile(const PackParams& p, const Rows& rows, int head, int tile,
                                          bool is_key) {
  if (p.num_stats == 0) return;
  const int* slot_row = p.slot_row + tile * kQueryTile;
  const int count[2] = {p.valid_count[2 * tile], p.valid_count[2 * tile + 1]};
  const long long place = static_cast<long long>(head) * p.num_query_tiles + tile;
  if (is_key && p.num_stats == 1) {  // routed by the 64
    for (int half = 0; half < 2; ++half) {
      pool_rows<kDtype>(rows, head, slot_row + half * kKvTile, kKvTile, count[half], 1,
                        p.k_pool + (2 * place + half) * kHeadDim);
    }
    return;
  }
  float* out = (is_key ? p.k_pool : p.q_pool) + place * p.num_stats * kHeadDim;
  pool_rows<kDtype>(rows, head, slot_row, kQueryTile, count[0] + count[1], p.num_stats, out);
}

}  // namespace nox
