"""Session: what a Nox H3 Attention node asks, and the reports of the runs with it."""

from dataclasses import asdict, dataclass

from comfy.model_patcher import ModelPatcher

from ..nox_kernels.layout_table import LayoutTable
from ..nox_kernels.plan import Plan
from ..nox_kernels.request import AttentionRequest
from ..nox_kernels.veda.bundle_info import BundleInfo
from .h3_sequence import ModelShape
from .prompt import executing, fingerprints, is_link, running_prompt, written

MAX_REPORTS = 4096  # a report is a few numbers
NO_RUN = (
    "Nox H3 Attention is upstream of this video, but no sampling run with it is known: either the "
    "sampler took no step, or its MODEL is not wired to the guider or sampler."
)

# How a report words the reasons of a plan's decisions, after a number of calls.
REASONS = {
    "first steps": "in the first steps",
    "last steps": "in the last steps",
    "dense block": "in dense blocks",
    "every tile kept": "with every tile kept",
}


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
    def of(cls, plan: Plan, info: BundleInfo) -> "VedaUse":
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
class Report:
    """What really ran.

    Attributes:
        request: What the user asked.
        veda: The predictor in use; None in other modes, and where it had no plan.
        calls: Attention calls by (kind, reason); kind is that of `plan.Decision` ("native": the
            user wanted the host's own attention there) or "declined" (it stepped in).
        kept_share: Share of tile pairs computed in the routed calls; None without any.
        kernel: The implementation that computed, with its note.
        num_forwards: Model evaluations.
        seconds: Duration of the sampling run.
    """

    request: AttentionRequest
    veda: VedaUse | None
    calls: dict[tuple[str, str], int]
    kept_share: float | None
    kernel: str
    num_forwards: int
    seconds: float

    def count(self, kind: str) -> int:
        """Attention calls of one kind."""
        return sum(n for (call_kind, _), n in self.calls.items() if call_kind == kind)

    def _reasons(self, kind: str) -> str:
        """Such as "8 in the first steps, 6 in dense blocks"."""
        counts = [(n, reason) for (call_kind, reason), n in self.calls.items() if call_kind == kind]
        return ", ".join(f"{n} {REASONS.get(reason, reason)}" for n, reason in counts)

    @property
    def _kind(self) -> str:
        """The kind of call that the user asked for."""
        mode = self.request.mode
        if mode == "veda" and self.veda is None:
            mode = self.request.on_unknown_geometry
        return "native" if mode == "dense" else mode

    @property
    def _setting(self) -> str:
        request = self.request
        sparse = f"sparse {100 * request.keep_ratio:.0f} %, {request.layout}"
        if request.mode != "veda":
            return sparse if request.mode == "sparse" else request.mode
        if self.veda is not None:
            note = "" if self.veda.is_trained_for_it else " (conditions: not trained for)"
            return f"veda {self.veda.budget}, {self.veda.predictor}, plan {self.veda.plan}{note}"
        return f"veda without a plan, so {sparse if self._kind == 'sparse' else 'dense'}"

    @property
    def line(self) -> str:
        """One line for the log and the saver."""
        total, kind = sum(self.calls.values()), self._kind
        word = {"sage": "INT8", "native": "native"}.get(kind, kind)
        share = f" ({100 * self.kept_share:.1f} % of tiles)" if self.kept_share else ""
        parts = [f"{self.count(kind)} of {total} attention calls {word}{share}"]
        others = {
            "sage": "dense",
            "native": "native",
            "declined": "left to ComfyUI's own attention",
        }
        parts += [
            f"{self.count(other)} {name} ({self._reasons(other)})"
            for other, name in others.items()
            if other != kind and self.count(other)
        ]
        precision = self.request.precision
        return f"Nox {self._setting}, {precision}: {'; '.join(parts)}; computed by {self.kernel}"

    @property
    def badge(self) -> str:
        """At most two lines of thirty characters, shown on the node."""
        kind = self._kind
        # the page may join the lines, so the first ends like one
        first = f"{self.count(kind)} of {sum(self.calls.values())} calls {kind}."
        if self.count("declined"):
            return f"{first}\n{self.count('declined')} by ComfyUI: see the log"
        if self.kept_share:
            return f"{first}\nThey compute {100 * self.kept_share:.1f} % of tiles."
        return first

    def as_dict(self) -> dict:
        """Plain values, for the `nox` tag of a saved file."""
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
            "seconds": round(self.seconds, 3),
        }


@dataclass(eq=False)
class Session:
    """What one Nox H3 Attention node's patch asks.

    Attributes:
        request: What the node asks.
        table: Layout of every head.
        predictor: Of mode veda, around a `VedaPredictor`.
        shape: Of the model.
        node_id: The node.
        announced_in: The prompt in which the user was last told what computes.
    """

    request: AttentionRequest
    table: LayoutTable
    predictor: ModelPatcher | None
    shape: ModelShape
    node_id: str
    announced_in: str | None = None


# Reports of sampling runs, by what the sampler was asked. Plain numbers, not on the patch: ComfyUI
# may let go of the model before the saver runs.
_reports: dict[str, Report] = {}


def keep_report(report: Report) -> None:
    """Remember the report of a run for the savers behind its sampler, which executes now."""
    prompt_id, sampler = executing()
    key = fingerprints(running_prompt(prompt_id)).get(written(sampler))
    if key is None:  # nobody could find it
        return
    _reports.pop(key, None)
    _reports[key] = report
    while len(_reports) > MAX_REPORTS:
        del _reports[next(iter(_reports))]


def lines_and_reports(prompt: dict | None, node_id: str) -> tuple[list[str], list[Report]]:
    """What a saver says of the sampling upstream of it: lines for people, and reports.

    Args:
        prompt: The API prompt, {node id: {"class_type", "inputs"}}.
        node_id: The saver.
    """
    prompt = prompt or {}
    nodes, queue = [], [written(node_id)]
    is_asked = False
    while queue:
        node = queue.pop()
        if node in nodes or node not in prompt:
            continue
        nodes.append(node)
        inputs = prompt[node].get("inputs", {})
        if prompt[node].get("class_type") == "NoxAttention":
            # the last one of a chain wins, so what stands before it says nothing
            is_asked |= inputs.get("mode") in ("sage", "sparse", "veda")
            continue
        queue += [str(value[0]) for value in inputs.values() if is_link(value)]
    keys = fingerprints(prompt)
    # the first sampler of a chain first
    reports = [_reports[keys[node]] for node in reversed(nodes) if keys[node] in _reports]
    lines = [report.line for report in reports]
    if is_asked and not reports:
        lines = [NO_RUN]
    return lines, reports
