// Hopper's asynchronous machinery: transaction barriers, bulk copies, register hand-over.
#pragma once

// A CTA's dynamic shared memory. Outside the namespace, so that its name in PTX is this one.
extern __shared__ __align__(1024) unsigned char nox_shared[];

namespace nox {

// Address in shared memory of something in nox_shared. By the symbol's own address, a constant:
// the usual conversion from a pointer reads a special register again and again.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  unsigned base;
  asm("mov.u32 %0, nox_shared;" : "=r"(base));
  return base + static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - nox_shared);
}

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(unsigned barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// 16-byte aligned at both ends, a multiple of 16 bytes; counts its bytes on the barrier.
__device__ __forceinline__ void bulk_copy(unsigned destination, const void* source, int num_bytes,
                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(__cvta_generic_to_global(source)), "r"(num_bytes), "r"(barrier)
      : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace nox
