"""Run: the state of one sampling run - sequence, plan, calls, times - until its report."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import torch

from ..nox_kernels import capability
from ..nox_kernels.call_log import CallLog, Evaluation
from ..nox_kernels.errors import NoKernelError
from ..nox_kernels.layer_plan import LayerPlan
from ..nox_kernels.plan import Plan, make_plan
from ..nox_kernels.request import DenseRequest
from ..nox_kernels.schedule import Schedule
from ..nox_kernels.sequence import Sequence
from ..nox_kernels.stopwatch import Stopwatch
from . import dense_time, report_text
from .h3_sequence import sequence_of
from .report import COMPUTED, ROUTED, Report, Timing, VedaUse
from .session import Session

log = logging.getLogger("nox")

MAX_PLANS = 16  # lengths of one run that are remembered: each prompt has its own, and each device


@dataclass(eq=False)
class Run:
    """One sampling run of a session.

    Attributes:
        session: Whose run it is.
        node_id: The node that shows it.
        dense_request: Where sparse stays dense.
        schedule: Which steps are dense.
        log: What ran so far.
        kernel: What computed last; None before.
        veda: The predictor in use, where a plan uses one.
        stopwatch: Times of Nox's calls, by their kind.
        warnings: What the user was told, a sentence each.
        shown_s: When the node last showed where the run stands, on time.perf_counter's clock.
    """

    session: Session
    node_id: str
    dense_request: DenseRequest
    schedule: Schedule
    log: CallLog = field(default_factory=CallLog)
    kernel: capability.KernelSpec | None = None
    veda: VedaUse | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    warnings: list[str] = field(default_factory=list)
    shown_s: float = field(default_factory=time.perf_counter)
    _plans: dict = field(default_factory=dict)
    _refusals: dict = field(default_factory=dict)
    _dense_keys: set[tuple] = field(default_factory=set)
    _was_slow: bool = False
    _lock: Lock = field(default_factory=Lock)
    _start: float = field(default_factory=time.perf_counter)

    @classmethod
    def start(
        cls,
        session: Session,
        node_id: str,
        dense_request: DenseRequest | None,
        sigmas: torch.Tensor,
        percent_to_sigma: Callable[[float], float],
    ) -> "Run":
        """Resolve what depends on the run's sigmas, once."""
        dense_request = dense_request or DenseRequest()
        schedule = Schedule.resolve(tuple(sigmas.tolist()), dense_request, percent_to_sigma)
        return cls(session, node_id, dense_request, schedule)

    def begin_forward(self, sigma: float, host_layout) -> "Forward":
        """Start an evaluation of the model."""
        self._read_times(wait=False)
        evaluation = self.log.begin(self.schedule.step_of(sigma), self.session.shape.num_layers)
        return Forward(self, sigma, host_layout, evaluation)

    def plan(self, layout, device: torch.device) -> Plan:
        """The plan for a packed layout, made at its first use."""
        sequence = sequence_of(layout)
        key = (sequence.key, device)
        with self._lock:
            plan = self._plans.pop(key, None)
            if plan is None:
                plan = self._make_plan(sequence, device)
                for warning in plan.warnings:
                    self.warn(warning)
                if plan.veda_plan is not None:
                    self.veda = VedaUse.of(plan, self.session.predictor.model.info)
            self._plans[key] = plan  # the latest one is the last
            while len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            return plan

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
                self.kernel = pick_kernel(self.session, device, dtype)
                self._refusals[key] = None
            except NoKernelError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]

    def warn(self, sentence: str) -> None:
        """Tell the user in the log and in the report, once in a run."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)
            log.warning("Nox: %s", sentence)

    def measure_dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Before the first call of a length, time what ComfyUI's own attention would take.

        Args:
            q: [1, H, S, D], of some or all heads of a block.
            k: The same.
            v: The same.
        """
        key = dense_time.key_of(q.device, q.dtype, q.shape[2], self.session.shape.num_heads)
        if key not in self._dense_keys:
            self._dense_keys.add(key)
            dense_time.measure(self.stopwatch, key, q, k, v)

    def count(
        self,
        forward: "Forward",
        layer_idx: int,
        kind: str,
        reason: str,
        layer: LayerPlan | None = None,
    ) -> None:
        """Count one block's attention."""
        kept_share = layer.kept_share if layer is not None and kind in ROUTED else None
        is_first = self.log.count(forward.evaluation, layer_idx, (kind, reason), kept_share)
        if is_first and kind == "declined":
            self.warn(f"ComfyUI's own attention runs instead: {reason}.")

    def wait_for_times(self) -> None:
        """Wait for the GPU, once, at the end of a run that ended well."""
        self._read_times(wait=True)

    def _read_times(self, *, wait: bool) -> None:
        self.stopwatch.read(wait=wait)
        dense_time.learn(self.stopwatch, self._dense_keys)
        sentence = None if self.is_reference else report_text.too_slow(self.timing)
        if sentence is not None and not self._was_slow:
            self._was_slow = True  # its numbers change, so it would be another warning
            self.warn(sentence)

    @property
    def is_reference(self) -> bool:
        """Nox computes on the slow twin of its kernels."""
        return self.kernel is not None and bool(self.kernel.note)

    @property
    def timing(self) -> Timing:
        """How long attention took so far."""
        times = {kind: self.stopwatch.median_ms(kind) for kind in COMPUTED}
        return Timing(
            ms_per_call={kind: time_ms for kind, time_ms in times.items() if time_ms is not None},
            dense_ms=dense_time.known_ms(self._dense_keys),
            seconds=time.perf_counter() - self._start,
        )

    def finish(self) -> Report | None:
        """Let go of what the run made, and report it; None if the model was never evaluated."""
        self._plans.clear()
        self._refusals.clear()
        if not self.log.num_evaluations:
            return None
        return Report(
            request=self.session.request,
            veda=self.veda,
            calls=dict(self.log.calls),
            kept_share=self.log.kept_share,
            kernel=str(self.kernel or "ComfyUI"),
            is_reference=self.is_reference,
            evaluations=tuple(self.log.evaluations),
            num_forwards=self.log.num_evaluations,
            num_steps=self.schedule.num_steps,
            num_layers=self.session.shape.num_layers,
            timing=self.timing,
            warnings=tuple(self.warnings),
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
    evaluation: Evaluation
    _layout: object = None
    _plan: Plan | None = None

    def plan(self, newer_layout, device: torch.device) -> Plan:
        """The plan for the layout that this forward uses."""
        layout = newer_layout or self.host_layout
        if self._plan is None or layout is not self._layout:
            self._layout, self._plan = layout, self.run.plan(layout, device)
        return self._plan
