"""Diffusers: Nox's attention on diffusers' MiniMax-H3 transformer, by its attention processors."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..attention import attend_layer
from ..call_log import Call, CallLog, Evaluation
from ..capability import KernelCase, KernelSpec, pick, prepare
from ..errors import NoKernelError, NoxError, RequestError, SequenceError
from ..layer_plan import LayerPlan
from ..layout_table import PRESETS, LayoutTable, preset_table
from ..plan import Decision, Plan, make_plan
from ..request import WINDOWS, AttentionRequest, DenseRequest
from ..schedule import Schedule
from ..sequence import Segment, Sequence, grid_of_positions, leading_run, t2va_sequence
from ..veda.predictor import VedaPredictor

logger = logging.getLogger("nox")

DEFAULT_DENSE = DenseRequest()

# Called before each of Nox's calls with (layer_idx, sigma, layer plan, q [H, S, D], k [H, S, D]).
Observer = Callable[[int, float, LayerPlan, Tensor, Tensor], None]


@contextmanager
def nox_attention(
    transformer: torch.nn.Module,
    request: AttentionRequest,
    dense_request: DenseRequest = DEFAULT_DENSE,
    table: LayoutTable | None = None,
    predictor: VedaPredictor | None = None,
    *,
    scheduler: Any,
    observe: Observer | None = None,
) -> Iterator[NoxRun]:
    """Let a transformer compute its attention as asked, for as long as the context is open.

    Layers get Nox's attention processor and, when the context closes, their own one back. The
    token refiner is never touched; mode "dense" touches nothing.

    Args:
        transformer: diffusers' MiniMaxH3Transformer3DModel.
        request: What to run.
        dense_request: Where sparse attention stays dense.
        table: Layout of every head; None = the one that `request.layout` names.
        predictor: What scores tiles in mode veda; keep it on the transformer's device.
        scheduler: diffusers' MiniMaxH3Scheduler of the video; its sigmas and shift are read when
            a forward starts, so it may be set up inside the context.
        observe: Sees what Nox's calls are given.

    Yields:
        The run, which counts what each call did.

    Raises:
        RequestError: The model or the request cannot be served; nothing was touched.
    """
    run = NoxRun(transformer, request, dense_request, table, predictor, scheduler, observe)
    if request.mode == "dense":
        yield run
        return
    run.check()
    signature = inspect.signature(transformer.forward)

    def before_forward(module, args, kwargs):
        run.begin_forward(signature.bind(*args, **kwargs).arguments)

    def after_forward(module, args, output):
        run.end_forward()

    attentions = [block.attn for block in transformer.transformer_blocks]
    natives = [attn.get_processor() for attn in attentions]
    handles = []
    try:
        handles.append(transformer.register_forward_pre_hook(before_forward, with_kwargs=True))
        handles.append(transformer.register_forward_hook(after_forward, always_call=True))
        for layer_idx, (attn, native) in enumerate(zip(attentions, natives, strict=True)):
            attn.set_processor(NoxH3AttnProcessor(run, layer_idx, native))
        yield run
    finally:
        for handle in handles:
            handle.remove()
        for attn, native in zip(attentions, natives, strict=True):
            if isinstance(attn.get_processor(), NoxH3AttnProcessor):
                attn.set_processor(native)


@dataclass(eq=False)
class NoxRun:
    """What happens inside one `nox_attention` context.

    Attributes:
        transformer: The model.
        request: What the user asked.
        dense_request: Where sparse stays dense.
        table: Layout of every head.
        predictor: What scores tiles in mode veda.
        scheduler: The video's scheduler.
        observe: See `nox_attention`.
        log: What ran in each attention call.
        kernels: What computed Nox's calls.
    """

    transformer: torch.nn.Module
    request: AttentionRequest
    dense_request: DenseRequest
    table: LayoutTable | None
    predictor: VedaPredictor | None
    scheduler: Any
    observe: Observer | None = None
    log: CallLog = field(default_factory=CallLog)
    kernels: set[KernelSpec] = field(default_factory=set)
    _plans: dict[tuple, tuple[Schedule, Plan]] = field(default_factory=dict)
    _refusals: dict[tuple, str | None] = field(default_factory=dict)
    _rows: tuple[Tensor, ...] = ()  # index tensors of the last forward, to know them again
    _sigmas: Tensor | None = None  # the scheduler's tensor that _schedule was made from
    _sequence: Sequence | None = None
    _schedule: Schedule | None = None
    _sigma: float | None = None  # of the forward that is running; None outside
    _evaluation: Evaluation | None = None  # the last one

    @property
    def calls(self) -> Counter[Call]:
        """Attention calls by (kind, reason); kind is that of `plan.Decision`."""
        return self.log.calls

    @property
    def sequence(self) -> Sequence | None:
        """The packed sequence of the last forward."""
        return self._sequence

    def check(self) -> None:
        """Refuse what cannot run, before anything is touched.

        Raises:
            RequestError: The model is not diffusers' H3 or runs attention of somebody else, or
                the layout table, the predictor or a dense block does not fit it.
        """
        transformer = self.transformer
        model_class, processor_class = _h3_classes()
        if not isinstance(transformer, model_class):
            raise RequestError(
                f"Nox needs diffusers' {model_class.__name__}, this model is a "
                f"{type(transformer).__name__}."
            )
        for block in transformer.transformer_blocks:
            native = block.attn.get_processor()
            if isinstance(native, NoxH3AttnProcessor):
                raise RequestError(
                    "This transformer is inside another nox_attention already; close that first."
                )
            if not isinstance(native, processor_class):
                raise RequestError(
                    f"This transformer has another attention processor, {type(native).__name__}; "
                    f"take it off before using Nox."
                )
        if self.table is None:
            self.table = _named_table(self.request.layout, transformer.config)
        config = transformer.config
        if self.predictor is not None:
            self.predictor.info.check_model(
                config.num_layers, config.num_attention_heads, config.attention_head_dim
            )
        # A plan for the smallest clip refuses what does not fit the model before a run starts;
        # which clips a predictor knows is asked when one is there.
        schedule = Schedule.resolve((1.0, 0.0), self.dense_request, lambda percent: 1.0 - percent)
        smallest = t2va_sequence(32, 32, 5, 1)
        self._make_plan(smallest, schedule, "cpu", on_unknown_geometry="sparse")

    def begin_forward(self, arguments: dict) -> None:
        """Take the packed sequence and the sigma from the arguments of the model's forward."""
        names = ("position_ids", "video_indices", "audio_indices", "text_indices")
        rows = tuple(arguments[name] for name in names)
        level = arguments["timestep_indices"]
        if not _same_tensors(rows, self._rows):
            self._sequence = packed_sequence(
                arguments["position_ids"],
                arguments["video_indices"],
                arguments["audio_indices"],
                arguments["text_indices"],
                arguments["timestep"][level],
            )
            self._rows = rows
        sigmas = self.scheduler.sigmas
        if sigmas is None:
            raise RequestError(
                "The scheduler has no sigmas yet; call its set_timesteps before the transformer."
            )
        if sigmas is not self._sigmas:
            self._schedule = Schedule.resolve(
                tuple(sigmas.tolist()),
                self.dense_request,
                self._percent_to_sigma,
            )
            self._sigmas = sigmas
        # The last packed row is video to be made; H3's time is 1 - sigma.
        self._sigma = 1.0 - float(arguments["timestep"][level[-1]])
        assert self._schedule is not None
        self._evaluation = self.log.begin(
            self._schedule.step_of(self._sigma), self.transformer.config.num_layers
        )

    def end_forward(self) -> None:
        """No forward runs any more."""
        self._sigma = None

    def decide(self, layer_idx: int, hidden_states: Tensor, head_dim: int) -> Decision:
        """What a layer runs now.

        Args:
            layer_idx: The layer.
            hidden_states: [B, S, C] its input; q, k and v will have its device and dtype.
            head_dim: D.
        """
        sequence, sigma = self._sequence, self._sigma
        if sequence is None or sigma is None:
            raise SequenceError(
                "A layer ran outside its transformer; call the transformer itself, not its "
                "forward method or its blocks."
            )
        if hidden_states.shape[1] != sequence.num_rows:
            return Decision(
                "native",
                f"the layer holds {hidden_states.shape[1]} of the {sequence.num_rows} packed rows",
            )
        decision = self.plan_on(hidden_states.device).decide(layer_idx, sigma)
        if decision.kind == "native":
            return decision
        refusal = self._refusal(hidden_states.device, hidden_states.dtype, head_dim)
        return Decision("native", refusal) if refusal else decision

    def _refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why no kernel serves such tensors; None if one does. Asked once for each kind."""
        key = (device, dtype, head_dim)
        if key not in self._refusals:
            num_heads = self.transformer.config.num_attention_heads
            case = KernelCase.on(device, dtype, head_dim, self.request.precision, num_heads)
            try:
                self.kernels.add(prepare(pick(case), device))
                self._refusals[key] = None
            except NoKernelError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]

    def plan_on(self, device: torch.device) -> Plan:
        """The plan of the running forward's packed sequence, made once per device."""
        assert self._sequence is not None
        assert self._schedule is not None
        key = (self._sequence.key, device)
        schedule, plan = self._plans.get(key, (None, None))
        if plan is None or schedule is not self._schedule:
            plan = self._make_plan(
                self._sequence, self._schedule, device, self.request.on_unknown_geometry
            )
            self._plans[key] = self._schedule, plan
            for warning in plan.warnings:
                logger.warning("Nox: %s", warning)
        return plan

    def attend(self, layer_idx: int, decision: Decision, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, S, H, D] of one layer -> [B, S, H * D], by Nox."""
        layer = self.plan_on(q.device).layer(layer_idx, decision.kind)
        assert self._sigma is not None
        outs = []
        for request_qkv in zip(q, k, v, strict=True):
            heads_first = [x.transpose(0, 1) for x in request_qkv]  # [H, S, D]
            if self.observe is not None:
                self.observe(layer_idx, self._sigma, layer, heads_first[0], heads_first[1])
            outs.append(attend_layer(layer, *heads_first))
        return torch.stack(outs)

    def count(self, layer_idx: int, decision: Decision, device: torch.device) -> None:
        """Count a call; say once why diffusers' own attention runs where Nox was asked for."""
        kept_share = None
        if decision.kind in ("sparse", "veda"):
            kept_share = self.plan_on(device).layer(layer_idx, decision.kind).kept_share
        assert self._evaluation is not None
        call = (decision.kind, decision.reason)
        is_first = self.log.count(self._evaluation, layer_idx, call, kept_share)
        if is_first and decision.kind == "native":
            logger.warning("Nox leaves calls to diffusers' own attention: %s.", decision.reason)

    def _percent_to_sigma(self, percent: float) -> float:
        shift, linear = self.scheduler.shift, 1.0 - percent
        return shift * linear / (1.0 + (shift - 1.0) * linear)

    def _make_plan(
        self,
        sequence: Sequence,
        schedule: Schedule,
        device: torch.device | str,
        on_unknown_geometry: str,
    ) -> Plan:
        config = self.transformer.config
        assert self.table is not None
        return make_plan(
            replace(self.request, on_unknown_geometry=on_unknown_geometry),
            self.dense_request,
            sequence,
            self.table,
            schedule,
            num_layers=config.num_layers,
            num_heads=config.num_attention_heads,
            device=device,
            predictor=self.predictor,
        )


