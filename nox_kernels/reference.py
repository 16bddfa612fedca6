"""Reference: the slow torch twin of every op, and the contract that kernels are held to.

Integer products are computed as float32 matrix products, which are exact here: |sum| is at most
127 * 127 * 128 < 2^24 for Q K^T and 255 * 127 * 128 < 2^24 for P V. Attention takes sums that
are not exact in float64. So its result does not depend on how the work is split.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BITS = 32  # KV tiles in one word of a selection
TINY = 2.0**-100  # smallest amax that is scaled: 448 / TINY is finite
SAMPLE_STRIDE = 16  # every 16th packed row stands for all of them: no pass over K or V is spent
ELEMENTS_PER_CHUNK = 1 << 24  # bounds a temporary to 64 MB of float32, or 128 MB of float64
# Statistics of a tile's real rows that a route may ask for, one after the other.
POOLINGS = {"none": 0, "mean": 1, "extremes": 3, "variance": 4}  # mean, max, min, variance
QUERY_TILES_PER_CHUNK = (32, 512)  # at once: a CPU's cache holds the step, a GPU is kept busy


class TileImages(NamedTuple):
    """What the pre-pass writes: Q, K and V quantised in tile order, and statistics of their tiles.

    H heads, Nq query tiles of 128 slots, Nk KV tiles of 64 slots, D = 128 channels, P statistics
    of each of Np pooled key tiles (see `pack_tiles`).
    """

    q: Tensor  # [H, Nq, 128, D] int8
    q_scale: Tensor  # [H, Nq, 128] float32, one per row
    k: Tensor  # [H, Nk, 64, D] int8
    header: Tensor  # [H, Nk, 8] float32, all that a step needs of a KV tile; see `make_header`
    v: Tensor  # [H, Nk, 64, D] int8, or the bytes of e4m3 where the head is flagged
    v_channel_scale: Tensor  # [H, D] float32
    v_is_e4m3: Tensor  # [H] bool: this head takes FP8 P V
    k_mean: Tensor  # [H, D] float32, what was taken from every key
    q_pool: Tensor  # [H, Nq, P, D] float32, of the given values over real rows
    k_pool: Tensor  # [H, Np, P, D] float32

    @property
    def k_scale(self) -> Tensor:
        """[H, Nk, 4] float32; key j of a tile uses entry (j % 8) // 2."""
        return self.header[..., :4]

    @property
    def v_tile_scale(self) -> Tensor:
        """[H, Nk] float32, beside the channel scale; 1 for e4m3."""
        return self.header[..., 4]


def make_header(k_scale: Tensor, v_tile_scale: Tensor, valid_count: Tensor) -> Tensor:
    """Eight numbers of a KV tile: K scales 0..3, V scale, its log2, its inverse, real rows.

    Args:
        k_scale: [H, Nk, 4] float32.
        v_tile_scale: [H, Nk] float32, positive.
        valid_count: [Nk] int32.

    Returns:
        [H, Nk, 8] float32, in the order of `TileHeader` in params.h.
    """
    count = valid_count.float().expand_as(v_tile_scale)
    rest = (v_tile_scale, v_tile_scale.log2(), v_tile_scale.reciprocal(), count)
    return torch.cat((k_scale, torch.stack(rest, dim=2)), dim=2)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last axis by the normalised Hadamard matrix of its length, a power of two.

    Done by additions in a fixed order (the fast Walsh-Hadamard transform), not as a matrix
    product, so that its bits do not depend on the number of rows.
    """
    size = x.shape[-1]
    width = 1
    while width < size:
        a, b = x.unflatten(-1, (size // (2 * width), 2, width)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        width *= 2
    return x * size**-0.5


def dense_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    """Attention in float64: the truth that errors are measured against.

    Args:
        q: [H, R, D]; any number of rows.
        k: [H, S, D].
        v: [H, S, D].
        keep: [H, R, S] bool, the keys each row may see; None = all.

    Returns:
        [H, R, D] float64.
    """
    logits = q.double() @ k.double().transpose(1, 2) * q.shape[-1] ** -0.5
    if keep is not None:
        logits = logits.masked_fill(~keep, -math.inf)
    return logits.softmax(dim=2) @ v.double()


def pack_bits(mask: Tensor) -> Tensor:
    """[H, Nq, Nk] bool -> [H, Nq, ceil(Nk / 32)] int32; bit j % 32 of word j // 32 is KV tile j."""
    num_words = math.ceil(mask.shape[2] / BITS)
    padded = torch.nn.functional.pad(mask, (0, num_words * BITS - mask.shape[2]))
    # the words are summed in 64 bits; the conversion keeps the low 32, sign bit included
    weight = 1 << torch.arange(BITS, device=mask.device)
    return (padded.unflatten(2, (num_words, BITS)) * weight).sum(3).to(torch.int32)


