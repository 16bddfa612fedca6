"""Ptxas report: what would slow a kernel down is found in NVRTC's log."""

import pytest

from nox_kernels import build
from nox_kernels.build import Unit
from nox_kernels.errors import BuildError
from nox_kernels.ptxas_report import Resources, faults, resources

LOG = """\
ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 128 bytes smem
ptxas info    : Compile time = 15.763 ms
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers
"""
# As NVRTC 12.8 and 13.0 say it.
NOTE = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'second'"
BUDGET = {"first": 10, "second": 168}


def unit(**budget):
    return Unit("unit", ("sm_90a",), budget, None)


def test_a_clean_log_has_no_fault():
    assert resources(LOG) == {"first": Resources(10, 0, 0, 0), "second": Resources(168, 0, 0, 0)}
    assert faults(unit(**BUDGET), LOG) == []


def test_a_register_over_budget_is_a_fault():
    (fault,) = faults(unit(first=9, second=168), LOG)
    assert fault == "first uses 10 registers, its budget is 9"


def test_the_budget_lists_every_kernel_and_no_other():
    assert faults(unit(first=10, third=20), LOG) == [
        "second uses 168 registers and has no budget in unit",
        "third is in the budget of unit, but ptxas reports no such kernel",
    ]


@pytest.mark.parametrize("code", ["C7508", *(f"C{number}" for number in range(7510, 7521))])
def test_a_note_of_lost_speed_is_a_fault(code):
    line = f"ptxas info    : ({code}) {NOTE}"
    assert faults(unit(**BUDGET), f"{line}\n{LOG}") == [line]


def test_another_note_is_none():
    for code in ("C7509", "C7521", "C7600"):
        assert faults(unit(**BUDGET), f"ptxas info    : ({code}) some news\n{LOG}") == []


@pytest.mark.parametrize("place", ["stack frame", "spill stores", "spill loads"])
def test_local_memory_is_a_fault(place):
    log = LOG.replace(f"0 bytes {place}", f"8 bytes {place}", 1)
    (fault,) = faults(unit(**BUDGET), log)
    assert fault.startswith("second spills ")


def test_a_called_function_must_not_spill_either():
    called = """\
ptxas info    : Function properties for _Z5otherPf
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
    (fault,) = faults(unit(**BUDGET), LOG + called)
    assert fault.startswith("_Z5otherPf spills 8 bytes out and 8 in")
    assert resources(LOG + called).keys() == BUDGET.keys()


SPILLER = """
struct Params { float* x; int count; };
extern "C" __global__ void __launch_bounds__(1024) spiller(const __grid_constant__ Params params) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; i++) v[i] = params.x[i * 1024 + threadIdx.x];
  for (int j = 0; j < params.count; j++) {
#pragma unroll
    for (int i = 0; i < 96; i++) v[i] = v[i] * v[(i * 7 + 3) % 96] + v[(i + 1) % 96];
  }
#pragma unroll
  for (int i = 0; i < 96; i++) params.x[i * 1024 + threadIdx.x] = v[i];
}
"""


# Two faults that ptxas only notes: a register count it cannot raise, and an accumulator that is
# touched between two wgmma.
SLOW = """
struct Params { float* x; int count; unsigned long long a, b; };
__device__ __noinline__ void other(float* x) { x[0] = 1; }
extern "C" __global__ void slow(const __grid_constant__ Params params) {
  float d[4] = {};
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < params.count; i++) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(params.a), "l"(params.b));
    d[0] += 1;
    other(params.x + 5);
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  params.x[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def compile_log(text, architecture):
    try:
        compiler = build.open_nvrtc(architecture)
    except BuildError as error:
        pytest.skip(str(error))
    flags = (f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v")
    return compiler.compile("text.cu", text, {}, flags).log


@pytest.mark.nvrtc
@pytest.mark.parametrize("architecture", build.ARCHITECTURES)
def test_a_kernel_that_really_spills_is_caught(architecture):
    log = compile_log(SPILLER, architecture)
    assert resources(log)["spiller"].num_registers == 64
    (fault,) = faults(unit(spiller=64), log)
    assert fault.startswith("spiller spills ")


@pytest.mark.nvrtc
def test_a_kernel_whose_wgmma_is_really_serialised_is_caught():
    found = " ".join(faults(unit(slow=255), compile_log(SLOW, "sm_90a")))
    assert "(C7508)" in found
    assert "(C7511)" in found
