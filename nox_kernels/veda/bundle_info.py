"""Bundle info: what a Veda predictor's file says of itself, read strictly from its metadata."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from .. import strict_json
from ..errors import RequestError, one_line, quote
from ..layout import QUERY_TILE, TileShape
from ..sequence import TOKEN_PIXELS, Sequence, TokenGrid, num_frames_of
from .budget import Budget

FORMAT = "miowtion-veda-predictor-v1"
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
MAX_COUNT = 4096  # layers, heads or grid steps; no H3 is near it
# Free text on where weights come from, shown and not interpreted.
PROVENANCE = (
    "source",
    "source_weights",
    "step",
    "training_step",
    "schedule",
    "num_steps",
    "variant",
    "teacher_adapter",
)


class FaultError(Exception):
    """What is wrong with a file, still without its name."""


@dataclass(frozen=True)
class VedaPlan:
    """Tile shapes of every head for one token grid; the file calls it a plan.

    Attributes:
        name: In the file.
        geometry: Free, from the file, such as "16x9_t37".
        grid: The token grid that it is for.
        shapes: Tile shapes that the heads choose from.
        head_shape: [layers][heads] index into `shapes`.
        provenance: Free, from the file.
    """

    name: str
    geometry: str
    grid: TokenGrid
    shapes: tuple[TileShape, ...]
    head_shape: tuple[tuple[int, ...], ...]
    provenance: object = None

    @property
    def label(self) -> str:
        """Its name, fit for a log."""
        return one_line(self.name)

    def groups(self, layer_idx: int) -> tuple[tuple[TileShape, tuple[int, ...]], ...]:
        """Heads of a layer by tile shape: groups by shape index, heads ascending."""
        choice = self.head_shape[layer_idx]
        return tuple(
            (self.shapes[idx], tuple(head for head, own in enumerate(choice) if own == idx))
            for idx in sorted(set(choice))
        )

    def as_dict(self) -> dict:
        """As the file holds it."""
        return {
            "geometry": self.geometry,
            "grid": list(self.grid),
            "shapes": [str(shape) for shape in self.shapes],
            "head_shape": [list(heads) for heads in self.head_shape],
            "provenance": self.provenance,
        }


@dataclass(frozen=True)
class BundleInfo:
    """Everything in a bundle but its tensors.

    Attributes:
        name: Of the file.
        num_layers: Layers of the model.
        num_heads: Heads of each layer.
        head_dim: D.
        dtype: Of the tensors: "float32", "bfloat16" or "float8_e4m3fn".
        target_budget: For the target video's tiles.
        condition_budget: For tiled conditions; None where they are not tiled.
        tile_conditions: Visual conditions are tiled and routed too.
        second_order_rank: Rank of the second-order term; 0 = none.
        count_term: Scores have a term in the count of a tile's tokens.
        plans: A plan per token grid that the predictor knows.
        metadata: All of the file's metadata, in its order.
    """

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    target_budget: Budget
    condition_budget: Budget | None
    tile_conditions: bool
    second_order_rank: int
    count_term: bool
    plans: tuple[VedaPlan, ...]
    metadata: dict[str, str]

    def plan_for(self, grid: TokenGrid) -> VedaPlan | None:
        """The plan for exactly this token grid; None if there is none."""
        return next((plan for plan in self.plans if plan.grid == grid), None)

    def no_plan(self, grid: TokenGrid) -> str:
        """The start of a sentence on a token grid without a plan."""
        return f"Veda has no plan for {_canvas(grid)}, {num_frames_of(grid.t)} frames"

    def unknown_geometry(self, grid: TokenGrid) -> str:
        """The sentence for a token grid without a plan, with numbers to type."""

        def unlike(other: TokenGrid) -> tuple[float, int, int]:
            ratio = math.log(grid.w * other.h / (grid.h * other.w))
            size = abs(other.h * other.w - grid.h * grid.w)
            return round(abs(ratio), 2), abs(other.t - grid.t), size

        grids = [plan.grid for plan in self.plans]
        frames: dict[str, list[int]] = {}
        for known in sorted(grids, key=lambda known: (-known.w / known.h, known.t)):
            frames.setdefault(_canvas(known), []).append(num_frames_of(known.t))
        menu = "; ".join(
            f"{canvas} with {', '.join(map(str, counts))}" for canvas, counts in frames.items()
        )
        nearest = min(grids, key=unlike)
        return (
            f"{self.no_plan(grid)}. Nearest: {_canvas(nearest)}, {num_frames_of(nearest.t)} "
            f"frames. Or use mode sparse. "
            f"{self.name} knows (width x height with frames): {menu}."
        )

    def check_grid(self, grid: TokenGrid) -> None:
        """Refuse a token grid without a plan.

        Raises:
            RequestError: There is none; says which there are.
        """
        if self.plan_for(grid) is None:
            raise RequestError(self.unknown_geometry(grid))

    def check_model(self, num_layers: int, num_heads: int, head_dim: int) -> None:
        """Refuse a model of another size.

        Raises:
            RequestError: The bundle is for other counts.
        """
        if (self.num_layers, self.num_heads, self.head_dim) != (num_layers, num_heads, head_dim):
            raise RequestError(
                f"Veda predictor {self.name} is for {self.num_layers} layers of {self.num_heads} "
                f"heads of {self.head_dim}, but this model has {num_layers} layers of {num_heads} "
                f"heads of {head_dim}. Choose another predictor, or use mode sparse."
            )

    def budgets(self, keep_ratio: float) -> tuple[Budget, Budget | None]:
        """Budgets of target and tiled conditions in force: a keep ratio above 0 replaces both."""
        if keep_ratio == 0.0:
            return self.target_budget, self.condition_budget
        asked = Budget("ratio", keep_ratio)
        return asked, asked if self.tile_conditions else None

    def was_trained_for(self, sequence: Sequence) -> bool:
        """Whether the predictor has seen clips with such conditions in its training."""
        return self.tile_conditions or not sequence.has_conditions

    @property
    def provenance(self) -> str:
        """Where the weights come from, such as "step 600, source_weights ema"; "" if unknown."""
        known = [(key, self.metadata.get(key)) for key in PROVENANCE]
        return ", ".join(f"{key} {one_line(value)}" for key, value in known if value)


def _canvas(grid: TokenGrid) -> str:
    return f"{grid.w * TOKEN_PIXELS}x{grid.h * TOKEN_PIXELS}"


# ---- metadata ------------------------------------------------------------------------------------


def read_info(name: str, metadata: dict[str, str]) -> BundleInfo:
    """Read a bundle's metadata.

    Args:
        name: Of the file.
        metadata: All of it.

    Raises:
        FaultError: Something is missing or malformed.
    """
    found = metadata.get("format", "not given")
    if found != FORMAT:
        raise FaultError(
            f"format is {quote(found)}, a Veda predictor has {FORMAT!r}; choose another file"
        )
    num_layers = _count(metadata, "num_layers")
    num_heads = _count(metadata, "num_heads")
    dtype = metadata.get("dtype", "float32")
    if dtype not in DTYPES:
        raise FaultError(f"dtype is {quote(dtype)}, known are {', '.join(DTYPES)}")
    tile_conditions = _one_of(metadata, "tile_conditions", {"true": True, "false": False})
    condition_budget = _budget(metadata, "ref_budget")
    if tile_conditions and condition_budget is None:
        raise FaultError("tile_conditions is true, but ref_budget_kind is missing")
    target_budget = _budget(metadata, "target_budget")
    if target_budget is None and "keep_ratio" in metadata:
        target_budget = Budget("ratio", _positive(metadata, "keep_ratio"))
    if target_budget is None:
        raise FaultError("no budget: neither target_budget_kind nor keep_ratio is there")
    return BundleInfo(
        name=name,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=_count(metadata, "head_dim"),
        dtype=dtype,
        target_budget=target_budget,
        condition_budget=condition_budget if tile_conditions else None,
        tile_conditions=tile_conditions,
        second_order_rank=_count(metadata, "second_order_rank", default="0", low=0, high=128),
        count_term=_one_of(metadata, "count_term", {"1": True, "0": False}),
        plans=_plans(metadata, num_layers, num_heads),
        metadata=dict(metadata),
    )


def _count(
    metadata: dict[str, str],
    key: str,
    default: str | None = None,
    low: int = 1,
    high: int = MAX_COUNT,
) -> int:
    text = metadata.get(key, default)
    if text is None:
        raise FaultError(f"{key} is missing")
    is_count = text.isascii() and text.isdecimal() and len(text) <= 9
    if not is_count or not low <= int(text) <= high:
        raise FaultError(f"{key} is {quote(text)}, a whole number from {low} to {high} is needed")
    return int(text)


def _one_of(metadata: dict[str, str], key: str, values: dict[str, bool]) -> bool:
    """A switch whose absence means no."""
    text = metadata.get(key)
    if text is None:
        return False
    if text not in values:
        raise FaultError(f"{key} is {quote(text)}, it must be {' or '.join(values)}")
    return values[text]


def _positive(metadata: dict[str, str], key: str) -> float:
    text = metadata[key]
    is_decimal = len(text) <= 100 and re.fullmatch(r"\+?[0-9.]+(e[-+]?[0-9]+)?", text, re.I | re.A)
    try:
        value = float(text) if is_decimal else math.nan
    except ValueError:  # such as 1.2.3
        value = math.nan
    if not 0.0 < value < math.inf:
        raise FaultError(f"{key} is {quote(text)}, a decimal number above 0 is needed")
    return value


def _budget(metadata: dict[str, str], key: str) -> Budget | None:
    kind = metadata.get(f"{key}_kind")
    if kind is None:
        return None
    if kind not in ("ratio", "tiles"):
        raise FaultError(f"{key}_kind is {quote(kind)}, it must be ratio or tiles")
    if f"{key}_value" not in metadata:
        raise FaultError(f"{key}_kind is {kind!r}, but {key}_value is missing")
    return Budget(kind, _positive(metadata, f"{key}_value"))


def _plans(metadata: dict[str, str], num_layers: int, num_heads: int) -> tuple[VedaPlan, ...]:
    if "plans" not in metadata:
        raise FaultError("plans are missing")
    try:
        document = strict_json.parse(metadata["plans"])
    except ValueError as error:
        raise FaultError(f"plans are not valid JSON ({one_line(str(error), 80)})") from error
    if not isinstance(document, dict) or not document:
        raise FaultError("plans must be an object with at least one plan")
    plans = tuple(_plan(name, plan, num_layers, num_heads) for name, plan in document.items())
    seen: dict[TokenGrid, str] = {}
    for plan in plans:
        if plan.grid in seen:
            raise FaultError(
                f"plans {quote(seen[plan.grid])} and {quote(plan.name)} are for one grid, {plan.grid}"
            )
        seen[plan.grid] = plan.name
    return plans


def _plan(name: str, plan: object, num_layers: int, num_heads: int) -> VedaPlan:
    where = f"plan {quote(name)}"
    if not isinstance(plan, dict):
        raise FaultError(f"{where} is not an object")
    grid = _list(plan, "grid", where, lambda n: type(n) is int and 0 < n <= MAX_COUNT)
    if len(grid) != 3:
        raise FaultError(f"{where}: grid has {len(grid)} numbers, 3 are needed (t, h, w)")
    names = _list(plan, "shapes", where, lambda shape: isinstance(shape, str))
    shapes = []
    for text in names:
        try:
            shape = TileShape.parse(text)
        except RequestError as error:
            raise FaultError(f"{where}: shape {quote(text)} is not of the form 4x8x4") from error
        if math.prod(shape) != QUERY_TILE:
            raise FaultError(f"{where}: shape {text} does not hold {QUERY_TILE} tokens")
        shapes.append(shape)
    layers = _list(plan, "head_shape", where, lambda layer: isinstance(layer, list))
    if len(layers) != num_layers:
        raise FaultError(f"{where}: head_shape has {len(layers)} layers, {num_layers} are needed")
    for layer_idx, heads in enumerate(layers):
        if len(heads) != num_heads:
            raise FaultError(
                f"{where}: layer {layer_idx} has shapes for {len(heads)} heads, {num_heads} are "
                f"needed"
            )
        if not all(type(idx) is int and 0 <= idx < len(shapes) for idx in heads):
            raise FaultError(f"{where}: layer {layer_idx} names a shape that is not in shapes")
        if len({shapes[idx] for idx in heads}) > 2:
            raise FaultError(f"{where}: layer {layer_idx} uses more than two shapes")
    return VedaPlan(
        name=name,
        geometry=str(plan.get("geometry", name)),
        grid=TokenGrid(*grid),
        shapes=tuple(shapes),
        head_shape=tuple(map(tuple, layers)),
        provenance=plan.get("provenance"),
    )


def _list(plan: dict, key: str, where: str, is_valid: Callable[[object], bool]) -> list:
    values = plan.get(key)
    if not isinstance(values, list) or not values or not all(map(is_valid, values)):
        raise FaultError(f"{where}: {key} is missing or malformed")
    return values


def write_metadata(info: BundleInfo) -> dict[str, str]:
    """The metadata of a bundle that was made or changed; others in `info.metadata` are kept."""
    others = {
        key: value
        for key, value in info.metadata.items()
        if key not in ("keep_ratio", "ref_budget_kind", "ref_budget_value")
    }
    metadata = {
        "format": FORMAT,
        "num_layers": str(info.num_layers),
        "num_heads": str(info.num_heads),
        "head_dim": str(info.head_dim),
        "dtype": info.dtype,
        "target_budget_kind": info.target_budget.kind,
        "target_budget_value": repr(float(info.target_budget.value)),
    }
    if info.condition_budget is not None:
        metadata["ref_budget_kind"] = info.condition_budget.kind
        metadata["ref_budget_value"] = repr(float(info.condition_budget.value))
    metadata["tile_conditions"] = "true" if info.tile_conditions else "false"
    metadata["second_order_rank"] = str(info.second_order_rank)
    metadata["count_term"] = "1" if info.count_term else "0"
    metadata["plans"] = json.dumps({plan.name: plan.as_dict() for plan in info.plans})
    return others | metadata
