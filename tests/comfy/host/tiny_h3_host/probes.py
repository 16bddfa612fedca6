"""Probes: test-only nodes that do to H3's blocks what other node packs do."""

import logging
import time
import weakref

import torch
from comfy.ldm.modules import attention as host_attention
from comfy_api.latest import io
from torch.utils._python_dispatch import TorchDispatchMode

OVERRIDE = "optimized_attention_override"
log = logging.getLogger("tiny_h3_probe")


class TinyH3BlockProbe(io.ComfyNode):
    """A `double_block` patch that calls the one before it, and misbehaves as asked."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Every misbehaviour is off by default."""
        return io.Schema(
            node_id="TinyH3BlockProbe",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.String.Input("label", default="probe"),
                io.Int.Input("block", default=1, min=0, max=49),
                io.Combo.Input(
                    "attention",
                    options=["whole", "watched", "head slices", "one row less", "two batches"],
                ),
                io.Boolean.Input("foreign_calls", default=False),
                io.Float.Input("wait_s", default=0.0, min=0.0, max=60.0),
                io.Int.Input("fail_at", default=0, min=0, max=1000),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, block, **settings) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()
        blocks = (
            clone.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
        )
        previous = blocks.get(("double_block", block))
        probe = BlockProbe(previous, **settings)
        clone.set_model_patch_replace(probe, "dit", "double_block", block)
        return io.NodeOutput(clone)


class TinyH3MLPProbe(io.ComfyNode):
    """An object patch on a block's MLP that logs the rows it gets, and calls the one before it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Its label stands in the log."""
        return io.Schema(
            node_id="TinyH3MLPProbe",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.String.Input("label", default="probe"),
                io.Int.Input("block", default=1, min=0, max=49),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, label, block) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()
        name = f"diffusion_model.blocks.{block}.mlp.forward"
        previous = clone.get_model_object(name)

        def forward(x):
            log.info("probe %s: mlp of %d rows", label, x.shape[0])
            return previous(x)

        clone.add_object_patch(name, forward)
        return io.NodeOutput(clone)


class BlockProbe:
    """Chains as core's own block patches do: by an attribute named `previous`."""

    def __init__(self, previous, *, label, attention, foreign_calls, wait_s, fail_at):
        self.previous = previous
        self.label = label
        self.attention = attention
        self.foreign_calls = foreign_calls
        self.wait_s = wait_s
        self.fail_at = fail_at
        self.num_calls = 0

    def __call__(self, args, extra):
        """Run the block."""
        self.num_calls += 1
        log.info("probe %s: call %d", self.label, self.num_calls)
        time.sleep(self.wait_s)
        if self.num_calls == self.fail_at:
            raise RuntimeError(f"probe {self.label} fails on purpose")
        options = args["transformer_options"]
        if self.foreign_calls:
            self._call_foreign(options, rows=77)
        inner = args
        if self.attention == "watched":
            watch = MemoryWatch(self.label, options[OVERRIDE])
            inner = {**args, "transformer_options": {**options, OVERRIDE: watch}}
        elif self.attention != "whole":
            wrapped = AttentionProbe(self.attention, options.get(OVERRIDE))
            inner = {**args, "transformer_options": {**options, OVERRIDE: wrapped}}
        out = self.previous(inner, extra) if self.previous else extra["original_block"](inner)
        layer_idx = getattr(self.previous, "layer_idx", None)  # of Nox's patch below this one
        if layer_idx is not None and "nox_forward" in options:
            evaluation = options["nox_forward"].evaluation
            call = evaluation.calls[layer_idx]
            if call is not None:  # else that patch is of a Nox node that another one replaced
                log.info("probe %s: step %d ran %s", self.label, evaluation.step_idx, call[0])
        if self.foreign_calls:
            # as a control tower does: as many rows as the block's own call
            self._call_foreign(options, rows=args["img"].shape[0])
        return out

    def _call_foreign(self, options, rows: int) -> None:
        """Attention of somebody else inside the block; only the host's own is right for it."""
        generator = torch.Generator().manual_seed(rows)
        for num_heads in (2, 4):
            q, k, v = torch.randn(3, 1, num_heads, rows, 128, generator=generator)
            wanted = host_attention.optimized_attention(q, k, v, num_heads, skip_reshape=True)
            for wrap in (lambda x: x, host_attention.AttentionTensorContainer):
                got = host_attention.optimized_attention(
                    wrap(q),
                    wrap(k),
                    wrap(v),
                    num_heads,
                    skip_reshape=True,
                    transformer_options=options,
                )
                if not torch.equal(got, wanted):
                    raise RuntimeError(f"a foreign call with {rows} rows was not left alone")


class AttentionProbe:
    """An override below another: calls it as a memory-saving or an odd node would."""

    def __init__(self, how: str, outer):
        self.how = how
        self.outer = outer

    def __call__(self, func, q, k, v, heads, *args, transformer_options, **kwargs):
        """Plain form of ComfyUI's attention override."""
        kwargs.pop("_inside_attn_wrapper", None)
        options = {name: value for name, value in transformer_options.items() if name != OVERRIDE}
        if self.outer is not None:
            options[OVERRIDE] = self.outer

        def call(q, k, v):
            return host_attention.optimized_attention(
                q, k, v, q.shape[1], *args, transformer_options=options, **kwargs
            )

        if self.how == "head slices":
            middle = heads // 2 + 1  # unequal halves
            parts = [slice(0, middle), slice(middle, heads)]
            return torch.cat([call(q[:, s], k[:, s], v[:, s]) for s in parts], dim=-1)
        if self.how == "two batches":
            return call(*(torch.cat([x, x]) for x in (q, k, v)))[:1]
        out = call(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])
        return torch.cat([out[:, :1], out], dim=1)


class MemoryWatch:
    """An override before another: logs which of q, k and v are still held when Nox attends."""

    def __init__(self, label: str, outer):
        self.label = label
        self.outer = outer

    def container_function(self, q, k, v, *args, **kwargs):
        """Form with single-owner tensors, of which nobody else holds any."""
        held = {name: weakref.ref(x.peek()) for name, x in zip("qkv", (q, k, v), strict=True)}
        with AttendWatch(self.label, held):
            return self.outer.container_function(q, k, v, *args, **kwargs)


class AttendWatch(TorchDispatchMode):
    """Sees each operator; logs at Nox's attention."""

    def __init__(self, label: str, held: dict):
        super().__init__()
        self.label = label
        self.held = held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it."""
        if func is torch.ops.nox.tile_attention.default:
            names = [name for name, ref in self.held.items() if ref() is not None]
            log.info("probe %s: held in attention: %s", self.label, names or "nothing")
        return func(*args, **(kwargs or {}))


class TinyH3ReplaceBlocks(io.ComfyNode):
    """Puts its own patch on the blocks from one on, and drops whatever was there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Every block by default."""
        return io.Schema(
            node_id="TinyH3ReplaceBlocks",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("first_block", default=0, optional=True),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, first_block=0) -> io.NodeOutput:
        """A patched clone."""

        def original(args, extra):
            return extra["original_block"](args)

        clone = model.clone()
        for layer_idx in range(first_block, len(model.model.diffusion_model.blocks)):
            clone.set_model_patch_replace(original, "dit", "double_block", layer_idx)
        return io.NodeOutput(clone)


NODES = [TinyH3BlockProbe, TinyH3MLPProbe, TinyH3ReplaceBlocks]
