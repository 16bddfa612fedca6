"""Run: the state of one sampling run - step, sequence, plan, counters - and its report."""

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import torch

from ..nox_kernels import capability
from ..nox_kernels.errors import NoKernelError
from ..nox_kernels.layout_table import LayoutTable
from ..nox_kernels.plan import Decision, LayerPlan, Plan, Schedule, make_plan
from ..nox_kernels.request import AttentionRequest, DenseRequest
from .h3_sequence import ModelShape, sequence_of

log = logging.getLogger("nox")


@dataclass(frozen=True)
class Report:
    """What really ran.

    Attributes:
        request: What the user asked.
        calls: Attention calls by (kind, reason); kind is "sparse", "sage", "native" (the user
            wanted the host's own attention there) or "declined" (it stepped in).
        kept_share: Share of tile pairs computed in the sparse calls; None without any.
        kernel: The implementation that computed, with its note.
        num_forwards: Model evaluations.
        seconds: Duration of the sampling run.
    """

    request: AttentionRequest
    calls: dict[tuple[str, str], int]
    kept_share: float | None
    kernel: str
    num_forwards: int
    seconds: float

    def count(self, kind: str) -> int:
        """Attention calls of one kind."""
        return sum(n for (call_kind, _), n in self.calls.items() if call_kind == kind)

    def _reasons(self, *kinds: str) -> str:
        parts = [f"{n} {reason}" for (kind, reason), n in self.calls.items() if kind in kinds]
        return ", ".join(parts)

    @property
    def line(self) -> str:
        """One line for the log and under the saved video."""
        total = sum(self.calls.values())
        request = self.request
        parts = []
        if request.mode == "sparse":
            share = f" ({100 * self.kept_share:.1f} % of tiles)" if self.kept_share else ""
            parts.append(f"{self.count('sparse')} of {total} attention calls sparse{share}")
            num_dense = self.count("sage") + self.count("native")
            if num_dense:
                parts.append(f"{num_dense} dense ({self._reasons('sage', 'native')})")
            setting = f"sparse {100 * request.keep_ratio:.0f} %, {request.layout}"
        else:
            parts.append(f"{self.count('sage')} of {total} attention calls INT8")
            if self.count("native"):
                parts.append(f"{self.count('native')} native ({self._reasons('native')})")
            setting = "sage"
        if self.count("declined"):
            parts.append(
                f"{self.count('declined')} left to ComfyUI's own attention ({self._reasons('declined')})"
            )
        return f"Nox {setting}, {request.precision}: {'; '.join(parts)}; computed by {self.kernel}"

    @property
    def badge(self) -> str:
        """At most two lines of thirty characters, shown on the node."""
        ours = self.count("sparse") + self.count("sage")
        first = f"{self.request.mode} {ours}/{sum(self.calls.values())} calls"
        if self.count("sparse") and self.kept_share:
            return f"{first}\n{100 * self.kept_share:.1f} % of tiles computed"
        return first if ours else f"{first}\nsee log: ComfyUI's attention"

    def as_dict(self) -> dict:
        """Plain values, for the `nox` tag of a saved file."""
        return {
            "mode": self.request.mode,
            "keep_ratio": self.request.keep_ratio,
            "layout": self.request.layout,
            "precision": self.request.precision,
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
    """One Nox H3 Attention node's patch: what it asks, and the report of its last run."""

    request: AttentionRequest
    table: LayoutTable
    shape: ModelShape
    node_id: str
    last_report: Report | None = None


# So that a saver finds the report of the patch upstream of it in its graph; holds nothing alive.
_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()


def register(session: Session) -> None:
    """Make a session findable by its node."""
    _sessions[session.node_id] = session


def reports_for(prompt: dict | None, node_id: str) -> list[Report]:
    """Reports of the last runs of the Nox H3 Attention nodes upstream of a node.

    Args:
        prompt: The API prompt, {node id: {"class_type", "inputs"}}.
        node_id: The node to start from.
    """
    found, seen, queue = [], set(), [str(node_id)]
    while queue:
        node = queue.pop()
        if node in seen or not prompt or node not in prompt:
            continue
        seen.add(node)
        session = _sessions.get(node)
        if session is not None and session.last_report is not None:
            found.append(session.last_report)
        links = prompt[node].get("inputs", {}).values()
        queue += [str(link[0]) for link in links if isinstance(link, list) and len(link) == 2]
    return found


@dataclass(eq=False)
class Run:
    """One sampling run of a session."""

    session: Session
    dense_request: DenseRequest
    schedule: Schedule
    calls: Counter = field(default_factory=Counter)
    num_forwards: int = 0
    _plans: dict = field(default_factory=dict)
    kernel: str = "ComfyUI"  # what computed last
    _refusals: dict = field(default_factory=dict)
    _kept: list[float] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)
    _start: float = field(default_factory=time.perf_counter)

    @classmethod
    def start(
        cls,
        session: Session,
        dense_request: DenseRequest | None,
        sigmas: torch.Tensor,
        percent_to_sigma: Callable[[float], float],
    ) -> "Run":
        """Resolve what depends on the run's sigmas, once."""
        dense_request = dense_request or DenseRequest()
        schedule = Schedule.resolve(tuple(sigmas.tolist()), dense_request, percent_to_sigma)
        return cls(session, dense_request, schedule)

    def plan(self, layout, device: torch.device) -> Plan:
        """The plan for a packed layout, made at its first use."""
        sequence = sequence_of(layout)
        key = (sequence.key, device)
        with self._lock:
            if key not in self._plans:
                self._plans[key] = make_plan(
                    self.session.request,
                    self.dense_request,
                    sequence,
                    self.session.table,
                    self.schedule,
                    num_layers=self.session.shape.num_layers,
                    num_heads=self.session.shape.num_heads,
                    device=device,
                )
            return self._plans[key]

    def why_no_kernel(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why nothing of ours can compute on these tensors; None if something can."""
        key = (device, dtype)
        if key not in self._refusals:
            try:
                self.kernel = str(pick_kernel(self.session, device, dtype))
                self._refusals[key] = None
            except NoKernelError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]

    def count(self, kind: str, reason: str, layer: LayerPlan | None = None) -> None:
        """Count one block's attention."""
        with self._lock:
            self.calls[kind, reason] += 1
            first_decline = kind == "declined" and self.calls[kind, reason] == 1
            if kind == "sparse" and layer is not None:
                self._kept.append(layer.kept_share)
        if first_decline:
            log.warning("Nox: ComfyUI's own attention runs instead: %s.", reason)

    def finish(self) -> Report | None:
        """The report of the run; None if the model was never evaluated."""
        self._plans.clear()
        if not self.num_forwards:
            return None
        return Report(
            request=self.session.request,
            calls=dict(self.calls),
            kept_share=sum(self._kept) / len(self._kept) if self._kept else None,
            kernel=self.kernel,
            num_forwards=self.num_forwards,
            seconds=time.perf_counter() - self._start,
        )


def pick_kernel(
    session: Session, device: torch.device, dtype: torch.dtype
) -> capability.KernelSpec:
    """What computes a session's attention on a device.

    Raises:
        NoKernelError: Nothing of ours can.
    """
    return capability.pick(
        capability.KernelCase.on(device, dtype, session.shape.head_dim, session.request.precision)
    )


@dataclass(eq=False)
class Forward:
    """One evaluation of the model: where it stands in the run."""

    run: Run
    sigma: float
    host_layout: object
    _layout: object = None
    _plan: Plan | None = None

    def plan(self, newer_layout, device: torch.device) -> Plan:
        """The plan for the layout that this forward uses."""
        layout = newer_layout or self.host_layout
        if self._plan is None or layout is not self._layout:
            self._layout, self._plan = layout, self.run.plan(layout, device)
        return self._plan

    def decide(self, layer_idx: int, plan: Plan) -> Decision:
        """What a layer runs in this forward."""
        return plan.decide(layer_idx, self.sigma)
