"""Report: what a sampling run really did, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..nox_kernels.call_log import Evaluation
    from ..nox_kernels.plan import Plan
    from ..nox_kernels.request import AttentionRequest
    from ..nox_kernels.veda.bundle_info import BundleInfo

ROUTED = ("sparse", "veda")  # kinds of calls that leave out tiles
COMPUTED = (*ROUTED, "sage")  # kinds of calls that Nox computes, and times
TIE = 1.05  # times that differ by less are called equal: medians of a run vary by some per cent


@dataclass(frozen=True)
class VedaUse:
    """A Veda predictor in a run.

    Attributes:
        predictor: Its file.
        plan: Its plan for the clip.
        budget: In force, such as "10 %" or "32 tiles".
        provenance: Where its weights come from; "" if the file does not say.
        is_trained_for_it: The clip has no conditions that the predictor never saw.
    """

    predictor: str
    plan: str
    budget: str
    provenance: str
    is_trained_for_it: bool

    @classmethod
    def of(cls, plan: Plan, info: BundleInfo) -> VedaUse:
        """What a plan uses of a predictor."""
        target, conditions = info.budgets(plan.request.veda_keep_ratio)
        budget = str(target)
        if conditions is not None and plan.sequence.has_conditions:
            budget += f", conditions {conditions}"
        return cls(
            predictor=info.name,
            plan=plan.veda_plan.label,
            budget=budget,
            provenance=info.provenance,
            is_trained_for_it=info.was_trained_for(plan.sequence),
        )


@dataclass(frozen=True)
class Timing:
    """How long attention took in a run.

    Attributes:
        ms_per_call: Milliseconds of one block's attention, by kind of call; the median.
        dense_ms: The same of ComfyUI's own attention at this length; None where not measured.
        seconds: Duration of the sampling run.
    """

    ms_per_call: dict[str, float]
    dense_ms: float | None
    seconds: float

    @property
    def main_kind(self) -> str | None:
        """The kind of Nox's calls that a run is about; None without any."""
        return next((kind for kind in COMPUTED if kind in self.ms_per_call), None)

    @property
    def faster(self) -> tuple[str, float] | None:
        """("sage" or "dense", its ms per call), where that beats the main kind of call."""
        others = {"sage": self.ms_per_call.get("sage"), "dense": self.dense_ms}
        if self.main_kind is None:
            return None
        limit_ms = self.ms_per_call[self.main_kind] / TIE
        faster = {name: ms for name, ms in others.items() if ms is not None and ms < limit_ms}
        return min(faster.items(), key=lambda item: item[1]) if faster else None


@dataclass(frozen=True)
class Report:
    """What really ran.

    Attributes:
        request: What the user asked.
        veda: The predictor in use; None in other modes, and where it had no plan.
        calls: Attention calls by (kind, reason); kind is that of `plan.Decision` ("native": the
            user wanted the host's own attention there) or "declined" (it stepped in).
        kept_share: Share of tile pairs computed in the routed calls; None without any.
        kernel: The implementation that computed, with its note.
        is_reference: It is the slow twin of Nox's kernels.
        evaluations: What ran in each layer of each evaluation of the model.
        num_forwards: How many there were; what a cache answered is none.
        num_steps: Steps of the schedule.
        num_layers: Blocks of the model.
        timing: How long it took.
        warnings: What the user was told during the run, a sentence each.
    """

    request: AttentionRequest
    veda: VedaUse | None
    calls: dict[tuple[str, str], int]
    kept_share: float | None
    kernel: str
    is_reference: bool
    evaluations: tuple[Evaluation, ...]
    num_forwards: int
    num_steps: int
    num_layers: int
    timing: Timing
    warnings: tuple[str, ...]

    @property
    def num_calls(self) -> int:
        """Attention calls of every kind."""
        return sum(self.calls.values())

    def count(self, kind: str) -> int:
        """Attention calls of one kind."""
        return sum(n for (call_kind, _), n in self.calls.items() if call_kind == kind)

    @property
    def kind(self) -> str:
        """The kind of call that the user asked for."""
        mode = self.request.mode
        if mode == "veda" and self.veda is None:
            mode = self.request.on_unknown_geometry
        return "native" if mode == "dense" else mode

    @property
    def dense_steps(self) -> list[int]:
        """Steps, from 1, in which no call was of the kind that the user asked for."""
        asked, others = set(), set()
        for evaluation in self.evaluations:
            kinds = {call[0] for call in evaluation.calls if call is not None}
            if not kinds:  # a cache answered in the model's place
                continue
            (asked if self.kind in kinds else others).add(evaluation.step_idx + 1)
        return sorted(others - asked)

    @property
    def seconds_saved(self) -> float | None:
        """Against ComfyUI's own attention in Nox's calls; below 0 where Nox was slower."""
        timing = self.timing
        if timing.dense_ms is None or not timing.ms_per_call:
            return None
        return sum(
            self.count(kind) * (timing.dense_ms - ms) / 1000
            for kind, ms in timing.ms_per_call.items()
        )

    @property
    def attention_s(self) -> float | None:
        """Seconds of all attention calls; None where some kind of call was not measured."""
        total_ms = 0.0
        for (kind, _), count in self.calls.items():
            own_ms = self.timing.ms_per_call.get(kind)
            ms = own_ms if kind in COMPUTED else self.timing.dense_ms
            if ms is None:
                return None
            total_ms += count * ms
        return total_ms / 1000

    def as_dict(self) -> dict:
        """Plain values, for the `nox` tag of a saved file."""
        timing, saved_s = self.timing, self.seconds_saved
        return {
            "mode": self.request.mode,
            "keep_ratio": self.request.keep_ratio,
            "layout": self.request.layout,
            "precision": self.request.precision,
            "veda": asdict(self.veda) if self.veda else None,
            "calls": [
                {"kind": kind, "reason": reason, "count": n}
                for (kind, reason), n in self.calls.items()
            ],
            "kept_share": self.kept_share,
            "kernel": self.kernel,
            "num_forwards": self.num_forwards,
            "num_steps": self.num_steps,
            "dense_steps": self.dense_steps,
            "ms_per_call": {kind: round(ms, 4) for kind, ms in timing.ms_per_call.items()},
            "host_ms_per_call": None if timing.dense_ms is None else round(timing.dense_ms, 4),
            "seconds_saved": None if saved_s is None else round(saved_s, 3),
            "seconds": round(timing.seconds, 3),
            "warnings": list(self.warnings),
        }
