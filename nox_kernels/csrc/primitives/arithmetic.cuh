// Arithmetic that must round the same everywhere: one PTX instruction each.
#pragma once

#include "../arch_traits.cuh"
#include "../params.h"

namespace nox {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four floats in 0..255, rounded half to even, as bytes; a in the lowest.
__device__ __forceinline__ unsigned pack_u8(float a, float b, float c, float d) {
  unsigned high, all;
  // four conversions and two packs become two F2IP; a lone cvt.rni.s32 would go to the slow unit
  asm("{\n"
      ".reg .s32 a, b, c, d;\n"
      "cvt.rni.s32.f32 a, %2;\n"
      "cvt.rni.s32.f32 b, %3;\n"
      "cvt.rni.s32.f32 c, %4;\n"
      "cvt.rni.s32.f32 d, %5;\n"
      "cvt.pack.sat.u8.s32.b32 %0, d, c, 0;\n"
      "cvt.pack.sat.u8.s32.b32 %1, b, a, %0;\n"
      "}\n"
      : "=&r"(high), "=r"(all)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return all;
}

// Four floats as signed bytes, rounded half to even and saturated; a in the lowest.
__device__ __forceinline__ unsigned pack_s8(float a, float b, float c, float d) {
  unsigned high, all;
  asm("{\n"
      ".reg .s32 a, b, c, d;\n"
      "cvt.rni.s32.f32 a, %2;\n"
      "cvt.rni.s32.f32 b, %3;\n"
      "cvt.rni.s32.f32 c, %4;\n"
      "cvt.rni.s32.f32 d, %5;\n"
      "cvt.pack.sat.s8.s32.b32 %0, d, c, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %1, b, a, %0;\n"
      "}\n"
      : "=&r"(high), "=r"(all)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return all;
}

// Floats as e4m3, rounded half to even and saturated; NaN stays NaN.
template <bool kByInstruction>
struct E4m3 {
  static __device__ __forceinline__ unsigned pack(float a, float b, float c, float d) {
    unsigned all;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}\n"
        : "=r"(all)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return all;
  }
};

template <>
struct E4m3<false> {
  static __device__ __forceinline__ unsigned byte(float x) {
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
    const float size = fminf(fabsf(x), 448.0f);
    if (x != x) return sign | 0x7f;
    if (size < 0x1p-6f) return sign | __float2int_rn(__fmul_rn(size, 512.0f));  // subnormal
    const unsigned bits = __float_as_uint(size);
    // 20 mantissa bits go, to even at a tie; the exponent's bias changes from 127 to 7
    return sign | ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  }

  static __device__ __forceinline__ unsigned pack(float a, float b, float c, float d) {
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
  }
};

// Four floats as e4m3; a in the lowest byte.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
  return E4m3<Arch::kConvertsToE4m3>::pack(a, b, c, d);
}

// Two floats as bfloat16 or float16; a in the low half.
__device__ __forceinline__ unsigned pack_half(float a, float b, int dtype) {
  unsigned both;
  if (dtype == kBfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  }
  return both;
}

// The two values of a 32-bit word of bfloat16 or float16.
__device__ __forceinline__ float2 unpack_half(unsigned both, int dtype) {
  float2 value;
  if (dtype == kBfloat16) {
    value.x = __uint_as_float(both << 16);
    value.y = __uint_as_float(both & 0xffff0000u);
  } else {
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}\n"
        : "=f"(value.x), "=f"(value.y)
        : "r"(both));
  }
  return value;
}

}  // namespace nox
