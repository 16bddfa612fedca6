"""The arithmetic of one query tile, held to the formulas step by step on hand-made tile images."""

import math

import pytest
import torch

from nox_kernels import reference
from nox_kernels.reference import TileImages

F32 = torch.float32


def float32(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(F32))


def make_images(q, q_scale, k, k_scale, v, *, is_e4m3, v_tile_scale=None) -> TileImages:
    """One head: q [1, 128, D] and k, v [Nk, 64, D] as integers (v of e4m3 as values)."""
    num_kv_tiles = len(k)
    v = v.to(torch.float8_e4m3fn).view(torch.int8) if is_e4m3 else v.to(torch.int8)
    if v_tile_scale is None:
        v_tile_scale = torch.ones(num_kv_tiles)
    return TileImages(
        q=q[None].to(torch.int8),
        q_scale=q_scale[None],
        k=k[None].to(torch.int8),
        header=reference.make_header(
            k_scale[None], v_tile_scale[None], torch.full((num_kv_tiles,), 64)
        ),
        v=v[None],
        v_channel_scale=torch.ones(1, 128),
        v_is_e4m3=torch.tensor([is_e4m3]),
        k_mean=torch.zeros(1, 128),
        q_pool=torch.zeros(1, 1, 0, 128),
        k_pool=torch.zeros(1, num_kv_tiles, 0, 128),
    )


def attend(images, kept, valid_count) -> torch.Tensor:
    """[128, D] of the only query tile."""
    mask = torch.zeros(1, 1, images.k.shape[1], dtype=torch.bool)
    mask[..., list(kept)] = True
    bits = reference.pack_bits(mask)
    header = images.header.clone()
    header[..., 7] = torch.tensor(valid_count)
    rows = torch.arange(128, dtype=torch.int32)
    out, _ = reference.tile_attention(images._replace(header=header), bits, rows, 128, F32)
    return out[:, 0]


def random_images(num_kv_tiles, *, is_e4m3, seed=0) -> TileImages:
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape):
        return torch.randint(-127, 128, shape, generator=generator)

    v = torch.randn(num_kv_tiles, 64, 128, generator=generator) * (100 if is_e4m3 else 40)
    return make_images(
        integers(1, 128, 128),
        torch.rand(1, 128, generator=generator) * 0.02 + 0.01,
        integers(num_kv_tiles, 64, 128),
        torch.rand(num_kv_tiles, 4, generator=generator) * 0.02 + 0.01,
        v if is_e4m3 else v.round().clamp(-127, 127),
        is_e4m3=is_e4m3,
        v_tile_scale=None if is_e4m3 else torch.rand(num_kv_tiles, generator=generator) + 0.02,
    )


def keys_of(images, tiles, valid_count):
    """(k, k_scale, v, v_tile_scale) of the real keys of some tiles, a row per key."""
    group = torch.arange(64) % 8 // 2
    parts = []
    for tile in tiles:
        n = valid_count[tile]
        v = images.v[0, tile, :n]
        v = v.view(torch.float8_e4m3fn) if images.v_is_e4m3[0] else v
        parts.append(
            (
                images.k[0, tile, :n].double(),
                images.k_scale[0, tile][group][:n],
                v.double(),
                images.v_tile_scale[0, tile].expand(n),
            )
        )
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def sage_row(images, row, kept, valid_count) -> torch.Tensor:
    """SageAttention 2.2 on sm_90, one row: main loop, last tile, epilogue, each rounding spelled."""
    c0 = torch.tensor(128**-0.5) * torch.tensor(1.44269504)
    offset = float32(0xC10CE979 - (1 << 32))
    m, d, out = torch.tensor(-5e6), torch.tensor(1.0), torch.zeros(128)
    pairs = [kept[i : i + 2] for i in range(0, len(kept), 2)]
    for pair in pairs:
        k, k_scale, v, _ = keys_of(images, pair, valid_count)
        score = (k @ images.q[0, 0, row].double()).float()
        scale = images.q_scale[0, 0, row] * k_scale
        factor = (c0 * scale).double()
        if pair is pairs[-1]:  # dequantised first
            score, factor = score * scale, c0.double()
        peak = (score.double() * factor + offset).float().max()
        m_new = torch.maximum(m, peak)
        p = (score.double() * factor - m_new.double()).float().exp2()
        a = (m - m_new).exp2()
        d = (d.double() * a + p.double().sum().float()).float()
        p8 = p.clamp(max=448.0).to(torch.float8_e4m3fn).double()
        out = (out.double() * a + (p8 @ v).float()).float()
        m = m_new
    return out * (1 / d)


