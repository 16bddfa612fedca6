// Block-sparse attention for sm_90a: persistent, warp-specialised, 128 queries, 128 keys a step.
//
// Warpgroup 0 copies, one warp for each stage of the ring; its first warp also hands out query
// tiles. Warpgroups 1 and 2 compute 64 query rows each. While the tensor cores multiply one step's
// weights with V and the next step's Q with K, the other units turn the next scores into weights.
#pragma once

#include "params.h"
#include "primitives/arithmetic.cuh"
#include "primitives/hopper.cuh"
#include "primitives/softmax.cuh"
#include "primitives/wgmma.cuh"

namespace nox {

constexpr int kNumStages = 4;
constexpr int kStepBytes = 2 * kKvTileBytes;  // of K, and as many of V
constexpr int kNumCopyWarps = kNumStages;
constexpr int kNumConsumerWarps = 8;

// One query tile to compute; head < 0 ends the work.
struct Item {
  int head;
  int query;
  int num_tiles;
};

struct alignas(1024) AttendShared {
  signed char q[2][kQueryTileBytes];
  signed char k[kNumStages][kStepBytes];
  signed char v[kNumStages][kStepBytes];
  TileHeader header[kNumStages][2];
  float q_scale[2][kQueryTile];
  Item item[2];
  unsigned long long item_ready[2];  // the item is known to the copy warps
  unsigned long long q_full[2];      // and its Q is there
  unsigned long long q_empty[2];
  unsigned long long full[kNumStages];
  unsigned long long empty[kNumStages];
};

// ---- copying -----------------------------------------------------------------------------------

// The heads that a kernel serves, as bits.
template <class Softmax>
__device__ __forceinline__ unsigned long long my_heads(const AttendParams& params, int lane) {
  constexpr bool kIsE4m3 = Softmax::kIsE4m3;
  unsigned long long heads = 0;
#pragma unroll
  for (int base = 0; base < 64; base += 32) {
    const int head = base + lane;
    const bool mine = head < params.num_heads && (params.v_is_e4m3[head] != 0) == kIsE4m3;
    heads |= static_cast<unsigned long long>(__ballot_sync(0xffffffffu, mine)) << base;
  }
  return heads;
}

__device__ __forceinline__ int nth_bit(unsigned long long bits, int n) {
  for (; n > 0; --n) bits &= bits - 1;
  return __ffsll(bits) - 1;
}

struct CopyWarp {
  const AttendParams& params;
  AttendShared& shared;
  const int stage;  // this warp's
  const int lane;
  unsigned step = 0;  // of all items so far

  // Takes the next query tile and starts copying its Q. The last of a head go first: under sparse
  // attention they are the long ones.
  __device__ __forceinline__ void hand_out(int slot, unsigned long long heads) {
    int number = 0;
    if (lane == 0) number = atomicAdd(params.next_item, 1);
    number = __shfl_sync(0xffffffffu, number, 0);
    const int nth = number / params.num_query_tiles;
    if (nth >= __popcll(heads)) {
      if (lane == 0) {
        shared.item[slot].head = -1;
        barrier_arrive(shared_address(&shared.item_ready[slot]));
        barrier_arrive(shared_address(&shared.q_full[slot]));
      }
      return;
    }
    const int head = nth_bit(heads, nth);
    const int query = params.num_query_tiles - 1 - number % params.num_query_tiles;
    const long long tile = static_cast<long long>(head) * params.num_query_tiles + query;
    const unsigned* words = params.selection + tile * params.num_words;
    int num_tiles = 0;
    for (int word = lane; word < params.num_words; word += 32) num_tiles += __popc(words[word]);
    num_tiles = __reduce_add_sync(0xffffffffu, num_tiles);
    if (lane == 0) {
      shared.item[slot] = {head, query, num_tiles};
      barrier_arrive(shared_address(&shared.item_ready[slot]));
      const unsigned full = shared_address(&shared.q_full[slot]);
      barrier_arrive_expect(full, kQueryTileBytes + kQueryTile * 4);
      bulk_copy(shared_address(shared.q[slot]), params.q + tile * kQueryTileBytes, kQueryTileBytes,
                full);
      bulk_copy(shared_address(shared.q_scale[slot]), params.q_scale + tile * kQueryTile,
                kQueryTile * 4, full);
    }
  }

  __device__ __forceinline__ void copy_tiles(long long tile, int half, int count, unsigned full) {
    bulk_copy(shared_address(shared.k[stage] + half * kKvTileBytes), params.k + tile * kKvTileBytes,
              count * kKvTileBytes, full);
    bulk_copy(shared_address(&shared.header[stage][half]), params.header + tile,
              count * static_cast<int>(sizeof(TileHeader)), full);
    bulk_copy(shared_address(shared.v[stage] + half * kKvTileBytes), params.v + tile * kKvTileBytes,
              count * kKvTileBytes, full);
  }

