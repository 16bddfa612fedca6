"""Capability: every refusal says which implementation it is about, and why."""

from dataclasses import replace

import pytest
import torch

from nox_kernels.capability import KernelCase, pick
from nox_kernels.errors import NoKernelError

CPU = KernelCase("cpu", None, False, torch.float32, 128, "accurate")
GPU = KernelCase("cuda", (8, 9), False, torch.bfloat16, 128, "accurate")


def test_the_cpu_and_an_rtx_card_are_served_and_labelled_slow():
    assert pick(CPU).device_type == "cpu"
    assert pick(GPU).device_type == "cuda"
    assert "slow" in pick(CPU).note
    assert "slow" in pick(GPU).note


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
    case = KernelCase.on(torch.device("cpu"), torch.float32, 128, "accurate")
    assert case == CPU
