// Parameters of every kernel: what Python passes, one struct a launch, a shape beside each pointer.
//
// H heads, S packed rows, Nq query tiles of 128 slots, Nk = 2 Nq KV tiles of 64 slots, D = 128
// channels. kernels.py mirrors these structs field by field.
#pragma once

namespace nox {

constexpr int kHeadDim = 128;
constexpr int kQueryTile = 128;
constexpr int kKvTile = 64;
constexpr int kQueryTileBytes = kQueryTile * kHeadDim;
constexpr int kKvTileBytes = kKvTile * kHeadDim;
constexpr int kSampleStride = 16;  // every 16th packed row stands for all of them

enum Dtype : int { kBfloat16 = 0, kFloat16 = 1 };

// What attention must know of a KV tile besides its image.
struct alignas(32) TileHeader {
  float k_scale[4];    // key j of the tile uses entry (j % 8) / 2
  float v_scale;       // beside the channel scale; 1 for e4m3
  float log2_v_scale;
  float inv_v_scale;
  float valid_count;   // real keys, 0..64; they come first
};

// One launch of block-sparse attention over tile images.
struct AttendParams {
  const signed char* q;            // [H, Nq] images of 128 rows x 128 bytes, 128-byte swizzle
  const float* q_scale;            // [H, Nq, 128]
  const signed char* k;            // [H, Nk] images of 64 keys x 128 bytes, 128-byte swizzle
  const signed char* v;            // [H, Nk] images of 128 channels x 64 keys, 64-byte swizzle
  const TileHeader* header;        // [H, Nk]
  const float* v_channel_scale;    // [H, D]
  const unsigned char* v_is_e4m3;  // [H] bool
  const unsigned* selection;       // [H, Nq, num_words], bit j % 32 of word j / 32 is KV tile j
  const int* slot_row;             // [Nq * 128] packed row of each slot, -1 = empty
  void* out;                       // [S, H, D] of out_dtype
  float* lse;                      // [H, S] natural logarithm of the softmax denominator, or null
  int* next_item;                  // [1] zero: the next query tile that no CTA has taken
  long long num_rows;              // S
  int num_heads;                   // at most 64
  int num_query_tiles;
  int num_words;
  int out_dtype;
  float log2_scale;                // 1 / sqrt(D) * log2(e)
};

}  // namespace nox