  // Copies two KV tiles of a head if the step falls to this warp's stage.
  __device__ __forceinline__ void copy_step(long long first_tile, int a, int b) {
    if ((step & (kNumStages - 1)) == stage) {
      barrier_wait(shared_address(&shared.empty[stage]), ((step / kNumStages) & 1) ^ 1);
      if (lane == 0) {
        const unsigned full = shared_address(&shared.full[stage]);
        barrier_arrive_expect(full, 2 * kStepBytes + 2 * sizeof(TileHeader));
        if (b == a + 1) {  // neighbours lie behind each other
          copy_tiles(first_tile + a, 0, 2, full);
        } else {
          copy_tiles(first_tile + a, 0, 1, full);
          copy_tiles(first_tile + b, 1, 1, full);
        }
      }
      __syncwarp();
    }
    ++step;
  }

  // Walks the selected tiles upwards, two a step. An odd last one is copied twice: what its
  // partner holds is never weighed, but as e4m3 it must not be NaN.
  __device__ __forceinline__ void copy_item(const Item& item) {
    const long long tile = static_cast<long long>(item.head) * params.num_query_tiles + item.query;
    const long long first_tile = 2ll * item.head * params.num_query_tiles;
    const unsigned* words = params.selection + tile * params.num_words;
    int waiting = -1;
    for (int base = 0; base < params.num_words; base += 32) {
      const unsigned word = base + lane < params.num_words ? words[base + lane] : 0u;
      unsigned filled = __ballot_sync(0xffffffffu, word != 0);
      while (filled) {
        const int place = __ffs(filled) - 1;
        filled &= filled - 1;
        unsigned bits = __shfl_sync(0xffffffffu, word, place);
        while (bits) {
          const int next = 32 * (base + place) + __ffs(bits) - 1;
          bits &= bits - 1;
          if (waiting < 0) {
            waiting = next;
          } else {
            copy_step(first_tile, waiting, next);
            waiting = -1;
          }
        }
      }
    }
    if (waiting >= 0) copy_step(first_tile, waiting, waiting);
  }

  template <class Softmax>
  __device__ __forceinline__ void run() {
    const unsigned long long heads = my_heads<Softmax>(params, lane);
    for (unsigned count = 0;; ++count) {
      const int slot = count & 1;
      const unsigned parity = (count >> 1) & 1;
      if (stage == 0) {
        barrier_wait(shared_address(&shared.q_empty[slot]), parity ^ 1);
        hand_out(slot, heads);
      }
      barrier_wait(shared_address(&shared.item_ready[slot]), parity);
      const Item item = shared.item[slot];
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.q_empty[slot]));
      if (item.head < 0) return;
      copy_item(item);
    }
  }
};

// ---- computing ---------------------------------------------------------------------------------

// Four columns-of-8 words of a quad's four lanes -> lane t holds all 8 columns of block t.
__device__ __forceinline__ void transpose_quad(unsigned (&word)[4], int t) {
  const bool odd = t & 1, high = t & 2;
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {
    const unsigned sent = odd ? word[pair] : word[pair + 1];
    const unsigned received = __shfl_xor_sync(0xffffffffu, sent, 1);
    (odd ? word[pair] : word[pair + 1]) = received;
  }
#pragma unroll
  for (int first = 0; first < 2; ++first) {
    const unsigned sent = high ? word[first] : word[first + 2];
    const unsigned received = __shfl_xor_sync(0xffffffffu, sent, 2);
    (high ? word[first] : word[first + 2]) = received;
  }
}

template <class Softmax>
struct ConsumerWarpgroup {
  const AttendParams& params;
  AttendShared& shared;
  const int first_row;  // of the query tile: this warp's 16 rows
  const int lane;
  unsigned step = 0;    // of all items so far

  // Waits until this step's tiles are there; returns their stage.
  __device__ __forceinline__ int wait_for_step() {
    const int stage = step & (kNumStages - 1);
    barrier_wait(shared_address(&shared.full[stage]), (step / kNumStages) & 1);
    return stage;
  }

