"""The kernels against their reference: images, attention, errors, any selection."""

import pytest
import torch

from nox_kernels import images as image_order
from nox_kernels import reference
from nox_kernels.layout import make_layout, raster_layout
from nox_kernels.sequence import t2va_sequence
from tests.cases import CASES, relative_error
from tests.gpu.kernels_case import LAYOUTS, all_bits, attend, needs_kernel, pack, reference_of

pytestmark = needs_kernel

SERVED = [case for case in CASES if case.dtype != torch.float32]
BF16_ROUNDING = 2.5e-3  # of a result that is rounded to bfloat16, relative L2


def loose(case):
    return 3e-4 if case.dtype == torch.float16 else BF16_ROUNDING


@pytest.mark.parametrize("layout_name", ["raster", "4x8x4"])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_accurate_images_are_the_references_but_for_ties(case, layout_name):
    qkv = case.make_inputs("cuda")
    layout = make_layout(case.sequence, layout_name).to("cuda")
    made = image_order.to_plain_order(pack(qkv, layout, "accurate", "extremes"))
    wanted = reference.pack_tiles(*qkv, layout.slot_row, layout.valid_count, "accurate", "extremes")
    assert torch.equal(made.v_is_e4m3, wanted.v_is_e4m3)
    for name in ("q", "k", "v"):
        apart = (getattr(made, name).int() - getattr(wanted, name).int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 1e-3
    for name in ("q_scale", "header", "v_channel_scale", "k_mean", "q_pool", "k_pool"):
        torch.testing.assert_close(
            getattr(made, name), getattr(wanted, name), rtol=1e-5, atol=2e-6, msg=name
        )


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_faithful_images_are_the_references_but_for_ties(case):
    qkv = case.make_inputs("cuda")
    layout = LAYOUTS["faithful"](case.sequence).to("cuda")
    made = image_order.to_plain_order(pack(qkv, layout, "faithful"))
    wanted = reference.pack_tiles(*qkv, layout.slot_row, layout.valid_count, "faithful", "none")
    assert made.v_is_e4m3.all()
    for name in ("q", "k", "v"):  # bytes of e4m3 are in order of size, so neighbours differ by 1
        apart = (getattr(made, name).int() - getattr(wanted, name).int()).abs()
        assert apart.max() <= 1, name
        assert (apart > 0).float().mean() < 1e-3, name
    for name in ("q_scale", "header", "v_channel_scale", "k_mean"):
        torch.testing.assert_close(
            getattr(made, name), getattr(wanted, name), rtol=1e-6, atol=0, msg=name
        )


@pytest.mark.parametrize("pooling", ["mean", "extremes", "variance"])
def test_pools_are_the_references(pooling):
    case = CASES[0]
    qkv = case.make_inputs("cuda")
    layout = raster_layout(case.sequence).to("cuda")
    made = pack(qkv, layout, "accurate", pooling)
    wanted = reference.pack_tiles(*qkv, layout.slot_row, layout.valid_count, "accurate", pooling)
    for name in ("q_pool", "k_pool"):
        torch.testing.assert_close(getattr(made, name), getattr(wanted, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_attention_is_the_references_on_the_same_images(case, precision):
    qkv = case.make_inputs("cuda")
    layout = LAYOUTS[precision](case.sequence).to("cuda")
    images = pack(qkv, layout, precision)
    bits = all_bits(layout, case.num_heads)
    out, lse = attend(images, bits, layout, case.dtype)
    wanted, wanted_lse = reference_of(images, bits, layout)
    assert relative_error(out, wanted) < loose(case)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("recipe", ["normal", "loud value, odd tiles"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_any_selection_is_the_references(share, recipe):
    case = next(case for case in SERVED if str(case) == recipe)
    qkv = case.make_inputs("cuda")
    layout = make_layout(case.sequence, "4x8x4").to("cuda")
    images = pack(qkv, layout, "accurate")
    generator = torch.Generator("cuda").manual_seed(3)
    shape = (case.num_heads, layout.num_query_tiles, layout.num_kv_tiles)
    keep = torch.rand(shape, generator=generator, device="cuda") < share
    keep |= torch.eye(layout.num_query_tiles, device="cuda").bool().repeat_interleave(2, 1)
    keep &= layout.valid_count > 0
    assert {int(n) % 2 for n in keep.sum(2).flatten()} == {0, 1}
    bits = reference.pack_bits(keep)
    out, lse = attend(images, bits, layout)
    wanted, wanted_lse = reference_of(images, bits, layout)
    assert relative_error(out, wanted) < BF16_ROUNDING
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_errors_against_float64(case):
    qkv = case.make_inputs("cuda")
    truth = reference.dense_attention(*qkv).transpose(0, 1)
    error = {}
    for precision, layout_of in LAYOUTS.items():
        layout = layout_of(case.sequence).to("cuda")
        images = pack(qkv, layout, precision)
        out = attend(images, all_bits(layout, case.num_heads), layout, case.dtype)[0]
        error[precision] = relative_error(out, truth)
    if case.recipe in ("normal", "strong"):
        assert error["accurate"] < 0.020
    assert error["accurate"] <= 1.02 * error["faithful"]


def test_the_log_sum_exp_is_that_of_the_centred_keys():
    case = CASES[1]
    q, k, v = case.make_inputs("cuda")
    layout = raster_layout(case.sequence).to("cuda")
    images = pack((q, k, v), layout, "accurate")
    lse = attend(images, all_bits(layout, case.num_heads), layout)[1]
    shift = (q.float() * images.k_mean[:, None]).sum(2) / 128**0.5
    wanted = (q.double() @ k.double().transpose(1, 2) / 128**0.5).logsumexp(2)
    assert float((lse + shift - wanted).abs().max()) < 0.25
    assert float((lse + shift - wanted).abs().mean()) < 0.02


def test_more_than_64_heads_are_refused_in_one_sentence():
    sequence = t2va_sequence(64, 64, 5, 10)
    layout = raster_layout(sequence).to("cuda")
    x = torch.zeros(65, sequence.num_rows, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="64 heads"):
        pack((x, x, x), layout, "accurate")