class NoxH3AttnProcessor:
    """Attention processor of one layer: Nox's attention, or the layer's own where the run says."""

    def __init__(self, run: NoxRun, layer_idx: int, native: Callable):
        """Serve layer `layer_idx` of a run; `native` is the processor it had."""
        self.run = run
        self.layer_idx = layer_idx
        self.native = native

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """[B, S, C] -> [B, S, C], as diffusers' own processor."""
        if attention_mask is not None:
            decision = Decision("native", "the call has an attention mask")
        elif torch.is_grad_enabled() and hidden_states.requires_grad:
            decision = Decision("native", "the call needs gradients")
        else:
            decision = self.run.decide(self.layer_idx, hidden_states, attn.head_dim)
        self.run.count(self.layer_idx, decision, hidden_states.device)
        if decision.kind == "native":
            return self.native(attn, hidden_states, rotary_emb, attention_mask)
        q, k, v = _project(attn, hidden_states, rotary_emb)
        out = self.run.attend(self.layer_idx, decision, q, k, v)
        for module in attn.to_out:
            out = module(out)
        return out


def _project(
    attn: torch.nn.Module, hidden_states: Tensor, rotary_emb: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, S, H, D], normalised and rotated with diffusers' own arithmetic."""
    if attn.fused_projections:
        parts = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        parts = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
    q, k, v = (part.unflatten(-1, (attn.heads, -1)) for part in parts)
    q, k = attn.norm_q(q), attn.norm_k(k)
    if rotary_emb is not None:
        q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
    return q, k, v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of [B, S, H, D] in pairs (i, i + R / 2).

    Args:
        x: [B, S, H, D].
        cos: [S, R].
        sin: [S, R].
    """
    cos, sin = (angle.to(x.dtype)[:, None] for angle in (cos, sin))
    rotary, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    real, imaginary = rotary.chunk(2, dim=-1)
    turned = torch.cat((-imaginary, real), dim=-1)
    return torch.cat((rotary * cos + turned * sin, rest), dim=-1)


def packed_sequence(
    position_ids: Tensor,
    video_indices: Tensor,
    audio_indices: Tensor,
    text_indices: Tensor,
    row_timestep: Tensor,
) -> Sequence:
    """Read the packed sequence off the arguments of the transformer's forward.

    diffusers packs text, conditions, audio, video. Conditions are video and audio rows too, and
    only their time tells them from the rows to be made: those have the time of the last row, and
    audio to be made is not clean (1.0) yet.

    Args:
        position_ids: [S, 3] (t, h, w) coordinates of every row.
        video_indices: Packed rows of video and visual conditions.
        audio_indices: Packed rows of audio and audio conditions.
        text_indices: Packed rows of text.
        row_timestep: [S] time of every row, 1 - sigma.

    Raises:
        SequenceError: The rows are not packed like that.
    """
    position = position_ids.detach().cpu()
    timestep = row_timestep.detach().cpu()
    names = ("text", "cond", "cond_audio", "audio", "video")
    text, cond, cond_audio, audio, video = range(len(names))
    kind = torch.full(timestep.shape, -1)
    kind[text_indices.cpu()] = text
    kind[video_indices.cpu()] = cond
    kind[audio_indices.cpu()] = cond_audio
    kind[(kind == cond_audio) & (timestep < 1.0)] = audio
    if (kind < 0).any():
        raise SequenceError("Some packed rows of this forward are neither text, audio nor video.")
    target = (kind == cond) & (timestep == timestep[-1])
    num_video = leading_run(target.flip(0)) if target[-1] else 0
    if num_video == 0:
        raise SequenceError("The packed rows of this forward do not end with the video.")
    kind[-num_video:] = video

    grid = grid_of_positions(position[-num_video:])
    if grid is None:
        raise SequenceError("The video rows of this forward do not form a grid of frames.")
    # diffusers' visual conditions are single frames, each at its own time
    frame_time = torch.where(kind == cond, position[:, 0], 0)
    runs, counts = torch.unique_consecutive(
        torch.stack((kind.to(frame_time.dtype), frame_time)), dim=1, return_counts=True
    )
    segments, row = [], 0
    for idx, num_rows in zip(runs[0].int().tolist(), counts.tolist(), strict=True):
        stop = row + num_rows
        own_grid = grid_of_positions(position[row:stop]) if idx in (cond, video) else None
        segments.append(Segment(row, stop, names[idx], own_grid))
        row = stop
    return Sequence(tuple(segments), grid)


def _same_tensors(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _named_table(layout: str, config) -> LayoutTable:
    name = "uniform" if layout == WINDOWS else layout
    if name not in PRESETS:
        raise RequestError(
            f"Layout {layout!r} is not one of {WINDOWS}, {', '.join(PRESETS)}; read its file and "
            f"give the table."
        )
    return preset_table(name, config.num_layers, config.num_attention_heads)


def _h3_classes() -> tuple[type, type]:
    """diffusers' H3 transformer and its attention processor."""
    try:
        from diffusers.models.transformers.transformer_minimax_h3 import (
            MiniMaxH3AttnProcessor,
            MiniMaxH3Transformer3DModel,
        )
    except ImportError as error:
        raise NoxError(
            "This needs diffusers 0.40 or newer, which has MiniMax-H3; run: "
            "pip install 'nox-h3[demo]'."
        ) from error
    return MiniMaxH3Transformer3DModel, MiniMaxH3AttnProcessor
