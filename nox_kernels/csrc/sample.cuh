// What `accurate` must know before it packs: the mean of K and the size of V, from every 16th row.
#pragma once

#include "primitives/rows.cuh"

namespace nox {

// Sums of a head's sampled rows in kSampleChunks parts. Grid (H, kSampleChunks), 256 threads.
template <int kDtype>
__device__ __forceinline__ void sample(const PackParams& p) {
  __shared__ float part[2][16][kHeadDim];
  const int head = blockIdx.x, octet = threadIdx.x & 15, group = threadIdx.x >> 4;
  const Rows keys = key_rows(p), values = value_rows(p);
  float sum[2][8] = {};
  const int stride = kSampleStride * 16 * kSampleChunks;
  // rows in the hundreds of thousands: the next one past the end still fits 32 bits
  for (int row = kSampleStride * (16 * blockIdx.y + group); row < p.num_rows; row += stride) {
    float k[8], v[8];
    unpack8<kDtype>(keys.load8(head, row, 8 * octet), k);
    unpack8<kDtype>(values.load8(head, row, 8 * octet), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[0][i] = __fadd_rn(sum[0][i], k[i]);
      sum[1][i] = __fadd_rn(sum[1][i], fabsf(v[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    part[0][group][8 * octet + i] = sum[0][i];
    part[1][group][8 * octet + i] = sum[1][i];
  }
  __syncthreads();
  const int which = threadIdx.x >> 7, channel = threadIdx.x & 127;
  float total = 0.0f;
  for (int i = 0; i < 16; ++i) total = __fadd_rn(total, part[which][i][channel]);
  p.sample[((static_cast<long long>(head) * kSampleChunks + blockIdx.y) * 2 + which) * kHeadDim +
           channel] = total;
}

// The parts -> K's mean, also rotated, and V's channel scale. Grid H, 128 threads.
__device__ __forceinline__ void finish_sample(const PackParams& p) {
  __shared__ float mean[2][kHeadDim];
  const int head = blockIdx.x, channel = threadIdx.x;
  const float count = static_cast<float>((p.num_rows + kSampleStride - 1) / kSampleStride);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float* part =
        p.sample + (static_cast<long long>(head) * kSampleChunks * 2 + which) * kHeadDim + channel;
    float total = 0.0f;
    for (int i = 0; i < kSampleChunks; ++i) total = __fadd_rn(total, part[2 * i * kHeadDim]);
    mean[which][channel] = __fdiv_rn(total, count);
  }
  __syncthreads();
  float rotated = 0.0f, size = 0.0f;
  for (int i = 0; i < kHeadDim; ++i) {
    rotated = __fadd_rn(rotated, __popc(i & channel) & 1 ? -mean[0][i] : mean[0][i]);
    size = __fadd_rn(size, mean[1][i]);
  }
  const long long place = static_cast<long long>(head) * kHeadDim + channel;
  p.k_mean[place] = mean[0][channel];
  p.k_mean_rotated[place] = rotated;
  // A channel that is silent in the sample must not blow up where it is not.
  const float floor = __fmul_rn(__fdiv_rn(size, 128.0f), 0x1p-10f);
  p.v_channel_scale[place] = fmaxf(fmaxf(mean[1][channel], floor), 1e-30f);
}

}  // namespace nox
