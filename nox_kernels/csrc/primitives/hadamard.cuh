// Hadamard rotation of 16 rows by a warp: small matrix instructions, no shuffles.
#pragma once

#include "rows.cuh"

namespace nox {

// Two signs of the 16 x 16 matrix, (-1)^popcount(k & n), as half-precision numbers: rows k = 2 t
// and 2 t + 1 of column n = g. Rows k + 8 are the same for n < 8 and the opposite for n + 8.
template <int kDtype>
__device__ __forceinline__ unsigned hadamard_signs(const Spread& at) {
  const unsigned one = kDtype == kBfloat16 ? 0x3f80u : 0x3c00u;
  const unsigned low = one | (__popc(2 * at.t & at.g) & 1) << 15;
  const unsigned high = one | (__popc((2 * at.t + 1) & at.g) & 1) << 15;
  return low | high << 16;
}

template <int kDtype>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                            unsigned b1) {
  if (kDtype == kBfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
}

// Rows as spread -> the same rows times the 128 x 128 matrix (-1)^popcount(i & j), which is the
// normalised one times sqrt(128). Channel bits 0, 1, 3 and 4 are turned by the instruction, bits
// 2, 5 and 6 by additions within the thread; y[r][8 j + i] is channel(j) + i.
template <int kDtype>
__device__ __forceinline__ void rotate(const uint4 (&x)[2][4], unsigned signs, float (&y)[2][32]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned word[2][4] = {{x[0][j].x, x[0][j].y, x[0][j].z, x[0][j].w},
                                 {x[1][j].x, x[1][j].y, x[1][j].z, x[1][j].w}};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const unsigned a[4] = {word[0][2 * u], word[1][2 * u], word[0][2 * u + 1],
                             word[1][2 * u + 1]};
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        float c[4];
        mma_16x8x16<kDtype>(c, a, signs, block ? signs ^ 0x80008000u : signs);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i >> 1][8 * j + 4 * u + 2 * block + (i & 1)] = c[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int width = 4; width <= 16; width *= 2) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i & width) continue;
        const float a = y[r][i], b = y[r][i + width];
        y[r][i] = __fadd_rn(a, b);
        y[r][i + width] = __fadd_rn(a, -b);
      }
    }
  }
}

}  // namespace nox
