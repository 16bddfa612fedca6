"""Plan: every decision of a run, made before its first step."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .errors import RequestError
from .layout import TileLayout, make_layout, packed_layout, raster_layout
from .layout_table import LayoutTable
from .request import AUTO, AttentionRequest, DenseRequest
from .route import candidate_tiles, forced_tiles
from .route import num_kept as budget
from .sequence import Sequence

SIGMA_TOLERANCE = 1e-4  # shift 12 packs sigmas as close as 0.012
AUTO_PERCENT = 0.2  # auto dense first steps cover this share of the schedule


@dataclass(frozen=True)
class Schedule:
    """Which steps of a run are dense, told by sigma and never by counting calls.

    Attributes:
        sigmas: The sampler's sigmas, descending; one more than there are steps.
        first_steps: Dense steps at the start, resolved.
        last_steps: Dense steps at the end.
        sigma_start: Sparse from this sigma down.
        sigma_end: Sparse down to this sigma.
    """

    sigmas: tuple[float, ...]
    first_steps: int
    last_steps: int
    sigma_start: float
    sigma_end: float

    @classmethod
    def resolve(
        cls,
        sigmas: tuple[float, ...],
        dense: DenseRequest,
        percent_to_sigma: Callable[[float], float],
    ) -> "Schedule":
        """Turn a request's counts and percents into sigmas of this run."""
        first_steps = dense.first_steps
        if first_steps == AUTO:
            limit = percent_to_sigma(AUTO_PERCENT) + SIGMA_TOLERANCE
            first_steps = sum(sigma > limit for sigma in sigmas[:-1])
        return cls(
            sigmas=tuple(sigmas),
            first_steps=first_steps,
            last_steps=dense.last_steps,
            sigma_start=percent_to_sigma(dense.start_percent),
            sigma_end=percent_to_sigma(dense.end_percent),
        )

    @property
    def num_steps(self) -> int:
        """Denoising steps."""
        return max(1, len(self.sigmas) - 1)

    def step_of(self, sigma: float) -> int:
        """The step that an evaluation at `sigma` belongs to, 0-based.

        A sampler that evaluates twice in a step does so between its two sigmas.
        """
        step_idx = sum(s >= sigma - SIGMA_TOLERANCE for s in self.sigmas) - 1
        return min(max(step_idx, 0), self.num_steps - 1)

    def dense_reason(self, sigma: float) -> str | None:
        """Why an evaluation at `sigma` must be dense; None where sparse may run."""
        step_idx = self.step_of(sigma)
        if step_idx < self.first_steps:
            return "first steps"
        if step_idx >= self.num_steps - self.last_steps:
            return "last steps"
        if not self.sigma_end - SIGMA_TOLERANCE <= sigma <= self.sigma_start + SIGMA_TOLERANCE:
            return "outside the window"
        return None


@dataclass(frozen=True)
class HeadGroup:
    """Heads of a layer that share tile layout and budget.

    Attributes:
        heads: Head numbers, ascending.
        layout: How their rows sit in tiles.
        num_kept: Candidate KV tiles kept per query tile; None keeps every tile.
        kept_share: Share of (query tile, KV tile) pairs that are computed.
    """

    heads: tuple[int, ...]
    layout: TileLayout
    num_kept: int | None
    kept_share: float


