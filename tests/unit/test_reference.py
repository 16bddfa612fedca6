"""The reference: INT8 attention against float64, on benign and hostile inputs."""

import pytest
import torch

from nox_kernels import reference, route
from nox_kernels.layout import make_layout, packed_layout, raster_layout
from tests.cases import CASES, Case, keep_tiles, mean_scores, relative_error

# Mean relative error over rows. `accurate` on random normal data: 0.0155 simulated in float64;
# `faithful`: 0.0386 measured of SageAttention 2.2 on an H200.
LIMITS = {
    "normal": (0.020, 0.040),
    "strong channels": (0.020, 0.050),
    "loud value": (0.040, 0.040),
    "loud value, odd tiles": (0.040, 0.040),
    "outlier keys": (0.040, 0.040),
    "silent channel": (0.020, 0.040),
    "sharp": (0.065, 0.075),
    "float32 ragged": (0.020, 0.040),
    # 76 keys: too few for the rounding of P to average out
    "float16 few keys": (0.030, 0.045),
}


def dense(case, precision, layout=None):
    q, k, v = case.make_inputs()
    if layout is None:
        layout = (raster_layout if precision == "accurate" else packed_layout)(case.sequence)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, precision, "mean")
    bits = route.keep_all(layout, case.num_heads).bits
    out = reference.tile_attention(images, bits, layout.slot_row, layout.num_rows, torch.float32)[0]
    return out.transpose(0, 1), images, layout


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_dense_error_stays_under_its_limit(case, precision):
    out, _, _ = dense(case, precision)
    truth = reference.dense_attention(*case.make_inputs())
    assert out.isfinite().all()
    assert relative_error(out, truth) < LIMITS[case.name][precision == "faithful"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accurate_is_never_worse_than_faithful(case):
    truth = reference.dense_attention(*case.make_inputs())
    accurate, faithful = (
        relative_error(dense(case, precision)[0], truth) for precision in ("accurate", "faithful")
    )
    assert accurate <= faithful * 1.01


def test_accurate_has_under_half_the_error_of_faithful_on_normal_data():
    truth = reference.dense_attention(*CASES[0].make_inputs())
    accurate, faithful = (
        relative_error(dense(CASES[0], precision)[0], truth)
        for precision in ("accurate", "faithful")
    )
    assert accurate < 0.5 * faithful


def test_only_the_head_with_the_loud_value_takes_fp8():
    case = Case("one loud head")
    q, k, v = case.make_inputs()
    v[1, 100, 7] = 1500.0
    layout = raster_layout(case.sequence)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, "accurate", "mean")
    assert images.v_is_e4m3.tolist() == [False, True]


@pytest.mark.parametrize("num_text", range(40, 72))
def test_a_flagged_head_is_finite_at_every_length(num_text):
    case = Case(
        "length", width=64, height=64, num_frames=22, num_text=num_text, recipe="loud value"
    )
    out, images, _ = dense(case, "accurate")
    assert images.v_is_e4m3.all()
    assert out.isfinite().all()


def test_zeros_everywhere_give_zeros():
    case = Case("zeros")
    layout = raster_layout(case.sequence)
    zeros = torch.zeros(2, case.sequence.num_rows, 128)
    for precision in ("accurate", "faithful"):
        images = reference.pack_tiles(
            zeros, zeros, zeros, layout.slot_row, layout.valid_count, precision, "none"
        )
        bits = route.keep_all(layout, 2).bits
        out = reference.tile_attention(
            images, bits, layout.slot_row, layout.num_rows, torch.float32
        )[0]
        assert not out.any()  # and no NaN


def test_tiny_values_do_not_overflow_their_scale():
    case = Case("tiny values")
    q, k, v = (x.float() * 1e-30 for x in case.make_inputs())
    layout = raster_layout(case.sequence)
    images = reference.pack_tiles(
        q, k, v * 1e-8, layout.slot_row, layout.valid_count, "faithful", "none"
    )
    bits = route.keep_all(layout, 2).bits
    out = reference.tile_attention(images, bits, layout.slot_row, layout.num_rows, torch.float32)[0]
    assert out.isfinite().all()


def test_a_channel_that_only_the_sample_misses_keeps_its_tile():
    case = Case("quiet between the samples")
    q, k, v = (x.float().clone() for x in case.make_inputs())
    v[..., 9] = 0.001
    v[:, ::16, 9] = 0.0
    layout = raster_layout(case.sequence)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, "accurate", "mean")
    assert not images.v_is_e4m3.any()
    bits = route.keep_all(layout, case.num_heads).bits
    out = reference.tile_attention(images, bits, layout.slot_row, layout.num_rows, torch.float32)[0]
    truth = reference.dense_attention(q, k, v)
    assert relative_error(out.transpose(0, 1), truth) < 0.020


def test_rotation_pays_on_strong_channels():
    case = CASES[1]
    truth = reference.dense_attention(*case.make_inputs())
    accurate = relative_error(dense(case, "accurate")[0], truth)
    faithful = relative_error(dense(case, "faithful")[0], truth)
    assert accurate < 0.45 * faithful


def test_hadamard_is_an_isometry_and_its_own_inverse():
    x = torch.randn(5, 128, dtype=torch.float64)
    rotated = reference.hadamard(x)
    torch.testing.assert_close(rotated @ rotated.T, x @ x.T)
    torch.testing.assert_close(reference.hadamard(rotated), x)
    assert not torch.allclose(rotated, x)


def test_hadamard_matches_the_kronecker_definition():
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(3, 128)
    torch.testing.assert_close(reference.hadamard(x), x @ matrix / 128**0.5)


