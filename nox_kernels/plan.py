"""Plan: every decision of a run, made before its first step."""

from dataclasses import dataclass, replace

import torch

from .errors import RequestError
from .layer_plan import LayerPlan, Tiles
from .layout import LARGE_REFERENCE, make_layout, packed_layout, raster_layout, veda_layout
from .layout_table import LayoutTable
from .request import AUTO, AttentionRequest, DenseRequest
from .route import sparse_rule
from .schedule import Schedule
from .sequence import Sequence
from .veda.budget import veda_rule
from .veda.bundle_info import BundleInfo, VedaPlan
from .veda.predictor import VedaPredictor

AUTO_VEDA_STEPS = 1  # auto dense first steps under Veda: its predictors serve every step behind
FEW_STEPS = 8  # a schedule this short has no steps to spare for undoing an early error
MANY_REFERENCES = 0.25  # share of the video's rows from which references cost much when all kept


@dataclass(frozen=True)
class Decision:
    """What runs in one attention call: "sparse", "veda", "sage" or "native", and why."""

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
        routed_layers: Plan of each layer where tiles are left out; empty where none is.
        normal: What runs where no rule makes a call dense.
        veda_plan: The predictor's plan in use, under Veda.
        warnings: What the user should know before the run, a sentence each.
        num_layers: Layers of the model.
        num_heads: Heads of each layer.
    """

    sequence: Sequence
    request: AttentionRequest
    dense_request: DenseRequest
    schedule: Schedule
    dense_layer: LayerPlan
    routed_layers: tuple[LayerPlan, ...]
    normal: Decision
    veda_plan: VedaPlan | None
    warnings: tuple[str, ...]
    num_layers: int
    num_heads: int

    @property
    def kept_share(self) -> float:
        """Share of tile pairs that routed layers compute, where they are not dense."""
        dense = self.dense_request.blocks
        shares = [
            layer.kept_share for idx, layer in enumerate(self.routed_layers) if idx not in dense
        ]
        return sum(shares) / len(shares) if shares else 1.0

    def decide(self, layer_idx: int, sigma: float) -> Decision:
        """What layer `layer_idx` runs at `sigma`."""
        normal = self.normal
        if normal.kind == "native":
            return normal
        if self.routed_layers and self.routed_layers[layer_idx].keeps_everything:
            normal = Decision("sage", "every tile kept")
        reason = self.schedule.dense_reason(sigma)
        if reason is None and layer_idx in self.dense_request.blocks:
            reason = "dense block"
        if reason is None or normal.kind == self.dense_request.kernel:
            return normal
        return Decision(self.dense_request.kernel, reason)

    def layer(self, layer_idx: int, kind: str) -> LayerPlan:
        """The plan of a layer for a decision that is not "native"."""
        return self.dense_layer if kind == "sage" else self.routed_layers[layer_idx]


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
    predictor: VedaPredictor | None = None,
) -> Plan:
    """Resolve what the user asked for one packed sequence.

    Args:
        request: What to run.
        dense_request: Where it stays dense.
        sequence: The rows.
        table: Layout of every head in mode sparse.
        schedule: Which steps are dense.
        num_layers: Layers of the model.
        num_heads: Heads of each layer.
        device: Of q, k and v.
        predictor: Needed by mode veda.

    Raises:
        RequestError: A block, the layout table or the predictor does not fit the model, or the
            predictor has no plan for the token grid and the request makes that an error.
    """
    beyond = [idx for idx in dense_request.blocks if idx >= num_layers]
    if beyond:
        raise RequestError(
            f"Dense block {beyond[0]} does not exist: this model has blocks 0 to {num_layers - 1}."
        )
    # `accurate` tiles dense rows as sparse does, so that an all-ones selection is the same
    # computation; `faithful` must tile them as SageAttention does.
    dense_layout = raster_layout if request.precision == "accurate" else packed_layout
    dense_tiles = Tiles.on(device, dense_layout(sequence), None)
    dense_group = dense_tiles.group(tuple(range(num_heads)))
    plan = Plan(
        sequence=sequence,
        request=request,
        dense_request=dense_request,
        schedule=schedule,
        dense_layer=LayerPlan((dense_group,), request.precision),
        routed_layers=(),
        normal=Decision("sage", "mode sage"),
        veda_plan=None,
        warnings=(),
        num_layers=num_layers,
        num_heads=num_heads,
    )
    mode, warnings = request.mode, []
    if mode == "veda":
        info = _check_predictor(predictor, num_layers, num_heads)
        veda_plan = info.plan_for(sequence.token_grid)
        if veda_plan is not None:
            assert predictor is not None
            return _with_veda(plan, predictor, veda_plan, device)
        grid, mode = sequence.token_grid, request.on_unknown_geometry
        if mode == "error":
            info.check_grid(grid)
        warnings.append(
            f"{info.no_plan(grid)}; mode {mode} runs instead, as on_unknown_geometry says."
        )
    if mode == "dense":
        native = Decision("native", "Veda has no plan for this geometry")
        return replace(plan, normal=native, warnings=tuple(warnings))
    if mode == "sparse":
        plan = _with_sparse(plan, table, device)
    return replace(plan, warnings=(*warnings, *plan.warnings))


def _with_sparse(plan: Plan, table: LayoutTable, device: torch.device | str) -> Plan:
    """A plan whose layers keep the best tiles by their means."""
    request, sequence = plan.request, plan.sequence
    table.check_model(plan.num_layers, plan.num_heads)
    made: dict[str, Tiles] = {}  # by layout name, shared by all layers
    layers = []
    for layer_idx in range(plan.num_layers):
        names = table.heads_of_layer(layer_idx, sequence.token_grid)
        groups = []
        for name in sorted(set(names)):
            if name not in made:
                layout = make_layout(sequence, name)
                rule = sparse_rule(
                    layout,
                    request.keep_ratio,
                    nonvideo_queries=request.nonvideo_queries,
                    budget_base=request.budget_base,
                    route_references=request.route_references,
                )
                made[name] = Tiles.on(device, layout, rule)
            heads = tuple(head for head, own in enumerate(names) if own == name)
            groups.append(made[name].group(heads))
        layers.append(LayerPlan(tuple(groups), request.precision))
    return replace(
        plan,
        routed_layers=tuple(layers),
        normal=Decision("sparse", "sparse"),
        warnings=_few_step_warnings(plan.schedule, layers, "kept %") + _reference_warnings(plan),
    )


def _few_step_warnings(schedule: Schedule, layers: list[LayerPlan], widget: str) -> tuple[str, ...]:
    """What to do where a short run skips tiles in every step from its beginning on.

    Args:
        schedule: Of the run.
        layers: Plan of each layer where tiles are routed.
        widget: What the user types to keep more tiles.
    """
    is_short = schedule.num_steps <= FEW_STEPS and schedule.auto_steps > 0
    if not is_short or schedule.has_dense_step or all(layer.keeps_everything for layer in layers):
        return ()
    return (
        f"No step of this {schedule.num_steps}-step run is dense. So few steps leave little room "
        f"to undo what skipping tiles does to the first. If the clip ripples or looks unfinished, "
        f"set first_steps of Nox Dense Steps and Blocks to {schedule.auto_steps} (-1 = auto), or "
        f"type a higher {widget}.",
    )


def _reference_warnings(plan: Plan) -> tuple[str, ...]:
    sequence, is_routed = plan.sequence, plan.request.route_references
    references = [s.num_rows for s in sequence.segments if s.kind == "ref_img"]
    large = [num_rows for num_rows in references if num_rows >= LARGE_REFERENCE]
    num_kept = sum(references) - (sum(large) if is_routed else 0)
    share = num_kept / sequence.num_video
    if share <= MANY_REFERENCES:
        return ()
    can_route = large and not is_routed
    remedy = "turn on route_references" if can_route else "give fewer or smaller ones"
    return (
        f"Visual references are kept whole, {100 * share:.0f} % as many rows as the video. To save "
        f"time, {remedy}.",
    )


def _with_veda(
    plan: Plan, predictor: VedaPredictor, veda_plan: VedaPlan, device: torch.device | str
) -> Plan:
    """A plan whose layers keep the tiles that a predictor scores best."""
    info, sequence = predictor.info, plan.sequence
    target, conditions = info.budgets(plan.request.veda_keep_ratio)
    made: dict[str, Tiles] = {}  # by tile shape, shared by all layers
    layers = []
    for layer_idx in range(plan.num_layers):
        groups = []
        for shape, heads in veda_plan.groups(layer_idx):
            if str(shape) not in made:
                layout = veda_layout(sequence, shape, tile_conditions=info.tile_conditions)
                rule = veda_rule(
                    layout.query_valid_count,
                    num_condition_tiles=layout.num_condition_tiles,
                    num_video_tiles=layout.num_video_query_tiles,
                    target=target,
                    conditions=conditions,
                )
                made[str(shape)] = Tiles.on(device, layout, rule)
            groups.append(made[str(shape)].group(heads, predictor.layer(layer_idx)))
        layers.append(LayerPlan(tuple(groups), plan.request.precision))
    schedule = plan.schedule
    if plan.dense_request.first_steps == AUTO:
        schedule = replace(schedule, first_steps=AUTO_VEDA_STEPS)
    warnings = _few_step_warnings(schedule, layers, "veda kept %")
    if not info.was_trained_for(sequence):
        warnings += (
            "This Veda predictor knows text to video only: keyframes and references are kept "
            "whole, and a clip with them is outside its training.",
        )
    return replace(
        plan,
        schedule=schedule,
        routed_layers=tuple(layers),
        normal=Decision("veda", "veda"),
        veda_plan=veda_plan,
        warnings=warnings,
    )


def _check_predictor(
    predictor: VedaPredictor | None, num_layers: int, num_heads: int
) -> BundleInfo:
    if predictor is None:
        raise RequestError(
            "Mode veda needs a predictor: connect Nox Load Veda Predictor, or choose mode sparse."
        )
    predictor.info.check_model(num_layers, num_heads, predictor.info.head_dim)
    return predictor.info
