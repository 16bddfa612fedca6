"""Newer core: a test-only node that hands on what ComfyUI does after 0.33, and what it may later."""

import logging

from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

OVERRIDE = "optimized_attention_override"
log = logging.getLogger("tiny_h3_probe")


class TinyH3NewerCore(io.ComfyNode):
    """Wraps the block loop; Nox's patches must stand on the model already."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """`declined` calls attention with a mask, which Nox leaves to the host."""
        return io.Schema(
            node_id="TinyH3NewerCore",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.Boolean.Input("declined", default=False),
                io.Boolean.Input("own_attention", default=False),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, declined, own_attention) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()
        kind = clone.wrappers[WrappersMP.DIFFUSION_MODEL]
        # around what is there, and inside of it
        clone.wrappers[WrappersMP.DIFFUSION_MODEL] = {"out": [_add], **kind, "in": [_take]}
        blocks = clone.model_options["transformer_options"]["patches_replace"]["dit"]
        for name, previous in list(blocks.items()):
            block = model.model.diffusion_model.blocks[name[1]]
            patch = NewerBlock(block, name[1], previous, declined, own_attention)
            clone.set_model_patch_replace(patch, "dit", *name)
        return io.NodeOutput(clone)


def _add(executor, *args, **kwargs):
    return executor(*args, added_later="to the model", **kwargs)


def _take(executor, *args, added_later, **kwargs):
    log.info("probe newer: %s", added_later)
    return executor(*args, **kwargs)


class NewerBlock:
    """One turn of the loop."""

    def __init__(self, block, block_index, previous, declined, own_attention):
        self.block = block
        self.block_index = block_index
        self.previous = previous
        self.declined = declined
        self.own_attention = own_attention

    def __call__(self, args, extra):
        """The layout comes by the arguments alone, as if nothing of the payload were known."""
        options = {**args["transformer_options"], "block_index": self.block_index}
        forward = options["nox_forward"]
        layout, forward.host_layout = forward.host_layout or forward._layout, None
        options["minimax_h3_layout"] = layout
        options["tiny_h3_declined"] = self.declined
        newer = {**args, "layout": layout, "transformer_options": options, "added_later": "block"}
        if self.own_attention:
            newer["attention"] = self.block.attn.forward
        return self.previous(newer, {"original_block": self._run, "added_later": "extra"})

    def _run(self, args):
        log.info("probe newer: %s, attention %s", args["added_later"], "attention" in args)
        options = dict(args["transformer_options"])
        inner = options.get(OVERRIDE)
        if "attention" in args:  # a replacement that is not asked through the override
            options.pop(OVERRIDE, None)
        elif inner is not None:
            options[OVERRIDE] = NewerCall(inner, options["tiny_h3_declined"])
        out = self.block(
            args["img"],
            args["t_emb"],
            args["mod_segments"],
            args["rope_freqs"],
            transformer_options=options,
        )
        return {"img": out}


class NewerCall:
    """Calls an override with arguments that 0.33 has not."""

    def __init__(self, inner, declined):
        self.inner = inner
        self.declined = declined

    def container_function(self, q, k, v, heads, **kwargs):
        """Form with single-owner tensors."""
        if self.declined:
            rows = q.peek().shape[2]
            kwargs["mask"] = q.peek().new_zeros(rows, rows)
        return self.inner.container_function(
            q, k, v, heads, preferred_attention=None, added_later="call", **kwargs
        )


NODES = [TinyH3NewerCore]
