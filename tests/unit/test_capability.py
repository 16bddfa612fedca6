"""Capability: every refusal says which implementation it is about, and why."""

import re
from dataclasses import replace

import pytest
import torch

from nox_kernels import capability, driver, kernels
from nox_kernels.capability import KernelCase, pick
from nox_kernels.errors import BuildError, DriverError, NoKernelError

CPU = KernelCase("cpu", None, False, torch.float32, 128, "accurate", 56)
GPU = KernelCase("cuda", (8, 9), False, torch.bfloat16, 128, "accurate", 56)


def test_the_cpu_and_an_rtx_card_are_served_and_labelled_slow():
    assert pick(CPU).device_type == "cpu"
    assert pick(GPU).device_type == "cuda"
    assert "slow" in pick(CPU).note
    assert "slow" in pick(GPU).note


HOPPER = replace(GPU, compute_capability=(9, 0))


def test_a_hopper_gpu_is_served_by_our_kernel_at_full_speed():
    spec = pick(HOPPER)
    assert (spec.name, spec.note) == ("Nox INT8 kernel (sm_90a)", "")
    assert spec.units == kernels.UNITS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "does not take float32"),
        ({"num_heads": 65}, "64 heads at most, got 65"),
        ({"compute_capability": (8, 9)}, r"for compute capability 9\.0, this GPU has 8\.9"),
        ({"compute_capability": (10, 0)}, r"this GPU has 10\.0"),
    ],
)
def test_what_our_kernel_does_not_take_goes_to_the_reference(change, words):
    case = replace(HOPPER, **change)
    assert "slow" in pick(case).note
    reason = capability.KERNELS[0].why_not(case)
    assert reason is not None
    assert re.search(words, reason)


def test_what_was_passed_over_is_told_for_its_own_kind_of_device():
    assert capability.passed_over(HOPPER) == []
    assert capability.passed_over(CPU) == []
    assert capability.passed_over(GPU) == [
        "Nox INT8 kernel (sm_90a) is for compute capability 9.0, this GPU has 8.9"
    ]


@pytest.mark.parametrize("change", [{}, {"dtype": torch.float32}, {"num_heads": 65}])
def test_the_ops_compute_with_what_was_picked(change, monkeypatch):
    case = replace(HOPPER, **change)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    served = kernels.serves(torch.device("cuda"), case.dtype, case.num_heads, case.head_dim)
    assert served == bool(pick(case).units)


@pytest.mark.parametrize("error", [BuildError("No NVRTC."), DriverError("Too old.")])
def test_a_kernel_that_cannot_be_loaded_is_a_refusal(error, monkeypatch):
    def refuse(*args):
        raise error

    monkeypatch.setattr(driver, "prepare", refuse)
    with pytest.raises(NoKernelError, match=str(error)[:-1]):
        capability.prepare(pick(HOPPER), torch.device("cuda"))
    assert capability.prepare(pick(CPU), torch.device("cpu")) is pick(CPU)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (replace(GPU, compute_capability=(7, 5)), r"compute capability 8\.0.*has 7\.5"),
        (replace(GPU, is_rocm=True), "ROCm"),
        (replace(GPU, device_type="mps", compute_capability=None), "tensors are on mps"),
        (replace(CPU, head_dim=64), "head_dim 128, got 64"),
        (replace(CPU, dtype=torch.float64), "float64"),
        (replace(CPU, precision="fast"), "precision fast"),
    ],
)
def test_a_refusal_holds_the_reason(case, words):
    with pytest.raises(NoKernelError, match=words):
        pick(case)


def test_describing_a_case_on_this_machine():
    case = KernelCase.on(torch.device("cpu"), torch.float32, 128, "accurate", 56)
    assert case == CPU
