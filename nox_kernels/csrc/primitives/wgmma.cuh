// wgmma: 64 rows x 128 columns x 32 bytes of depth, as one instruction each.
//
// Accumulators: thread `lane` of a warp holds rows g = lane / 4 and g + 8 of its warp's 16 and, of
// each 8 columns n, columns 2 t and 2 t + 1 with t = lane % 4:
//   c[4 n], c[4 n + 1] of row g;  c[4 n + 2], c[4 n + 3] of row g + 8.
// An 8-bit A operand in registers: a[0] holds bytes 4 t .. 4 t + 3 of row g, a[1] of row g + 8;
// a[2] and a[3] the same of bytes 16 + 4 t ...
#pragma once

namespace nox {

// Matrix descriptor (PTX ISA, "Matrix descriptor format") of a K-major operand: swizzled rows of 128
// or 64 bytes, in atoms of 8 rows that follow each other. `address` counts 16 bytes. The high word
// is a constant, so that moving through a tile is one 32-bit addition.
template <int kRowBytes>
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  constexpr unsigned kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr unsigned kHigh = kSwizzle << 30 | kRowBytes * 8 / 16;
  return static_cast<unsigned long long>(kHigh) << 32 | (1u << 16 | address);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warp's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define NOX_16(c, k, i)                                                                     \
  "+" k(c[i]), "+" k(c[i + 1]), "+" k(c[i + 2]), "+" k(c[i + 3]), "+" k(c[i + 4]),          \
      "+" k(c[i + 5]), "+" k(c[i + 6]), "+" k(c[i + 7]), "+" k(c[i + 8]), "+" k(c[i + 9]),  \
      "+" k(c[i + 10]), "+" k(c[i + 11]), "+" k(c[i + 12]), "+" k(c[i + 13]),               \
      "+" k(c[i + 14]), "+" k(c[i + 15])
#define NOX_64(c, k) NOX_16(c, k, 0), NOX_16(c, k, 16), NOX_16(c, k, 32), NOX_16(c, k, 48)

// c (+)= A B^T of signed bytes, both in shared memory.
__device__ __forceinline__ void wgmma_s8(int (&c)[64], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, "
      "%64, %65, p;\n"
      "}\n"
      : NOX_64(c, "r")
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// c (+)= A B^T: unsigned bytes in registers times signed bytes in shared memory.
__device__ __forceinline__ void wgmma_pv(int (&c)[64], const unsigned* a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, "
      "{%64, %65, %66, %67}, %68, p;\n"
      "}\n"
      : NOX_64(c, "r")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// c (+)= A B^T of e4m3: A in registers, B in shared memory.
__device__ __forceinline__ void wgmma_pv(float (&c)[64], const unsigned* a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1;\n"
      "}\n"
      : NOX_64(c, "f")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef NOX_64
#undef NOX_16

}  // namespace nox
