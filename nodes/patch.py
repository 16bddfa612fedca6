"""Patch: puts our hooks on a model clone; nothing else touches a model.

A block patch (`patches_replace / dit / double_block`) scopes an attention override to one block
call; two wrappers tell it where the run stands. All are ComfyUI's public hooks and live on the
clone only.
"""

import logging
from collections.abc import Callable

import torch
from comfy.ldm.modules import attention as host_attention
from comfy.patcher_extension import WrappersMP

from ..nox_kernels.attention import attend_packed, pack_layer
from ..nox_kernels.errors import RequestError
from ..nox_kernels.layer_plan import LayerPlan
from ..nox_kernels.plan import Plan
from ..nox_kernels.request import DenseRequest
from . import conflicts, h3_sequence, status
from .conflicts import OVERRIDE
from .prompt import attention_node
from .report_store import keep_report
from .run import Run
from .session import Session

log = logging.getLogger("nox")

KEY = "nox"  # of our wrappers
CHECK = "nox_check"  # of the loader's
SESSION = "nox_session"  # attachment: the Nox H3 Attention node that applies
DENSE_REQUEST = "nox_dense_request"  # attachment: what Nox Dense Steps and Blocks asks
RUN = "nox_run"  # transformer option: the run, set at its start
FORWARD = "nox_forward"  # transformer option: the model evaluation
PREDICTOR = "nox_veda"  # additional model: what scores tiles in mode veda


def apply_attention(model, session: Session | None):
    """A clone of a MODEL whose attention is a session's; None leaves the host's own.

    The last Nox H3 Attention of a chain wins.

    Raises:
        RequestError: A patch on the model keeps Nox from running.
    """
    if session is not None:
        conflicts.refuse(model.object_patches, model.model_options)
    clone = model.clone()
    clone.remove_attachments(SESSION)
    if session is not None:
        clone.set_attachments(SESSION, session)
        status.announce(session, session.node_id, clone.load_device)
    _install(clone)
    return clone


def apply_dense_request(model, request: DenseRequest):
    """A clone of a MODEL with dense steps and blocks; the last one of a chain wins.

    Raises:
        RequestError: A block number is beyond the model's.
    """
    num_layers = h3_sequence.model_shape(model).num_layers
    beyond = [idx for idx in request.blocks if idx >= num_layers]
    if beyond:
        raise RequestError(
            f"Dense block {beyond[0]} does not exist: this model has blocks 0 to {num_layers - 1}."
        )
    clone = model.clone()
    clone.set_attachments(DENSE_REQUEST, request)
    _install(clone)
    return clone


def check_at_start(model, check: Callable[[bool], None]):
    """A clone of a MODEL that calls `check` at the start of each run, before its first step.

    Args:
        model: The model.
        check: Gets whether the run is conditioned on references; raises to stop it.
    """

    def wrapper(executor, *args, **kwargs):
        conditions = (getattr(executor.class_obj, "conds", None) or {}).values()
        check(any("minimax_refs" in condition for group in conditions for condition in group))
        return executor(*args, **kwargs)

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, CHECK, wrapper)
    return clone


def _install(clone) -> None:
    """Bring the hooks of a clone in line with its attachments."""
    session = clone.get_attachment(SESSION)
    blocks = conflicts.block_patches(clone.model_options["transformer_options"])
    for name, patch in list(blocks.items()):
        if isinstance(patch, BlockPatch):
            if patch.previous is None:
                del blocks[name]
            else:
                blocks[name] = patch.previous
    for kind in (WrappersMP.OUTER_SAMPLE, WrappersMP.DIFFUSION_MODEL):
        clone.remove_wrappers_with_key(kind, KEY)
    clone.remove_additional_models(PREDICTOR)
    if session is None and clone.get_attachment(DENSE_REQUEST) is None:
        return
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _outer_sample)
    if session is None:
        return
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, _diffusion_model)
    if session.predictor is not None:  # ComfyUI loads and unloads it with the model
        clone.set_additional_models(PREDICTOR, [session.predictor])
    for layer_idx in range(session.shape.num_layers):
        previous = blocks.get(("double_block", layer_idx))
        patch = BlockPatch(session, layer_idx, previous)
        clone.set_model_patch_replace(patch, "dit", "double_block", layer_idx)


# ---- where the run stands ------------------------------------------------------------------------


