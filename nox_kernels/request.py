"""Request: what the user asked, checked and not yet resolved."""

import re
from dataclasses import dataclass

from .errors import RequestError

MODES = ("sage", "sparse", "veda", "dense")
PRECISIONS = ("accurate", "faithful")
ON_UNKNOWN_GEOMETRY = ("error", "sparse", "dense")
NONVIDEO_QUERIES = ("audio_dense", "all_dense", "all_routed")
BUDGET_BASES = ("video", "all_keys")
DENSE_KERNELS = ("sage", "native")
WINDOWS = "windows"  # the shipped table of 3D windows
AUTO = -1  # dense first steps: resolved from the run's sigmas


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{what} {value!r} is unknown; choose one of {', '.join(allowed)}.")


@dataclass(frozen=True)
class AttentionRequest:
    """What Nox H3 Attention asks for.

    Attributes:
        mode: "sage" (dense INT8), "sparse", "veda" (sparse by a trained predictor), or "dense"
            (the host's own attention).
        keep_ratio: Mode sparse: share of the video's KV tiles kept per query tile, in (0, 1].
        layout: Mode sparse: "windows", a shipped table, or the name of a layout table's file.
        precision: "accurate" or "faithful" (SageAttention 2.2's arithmetic).
        veda_keep_ratio: Mode veda: budget in [0, 1]; 0 = the predictor's own.
        on_unknown_geometry: Mode veda, where the predictor has no plan for the token grid:
            "error", "sparse" (as mode sparse), or "dense" (as mode dense).
        nonvideo_queries: Mode sparse: which query tiles without video keep every tile,
            "audio_dense" (those with target audio), "all_dense", or "all_routed" (none).
        budget_base: Mode sparse: what the keep ratio counts, "video" (the video's tiles; those
            always kept come on top), or "all_keys" (all tiles, those always kept among them).
        route_references: Mode sparse: a visual reference of 1024 rows or more competes for a
            budget of its own instead of being kept whole.

    Raises:
        RequestError: A value is unknown or out of range.
    """

    mode: str = "sage"
    keep_ratio: float = 0.15
    layout: str = WINDOWS
    precision: str = "accurate"
    veda_keep_ratio: float = 0.0
    on_unknown_geometry: str = "error"
    nonvideo_queries: str = "audio_dense"
    budget_base: str = "video"
    route_references: bool = False

    def __post_init__(self):
        _one_of("Mode", self.mode, MODES)
        _one_of("Precision", self.precision, PRECISIONS)
        _one_of("on_unknown_geometry", self.on_unknown_geometry, ON_UNKNOWN_GEOMETRY)
        _one_of("nonvideo_queries", self.nonvideo_queries, NONVIDEO_QUERIES)
        _one_of("budget_base", self.budget_base, BUDGET_BASES)
        if not 0.0 < self.keep_ratio <= 1.0:
            raise RequestError(
                f"Budget must keep 1 to 100 % of the tiles, got {100 * self.keep_ratio:g} %."
            )
        if not 0.0 <= self.veda_keep_ratio <= 1.0:
            raise RequestError(
                f"Veda's budget must be 0 (the predictor's own) to 100 %, got "
                f"{100 * self.veda_keep_ratio:g} %."
            )


@dataclass(frozen=True)
class DenseRequest:
    """Where sparse attention must stay dense.

    Attributes:
        first_steps: Dense steps at the start; -1 = while sigma is above the model's 20 % point.
        last_steps: Dense steps at the end.
        blocks: Layers that are always dense.
        start_percent: Sparse from this share of the schedule on, 0..1.
        end_percent: Sparse up to this share of the schedule, 0..1.
        kernel: What computes dense steps and layers: "sage", or "native" (the host's own).

    Raises:
        RequestError: A value is out of range.
    """

    first_steps: int = AUTO
    last_steps: int = 0
    blocks: tuple[int, ...] = (0,)
    start_percent: float = 0.0
    end_percent: float = 1.0
    kernel: str = "sage"

    def __post_init__(self):
        _one_of("Dense kernel", self.kernel, DENSE_KERNELS)
        if self.first_steps < AUTO or self.last_steps < 0:
            raise RequestError(
                f"Dense steps cannot be negative (-1 first steps means auto), got first "
                f"{self.first_steps}, last {self.last_steps}."
            )
        if not 0.0 <= self.start_percent <= self.end_percent <= 1.0:
            raise RequestError(
                f"The sparse window must run from 0 to 1 with its start before its end, got "
                f"{self.start_percent:g} to {self.end_percent:g}."
            )


def parse_blocks(text: str) -> tuple[int, ...]:
    """Read layer numbers like "0, 3-5" into (0, 3, 4, 5); empty text means none.

    Raises:
        RequestError: A part is neither a number nor a rising range.
    """
    blocks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,3})(?:\s*-\s*(\d{1,3}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise RequestError(
                f"Blocks: {part[:40]!r} is not a block number or a range. Write them like 0, 3-5."
            )
        blocks.update(range(first, last + 1))
    return tuple(sorted(blocks))
