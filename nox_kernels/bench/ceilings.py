"""Ceilings: the rates that this device reaches on plain matrix products and on a copy."""

from collections.abc import Callable

import torch

from ..errors import NoKernelError
from .timing import Samples, Timer, median

GEMM_SIZE, COPY_BYTES = 8192, 1 << 30
SMALL_GEMM_SIZE, SMALL_COPY_BYTES = 256, 1 << 20  # of a CPU


def _int8_gemm(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randint(-127, 128, (size, size), device=device).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


def _fp8_gemm(size: int, device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        raise NoKernelError("a CPU only emulates it")
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _bf16_gemm(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b.t()


def _copy(num_bytes: int, device: torch.device) -> Callable[[], object]:
    source = torch.randint(0, 256, (num_bytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure_ceilings(timer: Timer, repeats: int, reason_of: Callable[[Exception], str]) -> dict:
    """Rates of the device: "int8", "fp8", "bf16" in TFLOPS, "copy" in TB/s, read plus written.

    Returns:
        Name -> {"rate", "unit", "samples_ms", "reason"}; a rate that cannot be measured is None
        and has a reason.
    """
    size, num_bytes = GEMM_SIZE, COPY_BYTES
    if not timer.is_cuda:
        size, num_bytes = SMALL_GEMM_SIZE, SMALL_COPY_BYTES
    work = {
        "int8": (_int8_gemm, size, 2 * size**3, "TFLOPS"),
        "fp8": (_fp8_gemm, size, 2 * size**3, "TFLOPS"),
        "bf16": (_bf16_gemm, size, 2 * size**3, "TFLOPS"),
        "copy": (_copy, num_bytes, 2 * num_bytes, "TB/s"),
    }
    ceilings = {}
    for name, (make, argument, amount, unit) in work.items():
        samples, reason = Samples(), None
        try:
            call = make(argument, timer.device)
            timer.warm_up(call, samples)
            for _ in range(repeats):
                timer.sample(call, samples)
        except Exception as error:  # noqa: BLE001 - whatever it is, the report shows it
            reason = reason_of(error)
        typical = median(samples.device_ms)
        ceilings[name] = {
            "rate": amount / typical / 1e9 if typical and reason is None else None,
            "unit": unit,
            "samples_ms": samples.device_ms,
            "reason": reason,
        }
    return ceilings