def _outer_sample(executor, noise, latent_image, sampler, sigmas, *args, **kwargs):
    """Around one sampling run: make its state, and report at its end."""
    guider = executor.class_obj
    patcher = guider.model_patcher
    session = patcher.get_attachment(SESSION)
    if session is None:
        log.warning(
            "Nox Dense Steps and Blocks does nothing here: no Nox H3 Attention in mode sage, "
            "sparse or veda is on this model."
        )
        return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
    options = guider.model_options["transformer_options"]  # a copy for this run
    # nodes behind Nox H3 Attention have done their part by now
    conflicts.refuse(patcher.object_patches, guider.model_options)
    _refuse_lost_blocks(session, options)
    node_id = attention_node(session.node_id)
    _refuse_geometry(session, node_id, kwargs.get("latent_shapes"))
    run = Run.start(
        session,
        node_id,
        patcher.get_attachment(DENSE_REQUEST),
        sigmas,
        patcher.get_model_object("model_sampling").percent_to_sigma,
    )
    options[RUN] = run
    status.announce(session, node_id, patcher.load_device)
    try:
        samples = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
        run.wait_for_times()
        return samples
    finally:  # also after an interrupt and after an error
        options.pop(RUN, None)
        report = run.finish()
        if report is not None:
            keep_report(report)
            status.report(node_id, report)


def _refuse_lost_blocks(session: Session, options: dict) -> None:
    """Stop before the first step if our block patches cannot be reached."""
    blocks = conflicts.block_patches(options)
    for layer_idx in range(session.shape.num_layers):
        outermost = blocks.get(("double_block", layer_idx))
        if any(getattr(patch, "session", None) is session for patch in conflicts.chain(outermost)):
            continue
        raise RequestError(
            f"Another node replaced block {layer_idx} of this model after Nox H3 Attention "
            f"(its code: {conflicts.owner_of(outermost)}), so Nox would not run. Move that node "
            f"before Nox H3 Attention, or remove one of the two."
        )


def _refuse_geometry(session: Session, node_id: str, latent_shapes: list | None) -> None:
    """Stop before the model is loaded where the predictor does not know the clip.

    A plan would refuse it too, at the first evaluation.
    """
    if session.predictor is None or session.request.on_unknown_geometry != "error":
        return
    if latent_shapes:
        try:
            session.predictor.model.info.check_grid(h3_sequence.grid_of_latent(latent_shapes[0]))
        except RequestError:
            status.refuse_geometry(node_id)
            raise


def _diffusion_model(executor, x, timestep, context, transformer_options=None, *args, **kwargs):
    """Around one model evaluation: note its sigma and packed layout for the block patches."""
    options = transformer_options or {}
    run = options.get(RUN)
    if run is not None:
        layout = h3_sequence.find_layout(x, context, kwargs.get("minimax_payload"))
        # one read back from the device for all blocks
        forward = run.begin_forward(float(options["sigmas"][0]), layout)
        if run.log.num_evaluations == 0:
            status.describe_plan(run, forward.plan(None, x[0].device))
        else:
            status.progress(run, forward.evaluation.step_idx)
        options = {**options, FORWARD: forward}
    return executor(x, timestep, context, options, *args, **kwargs)


# ---- one block -----------------------------------------------------------------------------------


class BlockPatch:
    """Scopes our attention to one block call, and lets through what is not for us."""

    def __init__(self, session: Session, layer_idx: int, previous):
        self.session = session
        self.layer_idx = layer_idx
        self.previous = previous

    def __call__(self, args: dict, extra: dict) -> dict:
        """Run the block; see ComfyUI's `patches_replace`."""
        options = args["transformer_options"]
        forward = options.get(FORWARD)
        if forward is None or forward.run.session is not self.session:
            return self._next(args, extra)
        run, device = forward.run, args["img"].device
        plan = forward.plan(h3_sequence.newer_layout(args), device)
        decision = plan.decide(self.layer_idx, forward.sigma)
        if decision.kind == "native":
            run.count(forward, self.layer_idx, "native", decision.reason)
            return self._next(args, extra)
        layer = plan.layer(self.layer_idx, decision.kind)
        override = AttentionOverride(run, plan, layer, decision.kind, options.get(OVERRIDE))
        out = self._next({**args, "transformer_options": {**options, OVERRIDE: override}}, extra)
        if override.is_complete:
            run.count(forward, self.layer_idx, decision.kind, decision.reason, layer)
        else:
            reason = override.declined or "the block did not call attention"
            run.count(forward, self.layer_idx, "declined", reason)
        return out

    def _next(self, args: dict, extra: dict) -> dict:
        if self.previous is not None:
            return self.previous(args, extra)
        return extra["original_block"](args)

    # ComfyUI finds these on patches; a wrapped patch must still be found.

    def to(self, device_or_dtype):
        """Move a wrapped patch; nothing of ours lives on a device between runs."""
        if hasattr(self.previous, "to"):
            moved = self.previous.to(device_or_dtype)
            if moved is not self.previous:
                return BlockPatch(self.session, self.layer_idx, moved)
        return self

    def models(self) -> list:
        """Models of a wrapped patch that ComfyUI must load."""
        return self.previous.models() if hasattr(self.previous, "models") else []

    def cleanup(self) -> None:
        """End of a run, for a wrapped patch."""
        if hasattr(self.previous, "cleanup"):
            self.previous.cleanup()