  __device__ __forceinline__ void release(unsigned long long* barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(barrier));
  }

  __device__ __forceinline__ void multiply_qk(int (&c)[64], int slot, int stage) {
    const unsigned q = (shared_address(shared.q[slot]) + (first_row & 64) * kHeadDim) >> 4;
    const unsigned k = shared_address(shared.k[stage]) >> 4;
#pragma unroll
    for (int depth = 0; depth < 4; ++depth) {  // 32 channels each
      wgmma_s8(c, descriptor<128>(q + 2 * depth), descriptor<128>(k + 2 * depth), depth > 0);
    }
  }

  __device__ __forceinline__ void multiply_pv(typename Softmax::Sum (&sum)[64],
                                              const unsigned (&a)[16], int stage) {
    const unsigned v = shared_address(shared.v[stage]) >> 4;
#pragma unroll
    for (int depth = 0; depth < 4; ++depth) {  // 32 keys each, two to a KV tile
      wgmma_pv(sum, &a[4 * depth],
               descriptor<64>(v + (depth >> 1) * (kKvTileBytes / 16) + 2 * (depth & 1)),
               depth > 0);
    }
  }

  __device__ __forceinline__ void add(float (&out)[64], const typename Softmax::Sum (&sum)[64],
                                      const float (&carry)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      out[i] = __fmaf_rn(out[i], carry[(i >> 1) & 1], Softmax::to_float(sum[i]));
    }
  }

  __device__ __forceinline__ void run() {
    for (unsigned count = 0;; ++count) {
      const int slot = count & 1;
      barrier_wait(shared_address(&shared.q_full[slot]), (count >> 1) & 1);
      if (shared.item[slot].head < 0) return;
      compute(slot);
    }
  }

  __device__ __forceinline__ void compute(int slot) {
    const int row = first_row + (lane >> 2);
    const float q_scale[2] = {shared.q_scale[slot][row], shared.q_scale[slot][row + 8]};
    int tiles_left = shared.item[slot].num_tiles;
    Softmax softmax;
    int c[64];
    typename Softmax::Sum sum[64];
    unsigned a[16];
    float out[64];
    float carry[2];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.0f;

    int stage = wait_for_step();
    wgmma_fence();
    multiply_qk(c, slot, stage);
    wgmma_commit();
    const StepTiles tiles(shared.header[stage], tiles_left >= 2);
    wgmma_wait<0>();
    softmax.weigh(c, carry, q_scale, tiles, params.log2_scale, lane & 3, tiles_left <= 2);
    softmax.pack(c, a, carry, shared.header[stage]);

    for (tiles_left -= 2; tiles_left > 0; tiles_left -= 2) {
      ++step;
      const int next = wait_for_step();
      wgmma_fence();
      multiply_qk(c, slot, next);
      wgmma_commit();
      multiply_pv(sum, a, stage);
      wgmma_commit();
      const StepTiles tiles(shared.header[next], tiles_left >= 2);
      wgmma_wait<1>();
      float next_carry[2];
      softmax.weigh(c, next_carry, q_scale, tiles, params.log2_scale, lane & 3, tiles_left <= 2);
      wgmma_wait<0>();
      release(&shared.empty[stage]);
      add(out, sum, carry);
      softmax.pack(c, a, next_carry, shared.header[next]);
      carry[0] = next_carry[0];
      carry[1] = next_carry[1];
      stage = next;
    }

    wgmma_fence();
    multiply_pv(sum, a, stage);
    wgmma_commit();
    const Item item = shared.item[slot];  // kept in shared memory so far: three registers
    release(&shared.q_empty[slot]);
    wgmma_wait<0>();
    release(&shared.empty[stage]);
    add(out, sum, carry);
    ++step;
    store(item, softmax, out);
  }

  __device__ __forceinline__ void store(const Item& item, const Softmax& softmax,
                                        float (&out)[64]) {
    const int t = lane & 3;
    const float* v_scale = params.v_channel_scale + item.head * kHeadDim + 2 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float denominator = quad_sum(softmax.denominator[r]);
      const float inverse = reciprocal_approx(denominator);
      const int slot = item.query * kQueryTile + first_row + (lane >> 2) + 8 * r;
      const long long row = params.slot_row[slot];
      unsigned short* target = static_cast<unsigned short*>(params.out) +
                               (row * params.num_heads + item.head) * kHeadDim + 8 * t;
#pragma unroll
      for (int block = 0; block < 4; ++block) {  // 32 channels
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 4 * block + i;
          const float2 scale = *reinterpret_cast<const float2*>(v_scale + 8 * n);
          word[i] = pack_half(__fmul_rn(__fmul_rn(out[4 * n + 2 * r], inverse), scale.x),
                              __fmul_rn(__fmul_rn(out[4 * n + 2 * r + 1], inverse), scale.y),
                              params.out_dtype);
        }
        transpose_quad(word, t);
        if (row >= 0) {
          *reinterpret_cast<uint4*>(target + 32 * block) =
              make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
      if (params.lse != nullptr && row >= 0 && t == 0) {
        params.lse[item.head * params.num_rows + row] =
            __fmul_rn(__fadd_rn(log2_approx(denominator), softmax.level[r]), 0.693147181f);
      }
    }
  }
};

template <class Softmax>
__device__ __forceinline__ void attend_sm90(const AttendParams& params) {
  AttendShared& shared = *reinterpret_cast<AttendShared*>(nox_shared);
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(shared_address(&shared.item_ready[slot]), 1);
      barrier_init(shared_address(&shared.q_full[slot]), 1);
      barrier_init(shared_address(&shared.q_empty[slot]), kNumConsumerWarps + kNumCopyWarps);
    }
#pragma unroll
    for (int stage = 0; stage < kNumStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), 1);
      barrier_init(shared_address(&shared.empty[stage]), kNumConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // 2 x 128 x 232 + 128 x 40 registers are what 384 threads get at the launch cap of 168.
  if (warp < kNumCopyWarps) {
    give_registers<40>();
    CopyWarp{params, shared, warp, lane}.template run<Softmax>();
  } else {
    take_registers<232>();
    const int row = 16 * (warp - kNumCopyWarps);
    ConsumerWarpgroup<Softmax>{params, shared, row, lane}.run();
  }
}

}  // namespace nox
