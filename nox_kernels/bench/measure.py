"""Measure: all contenders on one problem, in turns."""

from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ..errors import NoxError, one_line
from ..trial import kept_keys
from .contenders import Contender, Problem, Ready
from .quality import compare, float64_rows, output_rows, sampled_rows
from .timing import Samples, Timer, median, num_runs


@dataclass
class Entry:
    """A contender in one round of measuring, and what became of it."""

    contender: Contender
    ready: Ready | None = None
    runs: int = 0
    samples: Samples = field(default_factory=Samples)
    quality: dict[str, float | None] | None = None
    reason: str | None = None

    def fail(self, error: Exception) -> None:
        """Keep the reason, and let go of what it held."""
        self.ready, self.reason = None, reason_of(error)

    def as_dict(self) -> dict:
        """For JSON."""
        layer = self.ready.layer if self.ready else None
        return {
            "name": self.contender.name,
            "is_part": self.contender.is_part,
            "products": self.contender.products,
            "note": self.ready.note if self.ready else "",
            "kept_share": layer.kept_share if layer else 1.0,
            "median_ms": None if self.reason else median(self.samples.device_ms),
            "host_ms": None if self.reason else median(self.samples.host_ms),
            "samples": asdict(self.samples),
            "quality": None if self.reason else self.quality,
            "reason": self.reason,
        }


def reason_of(error: Exception) -> str:
    """Why something could not be measured, on one line."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of GPU memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    text = one_line(" ".join(str(error).split()), 200)
    return text if isinstance(error, NoxError) else f"{type(error).__name__}: {text}"


def measure(
    problem: Problem, timer: Timer, contenders: Items[Contender], repeats: int
) -> list[dict]:
    """Measure every contender; one that cannot run has its reason instead.

    Each warms up and is compared with float64 attention first. Then they take turns, so that a
    change of the GPU's clocks meets them all.
    """
    rows = sampled_rows(problem.sequence.num_rows).to(problem.device)
    truth = float64_rows(problem.inputs, rows)
    entries = [Entry(contender) for contender in contenders]
    for entry in entries:
        try:
            _start(entry, problem, timer, repeats, rows, truth)
        except Exception as error:  # noqa: BLE001 - a peer may raise anything; the report shows it
            entry.fail(error)
        if entry.reason == "out of GPU memory":
            torch.cuda.empty_cache()
    for turn in range(repeats):
        for entry in entries:
            if entry.ready is None or turn >= entry.runs:
                continue
            try:
                timer.sample(entry.ready.call, entry.samples)
            except Exception as error:  # noqa: BLE001 - as above
                entry.fail(error)
    return [entry.as_dict() for entry in entries]


def _start(
    entry: Entry, problem: Problem, timer: Timer, repeats: int, rows: Tensor, truth: Tensor
) -> None:
    entry.ready = ready = entry.contender.make(problem)
    seconds, out = timer.warm_up(ready.call, entry.samples)
    entry.runs = num_runs(seconds, repeats)
    if entry.contender.is_part:
        return
    assert isinstance(out, Tensor)
    sampled = output_rows(out, rows, problem.num_heads)
    del out
    if ready.layer is None or ready.layer.keeps_everything:
        entry.quality = compare(sampled, truth)
        return
    own_truth = float64_rows(problem.inputs, rows, kept_keys(ready.layer, *problem.inputs, rows))
    dense_error = compare(sampled, truth)["error"]
    entry.quality = {**compare(sampled, own_truth), "dense_error": dense_error}
