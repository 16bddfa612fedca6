"""Route: score tiles, keep the best."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .layout import TileLayout
from .reference import ELEMENTS_PER_CHUNK, pack_bits, unpack_bits


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


@dataclass(frozen=True, eq=False)
class Pool:
    """Scored tiles that compete for one budget.

    Attributes:
        start: First scored tile.
        stop: Past the last one.
        eligible: [Nq, stop - start] bool, which of them compete in a query tile's row.
        keep_count: [Nq] int64, how many each query tile keeps; a row with fewer keeps them all.
    """

    start: int
    stop: int
    eligible: Tensor
    keep_count: Tensor


@dataclass(frozen=True, eq=False)
class Rule:
    """Which tiles each query tile keeps, given their scores.

    A scored tile is one or two KV tiles: Nox scores KV tiles, Veda tiles of 128.

    Attributes:
        forced: [Nq, Nt] bool, scored tiles kept whatever their score.
        pools: Scored tiles that compete, and for how many places.
        is_real: [Nk] bool, KV tiles that hold a row; no other is ever kept.
    """

    forced: Tensor
    pools: tuple[Pool, ...]
    is_real: Tensor

    @property
    def kv_per_tile(self) -> int:
        """KV tiles in a scored tile."""
        return self.is_real.shape[0] // self.forced.shape[1]

    @property
    def kept_share(self) -> float:
        """Share of (query tile, scored tile) pairs that are computed, known before any score.

        Counted on the spot: on a GPU it waits for it.
        """
        kept = int(self.forced.sum())
        for pool in self.pools:
            kept += int(pool.eligible.sum(1).minimum(pool.keep_count).sum())
        num_real = int(self.is_real.view(-1, self.kv_per_tile).any(1).sum())
        return kept / (self.forced.shape[0] * num_real)

    @property
    def keeps_everything(self) -> bool:
        """No row can lose a tile."""
        return self.kept_share == 1.0

    def rows(self, start: int, stop: int) -> "Rule":
        """The same rule for query tiles start..stop-1 alone: each keeps its own budget."""
        pools = tuple(
            replace(
                pool, eligible=pool.eligible[start:stop], keep_count=pool.keep_count[start:stop]
            )
            for pool in self.pools
        )
        return replace(self, forced=self.forced[start:stop], pools=pools)

    def to(self, device: torch.device | str) -> "Rule":
        """The same rule with its tensors on a device."""
        pools = tuple(
            replace(pool, eligible=pool.eligible.to(device), keep_count=pool.keep_count.to(device))
            for pool in self.pools
        )
        return Rule(self.forced.to(device), pools, self.is_real.to(device))


# ---- mode sparse ---------------------------------------------------------------------------------


def num_kept(keep_ratio: float, num_tiles: int) -> int:
    """Tiles kept of a pool, before the limit of its candidates.

    ceil(r * n), at least 1. The small term undoes the excess of a decimal such as 0.15 in binary,
    which would otherwise keep one tile too many.
    """
    return max(1, math.ceil(keep_ratio * num_tiles - 1e-9))


def sparse_rule(
    layout: TileLayout,
    keep_ratio: float,
    *,
    nonvideo_queries: str = "audio_dense",
    budget_base: str = "video",
    route_references: bool = False,
) -> Rule | None:
    """The rule of mode sparse; None where it would keep every tile.

    Always kept are a query tile's own tiles, the tail (text, conditions, audio), and for query
    tiles that `nonvideo_queries` calls dense all there is. The video's other tiles compete, and
    with `route_references` each large visual reference's do, for a budget of its own.

    Args:
        layout: How rows sit in tiles.
        keep_ratio: Share of a pool's tiles that each query tile keeps, in (0, 1].
        nonvideo_queries: See `AttentionRequest`.
        budget_base: See `AttentionRequest`.
        route_references: See `AttentionRequest`.
    """
    if keep_ratio >= 1.0:
        return None
    is_real = layout.valid_count > 0
    kv_idx = torch.arange(layout.num_kv_tiles, device=is_real.device)
    query_idx = torch.arange(layout.num_query_tiles, device=is_real.device)[:, None]
    pools = [range(layout.first_tail_kv_tile)]
    if route_references:
        pools += layout.reference_kv_tiles
    forced = kv_idx // layout.kv_per_query_tile == query_idx
    competes = torch.zeros_like(is_real)
    for pool in pools:
        competes[pool.start : pool.stop] = True
    forced |= ~competes
    if nonvideo_queries == "audio_dense":
        forced[list(layout.audio_query_tiles)] = True
    elif nonvideo_queries == "all_dense":
        forced[layout.num_video_query_tiles :] = True
    forced &= is_real

    def budget(pool: range) -> Tensor:
        if budget_base == "all_keys" and pool.start == 0:  # the video's pool
            total = num_kept(keep_ratio, layout.num_real_kv_tiles)
            return (total - forced.sum(1)).clamp(min=1)
        num_tiles = int(is_real[pool.start : pool.stop].sum())
        return torch.full_like(query_idx[:, 0], num_kept(keep_ratio, num_tiles))

    rule = Rule(
        forced,
        tuple(
            Pool(
                pool.start,
                pool.stop,
                (is_real & ~forced)[:, pool.start : pool.stop],
                budget(pool),
            )
            for pool in pools
        ),
        is_real,
    )
    return None if rule.keeps_everything else rule


# ---- the route -----------------------------------------------------------------------------------


def score_tiles(q_embedding: Tensor, k_embedding: Tensor) -> Tensor:
    """Importance of every (query tile, scored tile) pair: a dot product.

    Mode sparse embeds a tile as the mean of its rows, a Veda predictor in its own space.

    Args:
        q_embedding: [H, Nq, E] float32 or float64.
        k_embedding: [H, Nt, E].

    Returns:
        [H, Nq, Nt] float32, summed in float64: the order of summation, and so how the work is
        split, shows only where terms cancel to their float64 rounding.
    """
    return (q_embedding.double() @ k_embedding.double().transpose(1, 2)).float()


def keep_best(scores: Tensor, rule: Rule) -> Selection:
    """Keep the forced tiles and, of each pool, the best.

    Ties keep the lower tile. A score that is not finite ranks last, but its tile stays eligible.

    Args:
        scores: [H, Nq, Nt] float32.
        rule: Tells what is forced and what competes.
    """
    kept = rule.forced.expand_as(scores).clone()
    for pool in rule.pools:
        score = scores[:, :, pool.start : pool.stop]
        # ascending and stable: the best first, equals by tile, infinity, and NaN at the end
        rank_by = torch.where(score.isfinite(), -score, math.inf)
        rank_by = rank_by.masked_fill(~pool.eligible, math.nan)
        order = rank_by.argsort(dim=2, stable=True)
        place = torch.arange(pool.stop - pool.start, device=scores.device)
        is_best = (place < pool.keep_count[:, None]).expand_as(score)
        best = torch.zeros_like(is_best).scatter(2, order, is_best)
        kept[:, :, pool.start : pool.stop] |= best & pool.eligible
    return Selection.from_mask(kept.repeat_interleave(rule.kv_per_tile, dim=2) & rule.is_real)


def keep_all(layout: TileLayout, num_heads: int) -> Selection:
    """Keep every KV tile that holds a row."""
    is_real = layout.valid_count > 0
    return Selection.from_mask(is_real.expand(num_heads, layout.num_query_tiles, -1))


def select(q_embedding: Tensor, k_embedding: Tensor, rule: Rule) -> Selection:
    """What each query tile keeps: the route itself, in pieces that bound its temporaries.

    Args:
        q_embedding: [H, Nq, E], see `score_tiles`.
        k_embedding: [H, Nt, E].
        rule: Of the Nq query tiles.
    """
    (num_heads, num_rows, _), num_tiles = q_embedding.shape, k_embedding.shape[1]
    # A pair has at once its score twice, its rank, its place and some masks, over 50 bytes in all:
    # this keeps them near 250 MB. With pieces a quarter as large here and in pool_tiles, launches
    # took over: 42 ms a route, not 9 (H200, tests/bench/bench_route.py, 2026-12-01).
    pairs_per_chunk = ELEMENTS_PER_CHUNK // 4
    rows_per_chunk = max(1, min(num_rows, pairs_per_chunk // num_tiles))
    heads_per_chunk = max(1, pairs_per_chunk // (rows_per_chunk * num_tiles))
    by_head = []
    for head in range(0, num_heads, heads_per_chunk):
        heads = slice(head, head + heads_per_chunk)
        by_row = []
        for row in range(0, num_rows, rows_per_chunk):
            rows = slice(row, row + rows_per_chunk)
            scores = score_tiles(q_embedding[heads, rows], k_embedding[heads])
            by_row.append(keep_best(scores, rule.rows(row, row + rows_per_chunk)).bits)
        by_head.append(torch.cat(by_row, dim=1))
    return Selection(torch.cat(by_head))
