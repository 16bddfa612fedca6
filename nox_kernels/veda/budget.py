"""Budget: how many tiles each query tile keeps under Veda, and which are always kept.

The rules are those of Miowtion, where Veda's predictors are trained: a budget costs the same
whatever a tile shape pads, a query tile's own tile is part of it, and global tiles (text, audio,
conditions that are not tiled) are dense both ways.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import KV_TILE, QUERY_TILE
from ..route import Pool, Rule


class Budget(NamedTuple):
    """A predictor's budget: a "ratio" of the real tokens' tiles, or a number of "tiles" a row."""

    kind: str
    value: float

    @property
    def keeps_everything(self) -> bool:
        """A whole ratio leaves nothing out."""
        return self.kind == "ratio" and self.value >= 1.0

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{100 * self.value:g} %"
        return f"{self.value:g} tile{'' if self.value == 1 else 's'}"


def per_row(budget: Budget, num_tokens: int, num_tiles: int, tile: int = QUERY_TILE) -> float:
    """Mean number of tiles that a query tile keeps of a block of tiles.

    A ratio counts the tiles that the block's tokens would fill without padding: all rows together
    keep ratio * n_ideal^2, however many tiles a shape makes of them.

    Args:
        budget: Of the block.
        num_tokens: Real tokens in the block.
        num_tiles: Tiles of the block, padding and all.
        tile: Slots of a tile.
    """
    if budget.kind == "tiles":
        return budget.value
    num_ideal = math.ceil(num_tokens / tile)
    return budget.value * num_ideal**2 / num_tiles


def split(mean: float, num_tiles: int) -> tuple[int, int, float]:
    """(low, high, share of rows that keep the higher count) of a mean number of tiles.

    The share is rounded to 12 decimals: 2.3 - 2 is not 0.3 in binary, and over 400 rows that
    would lose one.
    """
    if mean >= num_tiles:
        return num_tiles, num_tiles, 0.0
    low = min(max(math.floor(mean), 1), num_tiles)
    return low, min(low + 1, num_tiles), round(min(max(mean - low, 0.0), 1.0), 12)


def keep_counts(mean: float, num_tiles: int, num_rows: int) -> Tensor:
    """[num_rows] int64: tiles that each query tile keeps, spread evenly (Bresenham) by its number."""
    low, high, share = split(mean, num_tiles)
    row = torch.arange(num_rows, dtype=torch.float64)
    is_high = ((row + 1) * share).floor() > (row * share).floor()
    return torch.where(is_high, high, low)


def veda_rule(
    valid_count: Tensor,
    *,
    num_condition_tiles: int,
    num_video_tiles: int,
    target: Budget,
    conditions: Budget | None = None,
    tile: int = QUERY_TILE,
) -> Rule | None:
    """Veda's rule; None where it would keep every tile.

    Args:
        valid_count: [N] real rows of each tile of `tile` slots: tiled conditions, target video,
            then global tiles.
        num_condition_tiles: Tiles of tiled conditions.
        num_video_tiles: Tiles of conditions and target together.
        target: Budget of the target video's tiles.
        conditions: Budget of the tiled conditions'; needed where there are any.
        tile: Slots of a tile.
    """
    num_tiles = valid_count.shape[0]
    is_tile_real = valid_count > 0
    idx = torch.arange(num_tiles)
    is_video = idx < num_video_tiles
    own = torch.eye(num_tiles, dtype=torch.bool)
    forced = (own | ~is_video | ~is_video[:, None]) & is_tile_real
    pools = []
    blocks = [(num_condition_tiles, num_video_tiles, target)]
    if num_condition_tiles:
        assert conditions is not None
        blocks.insert(0, (0, num_condition_tiles, conditions))
    for start, stop, budget in blocks:
        mean = per_row(budget, int(valid_count[start:stop].sum()), stop - start, tile)
        if budget.keeps_everything:
            mean = float(stop - start)
        # rows are numbered over all video tiles; global ones keep everything anyway
        count = keep_counts(mean, stop - start, num_tiles)
        count = count - ((idx >= start) & (idx < stop)).long()  # the own tile is one of them
        eligible = (is_tile_real & ~forced)[:, start:stop]
        pools.append(Pool(start, stop, eligible, count))
    # a tile is two KV tiles, the second of which may be empty
    half = tile * KV_TILE // QUERY_TILE
    is_real = torch.stack((is_tile_real, valid_count > half), dim=1).flatten()
    rule = Rule(forced, tuple(pools), is_real)
    return None if rule.keeps_everything else rule
