// What GPUs can do that others cannot: the only place that reads __CUDA_ARCH__.
#pragma once

namespace nox {

template <int kArch>
struct ArchTraits {
  static constexpr bool kConvertsToE4m3 = kArch >= 890;
};

#ifdef __CUDA_ARCH__
using Arch = ArchTraits<__CUDA_ARCH__>;
#else
using Arch = ArchTraits<0>;
#endif

}  // namespace nox
