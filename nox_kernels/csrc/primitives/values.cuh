// V tiles: transposed, in the order of keys that P's registers have, swizzled.
#pragma once

#include "rows.cuh"

namespace nox {

// A KV tile of V is cut into 16 quads of keys and 16 octets of channels, one of each a thread. A
// quad is what one register of P holds: of 16 keys 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q for q = 0..3.
struct ValueSpread {
  int quad, octet;

  __device__ __forceinline__ ValueSpread()
      : quad(threadIdx.x & 15), octet(threadIdx.x >> 4) {}

  __device__ __forceinline__ int slot(int i) const {
    return 16 * (quad >> 2) + 2 * (quad & 3) + 8 * (i >> 1) + (i & 1);
  }

  __device__ __forceinline__ int channel() const { return 8 * octet; }
};

struct ValueTile {
  uint4 key[4];  // of a thread's quad: its eight channels

  __device__ __forceinline__ ValueTile(const Rows& rows, int head, const int* slot_row,
                                       const ValueSpread& at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = rows.load8(head, slot_row[at.slot(i)], at.channel());
  }

  // Four values of a channel, one of each key.
  template <int kDtype>
  __device__ __forceinline__ void channel(int c, float (&value)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned word[4] = {key[i].x, key[i].y, key[i].z, key[i].w};
      const float2 pair = unpack_half(word[c >> 1], kDtype);
      value[i] = c & 1 ? pair.y : pair.x;
    }
  }
};

// Four bytes of each of a thread's channels -> the image of the tile in global memory: rows of 64
// bytes, one a channel, whose chunks of 16 bytes are exchanged within each 8 rows.
__device__ __forceinline__ void store_value_tile(const unsigned (&word)[8], const ValueSpread& at,
                                                 signed char* image) {
  __shared__ uint4 staged[kKvTileBytes / 16];
  __syncthreads();  // the last tile's readers are done
  unsigned* words = reinterpret_cast<unsigned*>(staged);
  // Odd octets write their channels in pairs the other way round: no two lanes share a bank.
  const bool is_odd = at.octet & 1;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int channel = at.channel() + (is_odd ? i ^ 1 : i);
    const int chunk = (at.quad >> 2) ^ (channel >> 1 & 3);
    words[16 * channel + 4 * chunk + (at.quad & 3)] = is_odd ? word[i ^ 1] : word[i];
  }
  __syncthreads();
  uint4* target = reinterpret_cast<uint4*>(image);
#pragma unroll
  for (int i = threadIdx.x; i < kKvTileBytes / 16; i += kPackThreads) target[i] = staged[i];
}

}  // namespace nox
