"""Run: the state of one sampling run - sequence, plan, counters - until its report."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import torch

from ..nox_kernels import capability
from ..nox_kernels.errors import NoKernelError
from ..nox_kernels.layer_plan import LayerPlan
from ..nox_kernels.plan import Plan, make_plan
from ..nox_kernels.request import DenseRequest
from ..nox_kernels.schedule import Schedule
from ..nox_kernels.sequence import Sequence
from .h3_sequence import sequence_of
from .session import Report, Session, VedaUse

log = logging.getLogger("nox")


@dataclass(eq=False)
class Run:
    """One sampling run of a session.

    Attributes:
        session: Whose run it is.
        dense_request: Where sparse stays dense.
        schedule: Which steps are dense.
        calls: Attention calls so far by (kind, reason), see `Report`.
        num_forwards: Model evaluations so far.
        kernel: What computed last.
        veda: The predictor in use, where a plan uses one.
    """

    session: Session
    dense_request: DenseRequest
    schedule: Schedule
    calls: Counter = field(default_factory=Counter)
    num_forwards: int = 0
    kernel: str = "ComfyUI"
    veda: VedaUse | None = None
    _plans: dict = field(default_factory=dict)
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
                plan = self._plans[key] = self._make_plan(sequence, device)
                if plan.veda_plan is not None:
                    self.veda = VedaUse.of(plan, self.session.predictor.model.info)
            return self._plans[key]

    def _make_plan(self, sequence: Sequence, device: torch.device) -> Plan:
        session = self.session
        return make_plan(
            session.request,
            self.dense_request,
            sequence,
            session.table,
            self.schedule,
            num_layers=session.shape.num_layers,
            num_heads=session.shape.num_heads,
            device=device,
            predictor=session.predictor.model if session.predictor else None,
        )

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
            if kind in ("sparse", "veda") and layer is not None:
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
            veda=self.veda,
            calls=dict(self.calls),
            kept_share=sum(self._kept) / len(self._kept) if self._kept else None,
            kernel=self.kernel,
            num_forwards=self.num_forwards,
            seconds=time.perf_counter() - self._start,
        )


def pick_kernel(
    session: Session,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[str], None] | None = None,
) -> capability.KernelSpec:
    """What computes a session's attention on a device, loaded.

    Raises:
        NoKernelError: Nothing of ours can.
    """
    shape = session.shape
    case = capability.KernelCase.on(
        device, dtype, shape.head_dim, session.request.precision, shape.num_heads
    )
    return capability.prepare(capability.pick(case), device, on_progress)


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