@pytest.mark.parametrize("layout_name", ["raster", "4x8x4", "1x8x16"])
@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_sparse_matches_float64_over_its_kept_keys(layout_name, precision):
    case = CASES[0]
    q, k, v = case.make_inputs()
    layout = make_layout(case.sequence, layout_name)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, precision, "mean")
    selection = keep_tiles(mean_scores(images), layout, 2)
    out = reference.tile_attention(
        images, selection.bits, layout.slot_row, layout.num_rows, torch.float32
    )[0]
    mask = selection.mask(layout.num_kv_tiles)
    slot = layout.row_slot.long()
    keep = mask[:, slot // 128][:, :, slot // 64]  # [H, S, S]
    assert 0.3 < keep.float().mean() < 0.9  # really sparse
    truth = reference.dense_attention(q, k, v, keep)
    assert relative_error(out.transpose(0, 1), truth) < LIMITS["normal"][precision == "faithful"]


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_audio_rows_of_sparse_are_bit_equal_to_dense(precision):
    for num_text in (1, 63, 64, 65, 200):
        case = Case("audio", num_text=num_text)
        q, k, v = case.make_inputs()
        layout = raster_layout(case.sequence)
        images = reference.pack_tiles(
            q, k, v, layout.slot_row, layout.valid_count, precision, "mean"
        )
        kept = (
            keep_tiles(mean_scores(images), layout, 1),
            route.keep_all(layout, case.num_heads),
        )
        sparse, full = (
            reference.tile_attention(
                images, selection.bits, layout.slot_row, layout.num_rows, torch.float32
            )[0]
            for selection in kept
        )
        audio = case.sequence.is_audio
        assert torch.equal(sparse[audio], full[audio])
        assert not torch.equal(sparse[~audio], full[~audio])


def test_what_lies_in_empty_slots_never_reaches_a_row():
    case = CASES[5]
    out, images, layout = dense(case, "accurate")
    empty = (layout.slot_row < 0).view(-1, 64)
    poisoned = images._replace(k=images.k.clone(), v=images.v.clone(), q=images.q.clone())
    poisoned.k[:, empty] = 127
    poisoned.v[:, empty] = -127
    poisoned.q[:, empty.view(-1, 128)] = 127
    bits = route.keep_all(layout, case.num_heads).bits
    again = reference.tile_attention(
        poisoned, bits, layout.slot_row, layout.num_rows, torch.float32
    )[0]
    assert empty.any()
    assert torch.equal(again.transpose(0, 1), out)


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_the_split_into_chunks_does_not_touch_the_bits(precision, monkeypatch):
    out, _, _ = dense(CASES[1], precision)
    monkeypatch.setattr(reference, "ELEMENTS_PER_CHUNK", 1)
    monkeypatch.setattr(reference, "QUERY_TILES_PER_CHUNK", (1, 1))
    again, _, _ = dense(CASES[1], precision)
    assert torch.equal(out, again)


def test_a_nan_in_v_is_not_hidden():
    case = CASES[0]
    q, k, v = case.make_inputs()
    v[0, 5, 5] = float("nan")
    layout = raster_layout(case.sequence)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, "accurate", "mean")
    bits = route.keep_all(layout, case.num_heads).bits
    out = reference.tile_attention(images, bits, layout.slot_row, layout.num_rows, torch.float32)[0]
    assert out[:, 0].isnan().any()
    assert out[:, 1].isfinite().all()


def test_faithful_groups_scales_as_sage_does():
    case = CASES[0]
    q, k, v = case.make_inputs()
    layout = packed_layout(case.sequence)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, "faithful", "none")
    # rows r and r + 8 of each 16 share a Q scale: amax over both and all channels
    rows = q[0, :16].float().abs().amax(1)
    expected = torch.maximum(rows[:8], rows[8:]) / 127 + 1e-7
    torch.testing.assert_close(images.q_scale[0, 0, :16], expected.repeat(2))
    # keys with the same (key mod 8) // 2 of each 128 share a K scale, K being centred
    smooth = (k - k.mean(1, keepdim=True))[1, :128].float().abs().amax(1)
    group = torch.arange(128) % 8 // 2
    expected = torch.stack([smooth[group == g].max() for g in range(4)]) / 127 + 1e-7
    torch.testing.assert_close(images.k_scale[1, 0], expected)
    torch.testing.assert_close(images.k_scale[1, 1], expected)


def test_accurate_images_dequantise_to_the_rotated_centred_values():
    case = CASES[1]
    q, k, v = (x.float() for x in case.make_inputs())
    layout = raster_layout(case.sequence)
    images = reference.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, "accurate", "mean")
    slot = layout.row_slot.long()
    q_back = (images.q * images.q_scale[..., None]).flatten(1, 2)[:, slot]
    error = (q_back - reference.hadamard(q)).abs() / images.q_scale.flatten(1)[:, slot, None]
    assert error.max() <= 0.5001
    scale = images.k_scale[:, :, torch.arange(64) % 8 // 2]
    k_back = (images.k * scale[..., None]).flatten(1, 2)[:, slot]
    centred = reference.hadamard(k - k[:, ::16].mean(1, keepdim=True))
    error = (k_back - centred).abs() / scale.flatten(1)[:, slot, None]
    assert error.max() <= 0.5001
    v_scale = images.v_tile_scale[..., None, None] * images.v_channel_scale[:, None, None]
    v_back = (images.v * v_scale).flatten(1, 2)[:, slot]
    error = (v_back - v).abs() / v_scale.expand(-1, -1, 64, -1).flatten(1, 2)[:, slot]
    assert error.max() <= 0.5001
