"""Route: score tiles, keep the best."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import TileLayout
from .reference import TileImages, pack_bits, unpack_bits


@dataclass(frozen=True, eq=False)
class Selection:
    """What a route kept.

    Attributes:
        bits: [H, Nq, ceil(Nk / 32)] int32. Bit j % 32 of word j // 32 is KV tile j; tiles are
            walked in ascending order.
    """

    bits: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Selection":
        """Pack a [H, Nq, Nk] bool mask."""
        return cls(pack_bits(mask))

    def mask(self, num_kv_tiles: int) -> Tensor:
        """Unpack into a [H, Nq, Nk] bool mask."""
        return unpack_bits(self.bits, num_kv_tiles)


def num_kept(keep_ratio: float, num_video_kv_tiles: int) -> int:
    """Video KV tiles kept per query tile, before the limit of its candidates.

    ceil(r * nKv), at least 1. The small term undoes the excess of a decimal such as 0.15 in
    binary, which would otherwise keep one tile too many.
    """
    return max(1, math.ceil(keep_ratio * num_video_kv_tiles - 1e-9))


def score_tiles(q_mean: Tensor, k_mean: Tensor) -> Tensor:
    """Importance of every (query tile, KV tile) pair: the dot product of their means.

    Args:
        q_mean: [H, Nq, D] float32.
        k_mean: [H, Nk, D] float32.

    Returns:
        [H, Nq, Nk] float32, summed in float64: no order of summation, so no batch of heads, moves
        a near-tie.
    """
    return (q_mean.double() @ k_mean.double().transpose(1, 2)).float()


def forced_tiles(layout: TileLayout) -> Tensor:
    """[Nq, Nk] bool: KV tiles kept whatever their score.

    Every tail tile (text, conditions, audio), a video query tile's own tiles, and for query tiles
    that carry target audio all there is.
    """
    real = layout.valid_count > 0  # [Nk]
    kv_idx = torch.arange(layout.num_kv_tiles, device=real.device)
    query_idx = torch.arange(layout.num_query_tiles, device=real.device)[:, None]
    own = kv_idx // layout.kv_per_query_tile == query_idx
    forced = own | (kv_idx >= layout.first_tail_kv_tile)
    forced[list(layout.audio_query_tiles)] = True
    return forced & real


def candidate_tiles(layout: TileLayout) -> Tensor:
    """[Nq, Nk] bool: KV tiles that compete for the budget, real video tiles not already forced."""
    kv_idx = torch.arange(layout.num_kv_tiles, device=layout.valid_count.device)
    is_video = (layout.valid_count > 0) & (kv_idx < layout.first_tail_kv_tile)
    return is_video & ~forced_tiles(layout)


def keep_best(scores: Tensor, layout: TileLayout, num_kept: int) -> Selection:
    """Keep the forced tiles and, on top of them, the `num_kept` best candidates of each row.

    Ties keep the lower tile. A score that is not finite ranks last, but its tile stays eligible.

    Args:
        scores: [H, Nq, Nk] float32.
        layout: Tells forced tiles and candidates.
        num_kept: Candidates to keep per query tile; a row with fewer keeps them all.
    """
    candidates = candidate_tiles(layout)
    scores = torch.where(scores.isfinite(), scores, -math.inf)
    # best first, ties by index; then candidates before the rest, in that same order
    order = scores.argsort(dim=2, descending=True, stable=True)
    competes = candidates.expand_as(scores).gather(2, order)
    order = order.gather(2, competes.argsort(dim=2, descending=True, stable=True))
    best = torch.zeros_like(scores, dtype=torch.bool)
    best.scatter_(2, order[:, :, :num_kept], True)
    return Selection.from_mask(best & candidates | forced_tiles(layout))


def keep_all(layout: TileLayout, num_heads: int) -> Selection:
    """Keep every KV tile that holds a row."""
    real = layout.valid_count > 0
    return Selection.from_mask(real.expand(num_heads, layout.num_query_tiles, -1))


def select(images: TileImages, layout: TileLayout, num_kept: int | None) -> Selection:
    """What each query tile keeps: the route itself.

    Args:
        images: Their tile means are scored.
        layout: Tells forced tiles and candidates.
        num_kept: Candidates to keep per query tile; None keeps every tile.
    """
    if num_kept is None:
        return keep_all(layout, images.q.shape[0])
    return keep_best(score_tiles(images.q_mean, images.k_mean), layout, num_kept)