def make_group(layout: TileLayout, keep_ratio: float, device: torch.device | str) -> HeadGroup:
    """A group, still without heads, that keeps a share of a layout's video tiles."""
    forced = forced_tiles(layout).sum(1)  # [Nq]
    candidates = candidate_tiles(layout).sum(1)  # [Nq]
    num_kept = budget(keep_ratio, layout.num_video_kv_tiles)
    if keep_ratio >= 1.0 or num_kept >= candidates.max():
        return HeadGroup((), layout.to(device), None, 1.0)
    computed = int((forced + candidates.clamp(max=num_kept)).sum())
    kept_share = computed / (layout.num_query_tiles * layout.num_real_kv_tiles)
    return HeadGroup((), layout.to(device), num_kept, kept_share)


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
        return all(group.num_kept is None for group in self.groups)

    @property
    def kept_share(self) -> float:
        """Share of tile pairs that are computed, over all heads."""
        kept = sum(len(group.heads) * group.kept_share for group in self.groups)
        return kept / self.num_heads

    def slice_heads(self, start: int, count: int) -> "LayerPlan":
        """The same plan for heads start..start+count-1, renumbered from 0."""
        if (start, count) == (0, self.num_heads):
            return self
        groups = []
        for group in self.groups:
            heads = tuple(head - start for head in group.heads if start <= head < start + count)
            if heads:
                groups.append(replace(group, heads=heads))
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class Decision:
    """What runs in one attention call: "sparse", "sage" or "native", and the rule behind it."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every decision of a run for one packed sequence.

    Attributes:
        sequence: The rows it was made for.
        request: What the user asked.
        dense_request: Where sparse stays dense, and on which kernel.
        schedule: Which steps are dense.
        dense_layer: Plan of a dense layer.
        sparse_layers: Plan of each layer where it is sparse; empty in mode "sage".
        num_layers: Layers of the model.
        num_heads: Heads of each layer.
    """

    sequence: Sequence
    request: AttentionRequest
    dense_request: DenseRequest
    schedule: Schedule
    dense_layer: LayerPlan
    sparse_layers: tuple[LayerPlan, ...]
    num_layers: int
    num_heads: int

    def decide(self, layer_idx: int, sigma: float) -> Decision:
        """What layer `layer_idx` runs at `sigma`."""
        if self.request.mode == "sage":
            normal = Decision("sage", "mode sage")
        elif self.sparse_layers[layer_idx].keeps_everything:
            normal = Decision("sage", "every tile kept")
        else:
            normal = Decision("sparse", "sparse")
        reason = self.schedule.dense_reason(sigma)
        if reason is None and layer_idx in self.dense_request.blocks:
            reason = "dense block"
        if reason is None or normal.kind == self.dense_request.kernel:
            return normal
        return Decision(self.dense_request.kernel, reason)

    def layer(self, layer_idx: int, kind: str) -> LayerPlan:
        """The plan of a layer for a decision of kind "sparse" or "sage"."""
        return self.sparse_layers[layer_idx] if kind == "sparse" else self.dense_layer


def make_plan(
    request: AttentionRequest,
    dense_request: DenseRequest,
    sequence: Sequence,
    table: LayoutTable,
    schedule: Schedule,
    *,
    num_layers: int,
    num_heads: int,
    device: torch.device | str,
) -> Plan:
    """Resolve what the user asked for one packed sequence.

    Raises:
        RequestError: A block or the layout table does not fit the model.
    """
    beyond = [idx for idx in dense_request.blocks if idx >= num_layers]
    if beyond:
        raise RequestError(
            f"Dense block {beyond[0]} does not exist: this model has blocks 0 to {num_layers - 1}."
        )
    all_heads = tuple(range(num_heads))
    # `accurate` tiles dense rows as sparse does, so that an all-ones selection is the same
    # computation; `faithful` must tile them as SageAttention does.
    dense_layout = raster_layout if request.precision == "accurate" else packed_layout
    dense_group = replace(make_group(dense_layout(sequence), 1.0, device), heads=all_heads)

    sparse_layers: list[LayerPlan] = []
    if request.mode == "sparse":
        table.check_model(num_layers, num_heads)
        groups: dict[str, HeadGroup] = {}  # by layout name, shared by all layers
        for layer_idx in range(num_layers):
            names = table.heads_of_layer(layer_idx, sequence.token_grid)
            for name in set(names) - set(groups):
                groups[name] = make_group(make_layout(sequence, name), request.keep_ratio, device)
            layer_groups = (
                replace(
                    groups[name], heads=tuple(head for head in all_heads if names[head] == name)
                )
                for name in sorted(set(names))
            )
            sparse_layers.append(LayerPlan(tuple(layer_groups), request.precision))
    return Plan(
        sequence=sequence,
        request=request,
        dense_request=dense_request,
        schedule=schedule,
        dense_layer=LayerPlan((dense_group,), request.precision),
        sparse_layers=tuple(sparse_layers),
        num_layers=num_layers,
        num_heads=num_heads,
    )
