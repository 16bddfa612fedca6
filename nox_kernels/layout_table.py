"""Layout tables: which layout every head of every layer uses, in memory and as a file."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from . import strict_json
from .errors import FileError, RequestError, one_line, quote
from .layout import KV_TILE, MENU, QUERY_TILE, RASTER, swap_axes
from .sequence import TokenGrid

FORMAT = "nox-layout-table-v1"
MODEL = "minimax-h3"
ORDER = "complete-first:t,h,w"
TILE = {"query": QUERY_TILE, "key": KV_TILE}

Choices = tuple[tuple[int, ...], ...]  # [layers][heads] of candidate indices


@dataclass(frozen=True)
class LayoutTable:
    """A layout per head, for landscape (W >= H) and portrait grids.

    Attributes:
        name: What the user calls it.
        candidates: Layout names that the choices index.
        landscape: [layers][heads] indices into `candidates`, or None.
        portrait: The same for H > W, or None. One of the two may be missing: the other serves
            with h and w swapped.
        budget: Keep ratio at which the choices were ranked.
        calibration: Where the table comes from; free, shown to the user. Empty = uncalibrated.
    """

    name: str
    candidates: tuple[str, ...]
    landscape: Choices | None
    portrait: Choices | None
    budget: float = 0.15
    calibration: dict = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers that the table covers."""
        return len(self._any)

    @property
    def num_heads(self) -> int:
        """Heads of each layer."""
        return len(self._any[0])

    @property
    def _any(self) -> Choices:
        choices = self.landscape if self.landscape is not None else self.portrait
        assert choices is not None
        return choices

    def check_model(self, num_layers: int, num_heads: int) -> None:
        """Refuse a model of another size.

        Raises:
            RequestError: The table covers other layer or head counts.
        """
        if (self.num_layers, self.num_heads) != (num_layers, num_heads):
            raise RequestError(
                f"Layout table {self.name!r} is for {self.num_layers} layers of {self.num_heads} "
                f"heads, but this model has {num_layers} layers of {num_heads}. Choose layout "
                f"windows, or a table made with this model."
            )

    def heads_of_layer(self, layer_idx: int, grid: TokenGrid) -> tuple[str, ...]:
        """Layout name of each head of a layer, for the orientation of the token grid."""
        is_landscape = grid.w >= grid.h
        choices = self.landscape if is_landscape else self.portrait
        names = self.candidates
        if choices is None:
            choices = self._any
            names = tuple(swap_axes(name) for name in names)
        return tuple(names[idx] for idx in choices[layer_idx])


# Shipped tables, uncalibrated: (first layer, landscape layout, portrait layout) of each band of
# layers, and how many layers the model must have (None = any).
PRESETS = {
    RASTER: (None, ((0, RASTER, RASTER),)),
    "uniform": (None, ((0, "4x8x4", "4x4x8"),)),
    "bands-v0": (50, ((0, "8x8x2", "8x2x8"), (6, "2x8x8", "2x8x8"), (20, "8x4x4", "8x4x4"))),
}


def preset_table(name: str, num_layers: int, num_heads: int) -> LayoutTable:
    """A shipped table, for a model of this size.

    Raises:
        RequestError: The table is for another number of layers.
    """
    needed, bands = PRESETS[name]
    if needed not in (None, num_layers):
        raise RequestError(
            f"Layout {name} is for a model of {needed} layers, but this model has {num_layers}. "
            f"Choose layout windows."
        )
    candidates = tuple(dict.fromkeys(layout for _, *layouts in bands for layout in layouts))
    band_of_layer = [max(b for b in bands if b[0] <= layer) for layer in range(num_layers)]
    landscape, portrait = (
        tuple((candidates.index(band[side]),) * num_heads for band in band_of_layer)
        for side in (1, 2)
    )
    return LayoutTable(name, candidates, landscape, portrait)


def _expect(document: dict, key: str, wanted, path: Path) -> None:
    if document.get(key) != wanted:
        raise FileError(
            f"{path.name}: {key} is {quote(document.get(key))}, this version of Nox reads {wanted!r}. "
            f"Make the table again with Nox Calibrate Layouts."
        )


def _choices(document: dict, orientation: str, num_candidates: int, path: Path) -> Choices | None:
    rows = document["tables"].get(orientation)
    if rows is None:
        return None
    num_layers, num_heads = document["num_layers"], document["num_heads"]
    if not isinstance(rows, list) or len(rows) != num_layers:
        raise FileError(f"{path.name}: table {orientation} does not hold {num_layers} layers.")
    for layer_idx, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != num_heads:
            raise FileError(
                f"{path.name}: table {orientation}, layer {layer_idx} does not hold {num_heads} heads."
            )
        for idx in row:
            if type(idx) is not int or not 0 <= idx < num_candidates:
                raise FileError(
                    f"{path.name}: table {orientation}, layer {layer_idx} names candidate {quote(idx)}; "
                    f"there are {num_candidates}."
                )
    return tuple(map(tuple, rows))


def read_table(path: str | Path) -> LayoutTable:
    """Read a `nox-layout-table-v1` file.

    Raises:
        FileError: Not such a file, or any field holds something that this version does not know.
    """
    path = Path(path)
    try:
        document = strict_json.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = one_line(str(error), 120)
        raise FileError(f"{path.name} cannot be read as a layout table: {reason}.") from error
    if not isinstance(document, dict):
        raise FileError(f"{path.name} is not a layout table.")
    _expect(document, "format", FORMAT, path)
    _expect(document, "model", MODEL, path)
    _expect(document, "order", ORDER, path)
    _expect(document, "tile", TILE, path)
    for key in ("num_layers", "num_heads"):
        if type(document.get(key)) is not int or document[key] < 1:
            raise FileError(f"{path.name}: {key} is {quote(document.get(key))}, a count is needed.")
    names = document.get("candidates")
    if not isinstance(names, list) or not names:
        raise FileError(
            f"{path.name}: candidates is {quote(names)}, a list of layout names is needed."
        )
    for name in names:
        if name not in MENU:
            raise FileError(
                f"{path.name}: candidate {quote(name)} is unknown. Known: {', '.join(MENU)}."
            )
    tables = document.get("tables")
    if not isinstance(tables, dict):
        raise FileError(f"{path.name}: tables is missing.")
    unknown = set(tables) - {"landscape", "portrait"}
    if unknown:
        raise FileError(
            f"{path.name}: table {quote(min(unknown))} is unknown; known are landscape and portrait."
        )
    landscape, portrait = (
        _choices(document, orientation, len(names), path)
        for orientation in ("landscape", "portrait")
    )
    if landscape is None and portrait is None:
        raise FileError(f"{path.name}: neither a landscape nor a portrait table is in it.")
    budget = document.get("budget")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise FileError(f"{path.name}: budget is {quote(budget)}, it must be in (0, 1].")
    calibration = document.get("calibration", {})
    if not isinstance(calibration, dict):
        raise FileError(f"{path.name}: calibration is {quote(calibration)}, an object is needed.")
    return LayoutTable(path.stem, tuple(names), landscape, portrait, float(budget), calibration)


def write_table(path: str | Path, table: LayoutTable) -> None:
    """Write a table as a `nox-layout-table-v1` file."""
    document = {
        "format": FORMAT,
        "model": MODEL,
        "num_layers": table.num_layers,
        "num_heads": table.num_heads,
        "tile": TILE,
        "order": ORDER,
        "candidates": table.candidates,
        "tables": {"landscape": table.landscape, "portrait": table.portrait},
        "budget": table.budget,
        "calibration": table.calibration,
    }
    Path(path).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
