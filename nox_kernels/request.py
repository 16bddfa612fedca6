"""Request: what the user asked, checked and not yet resolved."""

import re
from dataclasses import dataclass

from .errors import RequestError

MODES = ("sage", "sparse", "dense")
PRECISIONS = ("accurate", "faithful")
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
        mode: "sage" (dense INT8), "sparse", or "dense" (the host's own attention).
        keep_ratio: Share of the video's KV tiles kept per query tile, in (0, 1].
        layout: "windows", "raster", or the name of a layout table's file.
        precision: "accurate" or "faithful" (SageAttention 2.2's arithmetic).

    Raises:
        RequestError: A value is unknown or out of range.
    """

    mode: str = "sage"
    keep_ratio: float = 0.15
    layout: str = WINDOWS
    precision: str = "accurate"

    def __post_init__(self):
        _one_of("Mode", self.mode, MODES)
        _one_of("Precision", self.precision, PRECISIONS)
        if not 0.0 < self.keep_ratio <= 1.0:
            raise RequestError(
                f"Budget must keep 1 to 100 % of the tiles, got {100 * self.keep_ratio:g} %."
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