class AttentionOverride:
    """Serves the attention calls of one block until every head is done; declines all others.

    A memory-saving node may call with slices of heads, and a control tower may call again with
    the same options: counting heads serves the first and keeps the second on the host's own.
    """

    def __init__(self, run: Run, plan: Plan, layer: LayerPlan, kind: str, previous):
        self.run = run
        self.plan = plan
        self.layer = layer
        self.kind = kind
        self.previous = previous
        self.next_head = 0
        self.declined: str | None = None

    @property
    def is_complete(self) -> bool:
        """Every head of the block was served."""
        return self.next_head == self.plan.num_heads

    def __call__(self, func, q, k, v, heads, *args, **kwargs):
        """Plain form of ComfyUI's attention override."""
        if self._declines(q, k, heads, *args, **kwargs):
            return (self.previous or _drop_function)(func, q, k, v, heads, *args, **kwargs)
        held = map(host_attention.AttentionTensorContainer, (q, k, v))
        return self._attend(*held, heads, **kwargs)

    def container_function(self, q, k, v, heads, *args, **kwargs):
        """Form with single-owner tensors, for callers that let go of them."""
        if not self._declines(q.peek(), k.peek(), heads, *args, **kwargs):
            return self._attend(q, k, v, heads, **kwargs)
        host = host_attention.optimized_attention
        if self.previous is None:
            return host(q, k, v, heads, *args, **kwargs)
        if hasattr(self.previous, "container_function"):
            return self.previous.container_function(q, k, v, heads, *args, **kwargs)
        return self.previous(host.__wrapped__, q.take(), k.take(), v.take(), heads, *args, **kwargs)

    def _declines(self, q, k, heads, mask=None, attn_precision=None, skip_reshape=False, **kwargs):
        """Whether a call is not ours, noting why; decided before any tensor is taken."""
        if self.is_complete:
            return True  # a further call of this block, such as a control tower's
        reason = self._why_not(q, k, heads, mask, skip_reshape, kwargs.get("scale"))
        if reason is not None:
            self.declined = reason
        return reason is not None

    def _why_not(self, q, k, heads, mask, skip_reshape, scale) -> str | None:
        if mask is not None:
            return "attention was called with a mask"
        if not skip_reshape or q.ndim != 4 or q.shape != k.shape or q.shape[1] != heads:
            return "attention was called with tensors of another form"
        if q.shape[0] != 1:
            return f"attention was called with batch {q.shape[0]}, Nox takes 1"
        num_rows = self.plan.sequence.num_rows
        if q.shape[2] != num_rows:
            return (
                f"attention was called with {q.shape[2]} rows, the packed sequence has {num_rows}"
            )
        if heads + self.next_head > self.plan.num_heads:
            return f"attention was called with {heads} heads, this block has {self.plan.num_heads}"
        if scale is not None and abs(scale * q.shape[3] ** 0.5 - 1) > 1e-6:
            return f"attention was called with scale {scale}"
        return self.run.why_no_kernel(q.device, q.dtype)

    @torch.compiler.disable
    def _attend(self, q, k, v, heads, *, skip_output_reshape=False, **_):
        """Of tensors in containers: nothing here holds them once they are packed."""
        layer = self.layer.slice_heads(self.next_head, heads)
        self.next_head += heads
        dtype, device = q.peek().dtype, q.peek().device
        if self.previous is None:  # another node's attention need not bear a further call
            self.run.measure_dense(q.peek(), k.peek(), v.peek())
        with self.run.stopwatch.time(self.kind, device, scale=self.plan.num_heads / heads):
            images = pack_layer(layer, q.take()[0], k.take()[0], v.take()[0])
            out = attend_packed(layer, images, dtype)  # [S, H * D]
        if skip_output_reshape:
            return out.unflatten(1, (heads, -1)).transpose(0, 1)[None]
        return out[None]


def _drop_function(func, *args, **kwargs):
    """What an absent previous override does: the host's own attention."""
    return func(*args, **kwargs)
