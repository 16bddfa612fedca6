"""Routes on CUDA tensors: the CPU's tiles, without waiting for the GPU."""

import pytest
import torch

from nox_kernels.attention import attend_layer, route_group
from nox_kernels.layout_table import preset_table
from nox_kernels.plan import make_plan
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import t2va_sequence
from nox_kernels.veda.predictor import VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_HEADS = 8
SEQUENCE = t2va_sequence(640, 480, 56, 77, num_keyframes=1)


def layer_of(mode, device, **terms):
    """A layer of a mode, with a predictor that has two shapes."""
    dense = DenseRequest(first_steps=0, blocks=())
    sizes = {"num_layers": 1, "num_heads": NUM_HEADS}
    plan = random_plan("clip", SEQUENCE.token_grid, ("4x8x4", "2x8x8"), **sizes)
    bundle = random_bundle((plan,), **sizes, **terms)
    return make_plan(
        AttentionRequest(mode, keep_ratio=0.2),
        dense,
        SEQUENCE,
        preset_table("uniform", 1, NUM_HEADS),
        Schedule.resolve((1.0, 0.0), dense, lambda percent: 1 - percent),
        device=device,
        predictor=VedaPredictor.from_bundle(bundle).to(device),
        **sizes,
    ).layer(0, mode)


def rows():
    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCE.num_rows, 2, NUM_HEADS, 128)
    buffer = torch.randn(shape, generator=generator).bfloat16()
    return [buffer[:, part].transpose(0, 1) for part in range(2)]


CASES = {
    "sparse": ("sparse", {}),
    "veda": ("veda", {}),
    "veda with every term": ("veda", {"second_order_rank": 16, "count_term": True}),
}


@pytest.mark.parametrize(("mode", "terms"), CASES.values(), ids=CASES)
def test_the_gpu_keeps_the_tiles_that_the_cpu_keeps(mode, terms):
    q, k = rows()
    on_cpu, on_gpu = (layer_of(mode, device, **terms) for device in ("cpu", "cuda"))
    for theirs, ours in zip(on_cpu.groups, on_gpu.groups, strict=True):
        heads = list(theirs.heads)
        expected = route_group(theirs, q[heads], k[heads]).bits
        found = route_group(ours, q[heads].cuda(), k[heads].cuda()).bits
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("mode", "terms"), CASES.values(), ids=CASES)
def test_a_route_never_waits_for_the_gpu(mode, terms):
    q, k = (x.cuda() for x in rows())
    layer = layer_of(mode, "cuda", **terms)
    parts = [
        (group, q.index_select(0, group.head_idx), k.index_select(0, group.head_idx))
        for group in layer.groups
    ]
    for group, own_q, own_k in parts:  # whatever is made once
        route_group(group, own_q, own_k)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for group, own_q, own_k in parts:
            route_group(group, own_q, own_k)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_left_on_the_cpu_give_the_same_clip():
    q, k = rows()
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    inputs = [x.cuda() for x in (q, k, v)]
    layer = layer_of("veda", "cuda")
    expected = attend_layer(layer, *inputs)
    layer.groups[0].predictor.cpu()  # the module that both groups share
    assert torch.equal(attend_layer(layer, *inputs), expected)