def accurate_row(images, row, kept, valid_count) -> torch.Tensor:
    """`accurate`, one row, in float64 but for the rounding of P, with a level per step."""
    c = 128**-0.5 * math.log2(math.e)
    out, d = torch.zeros(128, dtype=torch.float64), 0.0
    running, level = -math.inf, -1e30
    for pair in (kept[i : i + 2] for i in range(0, len(kept), 2)):
        k, k_scale, v, v_scale = keys_of(images, pair, valid_count)
        logit = (k @ images.q[0, 0, row].double()) * (
            images.q_scale[0, 0, row].double() * k_scale.double() * c
        )
        shifted = logit + v_scale.double().log2()
        running = max(running, float(shifted.max()))
        fresh = max(float(shifted.max()) - 7.994, running - 24.0)
        p = (shifted - fresh).exp2().round()
        carry = 2.0 ** (level - fresh)
        out = out * carry + p @ v
        d = d * carry + float((p / v_scale.double()).sum())
        level = fresh
    return out / d


KEPT = [(0, 1, 2, 3), (1, 2, 4), (4,), (0, 3, 4)]
VALID = [64, 64, 37, 64, 3]


@pytest.mark.parametrize("kept", KEPT)
def test_e4m3_rows_equal_sages_formulas_bit_for_bit(kept):
    images = random_images(5, is_e4m3=True)
    out = attend(images, kept, VALID)
    for row in (0, 1, 77, 127):
        assert torch.equal(out[row], sage_row(images, row, kept, VALID))


@pytest.mark.parametrize("kept", KEPT)
def test_int8_rows_equal_their_formulas(kept):
    images = random_images(5, is_e4m3=False)
    out = attend(images, kept, VALID)
    for row in (0, 1, 77, 127):
        expected = accurate_row(images, row, kept, VALID)
        # float32 moves a rounding of P now and then, by 1 of 255
        error = (out[row].double() - expected).norm() / expected.norm()
        assert error < 2e-3


def test_logits_far_below_zero_do_not_meet_the_start_of_the_maximum():
    images = random_images(2, is_e4m3=True)
    images = images._replace(  # every logit about -1,050
        q=torch.full_like(images.q, 127),
        q_scale=torch.full_like(images.q_scale, 0.02),
        k=torch.full_like(images.k, -127),
    )
    images.k_scale.fill_(0.02)
    out = attend(images, (0, 1), [64, 64])
    v = images.v.view(torch.float8_e4m3fn).double()[0].flatten(0, 1)
    torch.testing.assert_close(out[5].double(), v.mean(0), rtol=1e-3, atol=0.02)


def test_the_level_cannot_slide_so_far_that_the_output_overflows():
    # each step's logits lie 200 powers of two under the step before
    k = torch.stack([torch.full((64, 128), value) for value in (127, 127, 64, 64, 1, 1)])
    images = make_images(
        torch.full((1, 128, 128), 127),
        torch.full((1, 128), 0.05),
        k,
        torch.full((6, 4), 0.031),
        torch.full((6, 64, 128), 100),
        is_e4m3=False,
    )
    out = attend(images, range(6), [64] * 6)
    torch.testing.assert_close(out, torch.full((128, 128), 100.0))


def test_one_key_shows_the_offset_of_the_maximum():
    # alone, a key has P = 2^8.807, which e4m3 rounds up to 448
    images = random_images(1, is_e4m3=True)
    out = attend(images, (0,), [1])
    v = images.v.view(torch.float8_e4m3fn)[0, 0, 0].double()
    expected = 448 / 2**8.807 * v
    torch.testing.assert_close(out[9].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_e4m3", [True, False])
def test_groups_of_padding_with_scale_zero_do_no_harm(is_e4m3):
    images = random_images(3, is_e4m3=is_e4m3)
    images.k_scale[0, 2] = torch.tensor([0.01, 0.01, 0.0, 0.0])  # 3 keys: groups 2, 3 are empty
    images.k[0, 2, 3:] = 0
    out = attend(images, (0, 1, 2), [64, 64, 3])
    assert out.isfinite().all()
    images.k_scale[0, 2, 2:] = 7.0
    assert torch.equal(attend(images, (0, 1, 2), [64, 64, 3]), out)


def test_faithful_scales_use_float32_constants_and_one_rounding():
    x = torch.rand(1, 16, 128, generator=torch.Generator().manual_seed(3)) * 3
    amax = x.abs().amax(2, keepdim=True)
    _, scale = reference._quantise_faithful(x, amax)
    exact = amax.double() * float32(0x3C010204) + float32(0x33D6BF95)
    assert torch.equal(scale, exact.float())


def test_faithful_rounds_half_away_from_zero():
    x = torch.tensor([[0.495, 0.505, -0.495, -0.505, 1.499, 1.501, 127.0]])
    amax = torch.tensor([[127.0]])
    q, _ = reference._quantise_faithful(x, amax)
    assert q.tolist() == [[0, 1, 0, -1, 1, 2, 127]]


def test_accurate_rounds_half_to_even_and_keeps_zeros():
    q, scale = reference._quantise_accurate(
        torch.tensor([[0.5, 1.5, 2.5, -0.5, 127.0]]), torch.tensor([[127.0]])
    )
    assert q.tolist() == [[0, 2, 2, 0, 127]]
    q, scale = reference._quantise_accurate(torch.zeros(1, 4), torch.zeros(1, 1))
    assert not q.any()
    assert scale.isfinite().all()
