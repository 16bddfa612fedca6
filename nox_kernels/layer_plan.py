"""Layer plan: which heads of a layer share tiles, and what they keep of them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import TileLayout
from .route import Rule
from .veda.predictor import LayerPredictor


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads of a layer that share tile layout and rule.

    Attributes:
        heads: Heads of the call, ascending.
        layout: How their rows sit in tiles.
        rule: Which tiles they keep, given scores; None keeps every tile.
        kept_share: Share of tile pairs that are computed.
        predictor: What scores, under Veda; None scores by the tiles' means.
        head_idx: [h] int64, `heads` on the device.
        predictor_idx: [h] int64, the heads of the model that `heads` are.
    """

    heads: tuple[int, ...]
    layout: TileLayout
    rule: Rule | None
    kept_share: float
    predictor: LayerPredictor | None
    head_idx: Tensor
    predictor_idx: Tensor

    @property
    def pooling(self) -> str:
        """Statistics of tiles that the route needs, see `reference.POOLINGS`."""
        if self.rule is None:
            return "none"
        return "mean" if self.predictor is None else self.predictor.pooling

    def slice_heads(self, start: int, count: int) -> "HeadGroup | None":
        """The same for a call with heads start..start+count-1 alone; None if it has none of them."""
        mine = [n for n, head in enumerate(self.heads) if start <= head < start + count]
        if not mine:
            return None
        first, last = mine[0], mine[-1] + 1  # heads ascend
        return replace(
            self,
            heads=tuple(head - start for head in self.heads[first:last]),
            head_idx=self.head_idx[first:last] - start,
            predictor_idx=self.predictor_idx[first:last],
        )


class Tiles(NamedTuple):
    """Layout and rule on a device, which layers share."""

    layout: TileLayout
    rule: Rule | None
    kept_share: float

    @classmethod
    def on(cls, device: torch.device | str, layout: TileLayout, rule: Rule | None) -> "Tiles":
        """Move them there; counted before, so that nobody waits for a GPU."""
        if rule is None:
            return cls(layout.to(device), None, 1.0)
        return cls(layout.to(device), rule.to(device), rule.kept_share)

    def group(self, heads: tuple[int, ...], predictor: LayerPredictor | None = None) -> HeadGroup:
        """Heads of a whole layer with these tiles."""
        idx = torch.tensor(heads, device=self.layout.slot_row.device)
        return HeadGroup(heads, *self, predictor, head_idx=idx, predictor_idx=idx)


@dataclass(frozen=True)
class LayerPlan:
    """What the attention of one layer does.

    Attributes:
        groups: Head groups; together they hold every head once.
        precision: "accurate" or "faithful".
    """

    groups: tuple[HeadGroup, ...]
    precision: str

    @property
    def num_heads(self) -> int:
        """Heads of the layer."""
        return sum(len(group.heads) for group in self.groups)

    @property
    def keeps_everything(self) -> bool:
        """No head skips a tile."""
        return all(group.rule is None for group in self.groups)

    @property
    def kept_share(self) -> float:
        """Share of tile pairs that are computed, over all heads."""
        kept = sum(len(group.heads) * group.kept_share for group in self.groups)
        return kept / self.num_heads

    def slice_heads(self, start: int, count: int) -> "LayerPlan":
        """The same plan for heads start..start+count-1, renumbered from 0."""
        if (start, count) == (0, self.num_heads):
            return self
        groups = (group.slice_heads(start, count) for group in self.groups)
        return replace(self, groups=tuple(group for group in groups if group is not None))
