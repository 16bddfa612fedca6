// The pre-pass, for bfloat16 and for float16.
#include "../pack.cuh"
#include "../pack_e4m3.cuh"
#include "../pack_faithful.cuh"
#include "../sample.cuh"

#define NOX_PACK_KERNEL(op, suffix, dtype, threads, ctas)                       \
  extern "C" __global__ void __launch_bounds__(threads, ctas)                   \
      nox_##op##_##suffix(const __grid_constant__ nox::PackParams params) {     \
    nox::op<dtype>(params);                                                     \
  }

#define NOX_PACK_KERNELS(suffix, dtype)                  \
  NOX_PACK_KERNEL(sample, suffix, dtype, 256, 4)         \
  NOX_PACK_KERNEL(pack, suffix, dtype, 256, 2)           \
  NOX_PACK_KERNEL(pack_faithful, suffix, dtype, 256, 2)  \
  NOX_PACK_KERNEL(flag_values, suffix, dtype, 256, 4)    \
  NOX_PACK_KERNEL(pack_e4m3, suffix, dtype, 256, 2)

NOX_PACK_KERNELS(bf16, nox::kBfloat16)
NOX_PACK_KERNELS(f16, nox::kFloat16)

extern "C" __global__ void __launch_bounds__(128)
    nox_finish_sample(const __grid_constant__ nox::PackParams params) {
  nox::finish_sample(params);
}
