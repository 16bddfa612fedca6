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

constexpr int kSampleChunks = 16;  // blocks a head in which sampled rows are summed
constexpr int kAmaxChunks = 32;    // and in which a flagged head's V is read again

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

// The kernels of the pre-pass, in the order of their launches: sample and finish_sample and pack
// (`accurate`), or pack_faithful; flag_values; pack_e4m3.
struct PackParams {
  const void* q;                   // [H, S, D] of one half-precision type, channels contiguous
  const void* k;                   // the same
  const void* v;                   // the same
  const int* slot_row;             // [Nq * 128]
  const int* valid_count;          // [Nk]
  const void* k_smooth_mean;       // [H, D] what `faithful` takes from K, or null for nothing
  signed char* q_image;            // outputs, as AttendParams reads them
  float* q_scale;
  signed char* k_image;
  TileHeader* header;
  signed char* v_image;
  float* v_channel_scale;
  unsigned char* v_is_e4m3;
  float* k_mean;                   // [H, D] `accurate`: mean of the sampled rows
  float* q_pool;                   // [H, Nq, num_stats, D] mean, max, min of real rows
  float* k_pool;                   // [H, Nk, 1, D] or, of two tiles together, [H, Nq, 3, D]
  float* sample;                   // workspace [H, kSampleChunks, 2, D] sums of K and of |V|
  float* k_mean_rotated;           // workspace [H, D] not normalised
  float* v_power;                  // workspace [H, Nq] sum of squares of V
  float* v_amax;                   // workspace [H, kAmaxChunks, D]
  long long q_head_stride;         // elements
  long long q_row_stride;
  long long k_head_stride;
  long long k_row_stride;
  long long v_head_stride;
  long long v_row_stride;
  int num_rows;                    // S
  int num_heads;
  int num_query_tiles;
  int num_stats;                   // 0, 1 or 3
  int is_aligned;                  // every row starts at a multiple of 16 bytes
  int is_faithful;                 // every head takes e4m3 values
};

}  // namespace nox