def unpack_bits(bits: Tensor, num_kv_tiles: int) -> Tensor:
    """The inverse of `pack_bits`."""
    bit = torch.arange(BITS, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> bit) & 1).bool().flatten(2)[..., :num_kv_tiles]


# ---- pre-pass ------------------------------------------------------------------------------------


def to_tiles(x: Tensor, slot_row: Tensor, tile: int) -> Tensor:
    """Gather packed rows into tiles.

    Args:
        x: [H, S, D], any strides.
        slot_row: [num_slots] int32, the packed row in each slot, -1 = empty.
        tile: Slots of a tile; divides the number of slots.

    Returns:
        [H, N, tile, D]; empty slots hold 0.
    """
    tiles = x.index_select(1, slot_row.clamp(min=0))
    tiles.masked_fill_((slot_row < 0)[None, :, None], 0)
    return tiles.view(x.shape[0], -1, tile, x.shape[2])


def pool_tiles(x: Tensor, slot_row: Tensor, valid_count: Tensor, pooling: str) -> Tensor:
    """Statistics of the real rows of each tile.

    Sums are taken in float64: of bfloat16 values of like size they are exact, so the order of
    summation, a split over heads, or the device does not move them.

    Args:
        x: [H, S, D], any strides, a float dtype.
        slot_row: [N * T] int32, the packed row in each slot, -1 = empty. Real rows come first in
            each tile of T slots.
        valid_count: [N] int32, real rows of each tile.
        pooling: Which statistics, see `POOLINGS`.

    Returns:
        [H, N, P, D] float32: mean, max, min, population variance; 0 for a tile without a real row.
    """
    num_tiles, num_stats = valid_count.shape[0], POOLINGS[pooling]
    out = x.new_empty((x.shape[0], num_tiles, num_stats, x.shape[2]), dtype=torch.float32)
    if num_stats == 0:
        return out
    slot = slot_row.view(num_tiles, -1)
    is_padding = (slot < 0)[:, :, None]
    # padding repeats a real row, which no extreme minds, and is then cleared for the sums
    row = torch.where(slot < 0, slot[:, :1], slot).clamp(min=0)
    count = valid_count.clamp(min=1)[:, None]
    elements_per_tile = row.shape[1] * x.shape[2]
    tiles_per_chunk = max(1, min(num_tiles, ELEMENTS_PER_CHUNK // elements_per_tile))
    heads_per_chunk = max(1, ELEMENTS_PER_CHUNK // (tiles_per_chunk * elements_per_tile))
    for heads, head_out in zip(x.split(heads_per_chunk), out.split(heads_per_chunk), strict=True):
        for start in range(0, num_tiles, tiles_per_chunk):
            part = slice(start, start + tiles_per_chunk)
            tiles = heads.index_select(1, row[part].flatten()).unflatten(1, (-1, row.shape[1]))
            _pool(tiles, is_padding[part], count[part], head_out[:, part])
    out.masked_fill_((valid_count == 0)[:, None, None], 0)
    return out


def _pool(tiles: Tensor, is_padding: Tensor, count: Tensor, out: Tensor) -> None:
    """Write the statistics of gathered tiles, whose padding is overwritten.

    Args:
        tiles: [h, n, T, D]; padding repeats a real row.
        is_padding: [n, T, 1] bool.
        count: [n, 1] real rows, at least 1.
        out: [h, n, P, D] float32.
    """
    num_stats = out.shape[2]
    if num_stats >= 3:
        out[:, :, 1] = tiles.amax(2)
        out[:, :, 2] = tiles.amin(2)
    mean = tiles.masked_fill_(is_padding, 0).sum(2, dtype=torch.float64) / count
    out[:, :, 0] = mean
    if num_stats >= 4:
        apart = (tiles - mean[:, :, None]).masked_fill_(is_padding, 0)
        out[:, :, 3] = apart.square_().sum(2) / count


def _float32(x: float) -> float:
    """The float32 nearest to x, as a constant in a kernel has it."""
    return float(torch.tensor(x, dtype=torch.float32))


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c, rounded once: float64 holds the product of two float32 exactly."""
    return (a.double() * b + c).float()


def _quantise_accurate(tiles: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 with scale amax / 127, round half to even; a group of zeros gives zeros.

    `amax` broadcasts against `tiles`.
    """
    amax = amax.clamp(min=TINY)
    return (tiles * (127.0 / amax)).round().clamp(-127, 127).to(torch.int8), amax / 127.0


def _quantise_faithful(tiles: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 as SageAttention 2.2's per-thread quantiser: scale amax / 127 + 1e-7, half away from 0."""
    scale = _fma(amax, _float32(1 / 127), _float32(1e-7))
    scaled = tiles * scale.reciprocal()
    return (scaled + torch.where(scaled >= 0, 0.5, -0.5)).trunc().to(torch.int8), scale


def _key_groups(tiles: Tensor) -> Tensor:
    """[H, N, T, D] -> [H, N, T / 8, 4, 2, D]: keys j with the same (j % 8) // 2 share a scale."""
    return tiles.unflatten(2, (-1, 4, 2))


def _pack_qk_accurate(q: Tensor, k: Tensor, slot_row: Tensor) -> tuple[Tensor, ...]:
    """K centred by its sampled mean, both rotated; a scale per Q row, four per 64 keys."""
    mean = k[:, ::SAMPLE_STRIDE].mean(dim=1, keepdim=True)
    k = hadamard(k - mean)
    q_tiles = to_tiles(hadamard(q), slot_row, 128)
    q8, q_scale = _quantise_accurate(q_tiles, q_tiles.abs().amax(3, keepdim=True))
    k_groups = _key_groups(to_tiles(k, slot_row, 64))
    k8, k_scale = _quantise_accurate(k_groups, k_groups.abs().amax((2, 4, 5), keepdim=True))
    return q8, q_scale.squeeze(3), k8.flatten(2, 4), k_scale.flatten(2), mean[:, 0]


def _pack_qk_faithful(q: Tensor, k: Tensor, slot_row: Tensor) -> tuple[Tensor, ...]:
    """SageAttention 2.2 on sm_90: K minus its mean, scales per thread.

    16 query rows share 8 scales (rows r and r + 8), 128 keys share 4.
    """
    q_tiles = to_tiles(q.float(), slot_row, 128).unflatten(2, (8, 2, 8))  # [H, Nq, 8, 2, 8, D]
    q8, q_scale = _quantise_faithful(q_tiles, q_tiles.abs().amax((3, 5), keepdim=True))
    mean = k.mean(dim=1, keepdim=True)
    smooth = (k - mean).float()  # rounded to k's dtype, as upstream does
    k_groups = _key_groups(to_tiles(smooth, slot_row, 128))  # [H, Nk / 2, 16, 4, 2, D]
    k8, k_scale = _quantise_faithful(k_groups, k_groups.abs().amax((2, 4, 5), keepdim=True))
    return (
        q8.flatten(2, 4),
        q_scale.expand(-1, -1, -1, 2, -1, -1).flatten(2),
        k8.flatten(2, 4).unflatten(2, (2, 64)).flatten(1, 2),
        k_scale.flatten(2).repeat_interleave(2, dim=1),
        mean[:, 0].float(),
    )


def _pack_v_e4m3(v: Tensor, slot_row: Tensor) -> tuple[Tensor, Tensor]:
    """V as e4m3 with a scale per channel; a channel of zeros stays zero."""
    amax = v.abs().amax(dim=1).clamp(min=TINY)  # [H, D]
    tiles = to_tiles(v, slot_row, 64) * (E4M3_MAX / amax)[:, None, None]
    return tiles.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.int8), amax / E4M3_MAX


def _pack_v_int8(v: Tensor, slot_row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """V as INT8: a sampled mean-abs per channel times one scale per tile.

    Returns:
        Image, tile scale [H, Nk], channel scale [H, D], and a flag [H] for heads whose V this
        cannot hold: where the expected rounding error exceeds 0.035 of V, INT8 P V would lose to
        FP8 P V (0.0355 in all), as it does when one value towers over its tile.
    """
    channel = v[:, ::SAMPLE_STRIDE].abs().mean(dim=1)  # [H, D]
    # a channel that is silent in the sample must not blow up where it is not
    channel = channel.maximum(channel.mean(dim=1, keepdim=True) * 2.0**-10).clamp(min=1e-30)
    tiles = to_tiles(v, slot_row, 64) / channel[:, None, None]
    # floor: a quiet tile must not make its own weights vanish beside the others'
    amax = tiles.abs().amax((2, 3), keepdim=True).maximum(torch.ones_like(tiles[:, :1, :1, :1]))
    image, tile_scale = _quantise_accurate(tiles, amax)
    tile_scale = tile_scale.flatten(1)
    rounding = (tile_scale.double() ** 2 / 12).mean(1) * (channel.double() ** 2).mean(1)
    power = (v.double() ** 2).mean((1, 2))
    return image, tile_scale, channel, rounding > 0.035**2 * power


def _pack_heads(
    q: Tensor, k: Tensor, v: Tensor, slot_row: Tensor, valid_count: Tensor, precision: str
) -> tuple[Tensor, ...]:
    """The images of some heads: `TileImages` without its statistics."""
    pack_qk = _pack_qk_accurate if precision == "accurate" else _pack_qk_faithful
    if precision == "accurate":
        q, k = q.float(), k.float()
    q8, q_scale, k8, k_scale, k_mean = pack_qk(q, k, slot_row)
    v = v.float()
    v8, channel_scale = _pack_v_e4m3(v, slot_row)
    tile_scale = torch.ones_like(k_scale[:, :, 0])
    is_e4m3 = torch.ones_like(channel_scale[:, 0], dtype=torch.bool)
    if precision == "accurate":
        v_int8, int8_tile_scale, int8_channel_scale, is_e4m3 = _pack_v_int8(v, slot_row)
        v8 = torch.where(is_e4m3[:, None, None, None], v8, v_int8)
        tile_scale = torch.where(is_e4m3[:, None], tile_scale, int8_tile_scale)
        channel_scale = torch.where(is_e4m3[:, None], channel_scale, int8_channel_scale)
    header = make_header(k_scale, tile_scale, valid_count)
    return q8, q_scale, k8, header, v8, channel_scale, is_e4m3, k_mean


def pooled_tile(pooling: str) -> int:
    """Slots of a pooled key tile: Nox routes KV tiles of 64, Veda tiles of 128."""
    return 64 if pooling in ("none", "mean") else 128


def pool_qk(
    q: Tensor, k: Tensor, slot_row: Tensor, valid_count: Tensor, pooling: str
) -> tuple[Tensor, Tensor]:
    """Statistics of query tiles and of pooled key tiles, as in `TileImages`; see `pack_tiles`."""
    query_count = valid_count.view(-1, 2).sum(1)
    key_count = valid_count if pooled_tile(pooling) == 64 else query_count
    return (
        pool_tiles(q, slot_row, query_count, pooling),
        pool_tiles(k, slot_row, key_count, pooling),
    )


def pack_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_row: Tensor,
    valid_count: Tensor,
    precision: str,
    pooling: str,
) -> TileImages:
    """Gather, centre, rotate, quantise and pool Q, K and V.

    Args:
        q: [H, S, 128], any strides, a float dtype.
        k: The same.
        v: The same.
        slot_row: [num_slots] int32, the packed row in each slot, -1 = empty; a multiple of 128.
        valid_count: [Nk] int32, real rows of each KV tile.
        precision: "accurate" or "faithful".
        pooling: Statistics that the route needs, see `POOLINGS`; of tiles of 128 queries, and of
            `pooled_tile` keys.
    """
    heads_per_chunk = max(1, ELEMENTS_PER_CHUNK // (slot_row.shape[0] * q.shape[2]))
    images: list[Tensor] = []
    for start in range(0, q.shape[0], heads_per_chunk):
        heads = slice(start, start + heads_per_chunk)
        part = _pack_heads(q[heads], k[heads], v[heads], slot_row, valid_count, precision)
        # written in place: images that are joined at the end would be there twice
        images = images or [x.new_empty((q.shape[0], *x.shape[1:])) for x in part]
        for image, of_heads in zip(images, part, strict=True):
            image[heads] = of_heads
    q_pool, k_pool = pool_qk(q, k, slot_row, valid_count, pooling)
    return TileImages(*images, q_pool=q_pool, k_pool=k_pool)


# ---- attention -----------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Two KV tiles for each of B query tiles, of any heads with one type of V."""

    score: Tensor  # [B, 128, 128] float32, the integers of Q K^T
    scale: Tensor  # [B, 128, 128], Q scale times K scale
    is_key: Tensor  # [B, 1, 128] bool
    v: Tensor  # [B, 128, D] float32, the values of the image
    log2_v_scale: Tensor  # [B, 1, 128]
    inv_v_scale: Tensor  # [B, 1, 128]
    is_live: Tensor  # [B, 1, 1] bool: the query tile still has a tile to visit
    is_last: Tensor  # [B, 1, 1] bool


def _steps(images: TileImages, head: Tensor, query: Tensor, mask: Tensor) -> Iterator[_Step]:
    """Walk the kept tiles of B query tiles upwards, two at a time.

    Args:
        images: Tile images.
        head: [B] head of each query tile.
        query: [B] its number in the head.
        mask: [B, Nk] bool, its kept KV tiles.

    Yields:
        A `_Step` for every 128 keys.
    """
    q = images.q[head, query].float()
    q_scale = images.q_scale[head, query, :, None]
    count = mask.sum(1)
    kept = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    kept = torch.nn.functional.pad(kept, (0, 1))  # the partner of an odd last tile
    slot = torch.arange(64, device=mask.device)
    scale_of_key = slot % 8 // 2
    is_e4m3 = bool(images.v_is_e4m3[head[0]])
    row = head[:, None]
    for step_idx in range(math.ceil(int(count.max()) / 2)):
        place = torch.arange(2 * step_idx, 2 * step_idx + 2, device=mask.device)
        tile = kept[:, place]  # [B, 2]
        header = images.header[row, tile]  # [B, 2, 8]
        valid = torch.where(place < count[:, None], header[..., 7], 0)
        log2_v_scale, inv_v_scale = header[..., 5:7].repeat_interleave(64, dim=1).unbind(2)
        v = images.v[row, tile].flatten(1, 2)
        yield _Step(
            score=q @ images.k[row, tile].flatten(1, 2).float().transpose(1, 2),
            scale=q_scale * header[..., scale_of_key].flatten(1)[:, None],
            is_key=(slot < valid[..., None]).flatten(1)[:, None],
            v=(v.view(E4M3) if is_e4m3 else v).float(),
            log2_v_scale=log2_v_scale[:, None],
            inv_v_scale=inv_v_scale[:, None],
            is_live=(place[0] < count)[:, None, None],
            is_last=(step_idx == (count - 1) // 2)[:, None, None],
        )


def _sum(x: Tensor) -> Tensor:
    """Sum over the last axis, kept, without an order that matters."""
    return x.double().sum(dim=2, keepdim=True).float()


def _attend_int8(steps: Iterator[_Step], out: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and P V with u8 P and s8 V; O and d in units of the step's level.

    The tile scale of V rides in P's exponent and is divided out of the denominator again. The
    level follows the step's maximum, but stays within 24 bits of the running one, so that O
    cannot overflow.

    Returns:
        Values [B, 128, D], and the log2 of each row's sum of exponentials [B, 128, 1].
    """
    denominator = torch.zeros_like(out[..., :1])
    running = torch.full_like(denominator, -math.inf)
    level = torch.full_like(denominator, -1e30)
    log2_scale = _log2_softmax_scale(out.shape[2])
    for step in steps:
        addend = step.log2_v_scale
        logit = step.score * (step.scale * log2_scale)
        highest = (logit + addend).masked_fill(~step.is_key, -math.inf).amax(2, keepdim=True)
        running = running.maximum(highest)
        fresh = (highest - 7.994).maximum(running - 24.0)  # 2^7.994 rounds to 255
        fresh = torch.where(step.is_live, fresh, level)
        carry = (level - fresh).exp2()
        p = (logit + (addend - fresh)).exp2().round().masked_fill(~step.is_key, 0.0)
        out = out * carry + p @ step.v
        denominator = denominator * carry + _sum(p * step.inv_v_scale)
        level = fresh
    return out / denominator, level + denominator.log2()


def _attend_e4m3(steps: Iterator[_Step], out: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and P V of SageAttention 2.2 on sm_90: e4m3 P and V, promoted every 128 keys.

    The maximum is kept 8.807 < log2(448) below the true one, so that P fills e4m3's range. The
    last step dequantises its scores before the softmax scale, a rounding earlier.

    Returns:
        As `_attend_int8`.
    """
    offset = _float32(8.807)
    denominator = torch.ones_like(out[..., :1])
    highest = torch.full_like(denominator, -5e6)
    log2_scale = _log2_softmax_scale(out.shape[2])
    for step in steps:
        score = torch.where(step.is_last, step.score * step.scale, step.score)
        factor = torch.where(step.is_last, log2_scale, step.scale * log2_scale)
        # masked after the products: a group of padding may have scale 0, and -inf * 0 is NaN
        logit = _fma(score, factor, -offset).masked_fill(~step.is_key, -math.inf)
        fresh = highest.maximum(logit.amax(2, keepdim=True))
        fresh = torch.where(step.is_live, fresh, highest)
        p = _fma(score, factor, -fresh).exp2().masked_fill(~step.is_key, 0.0)
        carry = (highest - fresh).exp2()
        denominator = _fma(denominator, carry, _sum(p))
        p8 = p.clamp(max=E4M3_MAX).to(E4M3)
        # a product of two e4m3 values, and the sum of 128 of them, is exact in float64
        partial = (p8.double() @ step.v.double()).float()
        out = _fma(out, carry, partial)
        highest = fresh
    return out * denominator.reciprocal(), highest + denominator.log2()


def _log2_softmax_scale(head_dim: int) -> float:
    """1 / sqrt(D) * log2(e), rounded as a kernel in float32 has it."""
    return float(torch.tensor(head_dim**-0.5) * torch.tensor(1.44269504))


def tile_attention(
    images: TileImages, bits: Tensor, slot_row: Tensor, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention over the selected KV tiles.

    Args:
        images: Tile images of Q, K and V.
        bits: [H, Nq, ceil(Nk / 32)] int32 selection; every row selects a tile, never an empty one.
        slot_row: [Nq * 128] int32, the packed row in each slot, -1 = empty.
        num_rows: S; each packed row has one slot.
        dtype: Of the result.

    Returns:
        [S, H, D] in packed order; and [H, S] float32, the natural log of each row's sum of
        exponentials of its scaled logits, whose keys have `images.k_mean` taken off.
    """
    num_heads, num_query_tiles, query_tile, head_dim = images.q.shape
    device = bits.device
    mask = unpack_bits(bits, images.k.shape[1])
    count = mask.sum(2).flatten()  # of each (head, query tile)
    is_e4m3 = images.v_is_e4m3.repeat_interleave(num_query_tiles)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=dtype, device=device)
    lse = torch.empty(num_heads, num_rows, device=device)
    for attend, mine in ((_attend_int8, ~is_e4m3), (_attend_e4m3, is_e4m3)):
        # query tiles with about as many steps share a chunk; the split does not touch the result
        tiles = mine.nonzero().flatten()
        tiles = tiles[count[tiles].argsort(stable=True)]
        for chunk in tiles.split(QUERY_TILES_PER_CHUNK[device.type == "cuda"]):
            if not len(chunk):
                continue
            head, query = chunk // num_query_tiles, chunk % num_query_tiles
            steps = _steps(images, head, query, mask[head, query])
            zeros = torch.zeros(len(chunk), query_tile, head_dim, device=device)
            values, log2_sum = attend(steps, zeros)
            values = values * images.v_channel_scale[head, None]
            row = slot_row.view(-1, query_tile)[query].long()
            real = row >= 0
            head = head[:, None].expand_as(row)[real]
            out[row[real], head] = values[real].to(dtype)
            lse[head, row[real]] = log2_sum[..., 0][real] * math.log(2)
    return out, lse
