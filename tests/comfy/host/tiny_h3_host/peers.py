"""Peers: test-only nodes that put onto H3 what other packs put there, under the same names."""

from comfy.ldm.minimax.model import Attention
from comfy.ldm.modules import attention as host_attention
from comfy_api.latest import io

OVERRIDE = "optimized_attention_override"
KINDS = ["attention of its own", "memory only", "says so", "H3-Optimizations", "KJNodes sage"]


class TinyH3OwnForward(io.ComfyNode):
    """Owns attention.forward of every block, as packs that save memory or skip tiles do."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What its code calls decides whether Nox can run."""
        return io.Schema(
            node_id="TinyH3OwnForward",
            category="testing",
            inputs=[io.Model.Input("model"), io.Combo.Input("kind", options=KINDS)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, kind) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()
        for layer_idx, block in enumerate(model.model.diffusion_model.blocks):
            forward = _make_forward(block.attn, kind)
            clone.add_object_patch(f"diffusion_model.blocks.{layer_idx}.attn.forward", forward)
        return io.NodeOutput(clone)


def _make_forward(attention, kind: str):
    def dense(x, rope_freqs=None, transformer_options=None):
        # the host's own attention, without what the options hold
        return Attention.forward(attention, x, rope_freqs, {})

    def memory_only(x, rope_freqs=None, transformer_options=None):
        q, k, v = attention.qkv_proj(x).view(x.shape[0], 3, attention.heads, -1).unbind(1)
        q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = host_attention.optimized_attention(
            q, k, v, attention.heads, skip_reshape=True, transformer_options=transformer_options
        )
        return attention.out_proj(out[0])

    def says_so(x, **kwargs):
        return memory_only(x, **kwargs)

    def minimax_sageattn_forward(x, **kwargs):
        return dense(x, **kwargs)

    if kind == "H3-Optimizations":
        dense._h3_optimizations_attention = True
    says_so._uses_optimized_attention = True
    kinds = {
        "memory only": memory_only,
        "says so": says_so,
        "KJNodes sage": minimax_sageattn_forward,
    }
    return kinds.get(kind, dense)


class TinyH3OtherSparse(io.ComfyNode):
    """Leaves on the model what Model Sparse Attention or Patch Sol-Attn leaves there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Both attend as the host does: none of them may come as far as that."""
        return io.Schema(
            node_id="TinyH3OtherSparse",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("kind", options=["core", "newer core", "sol"]),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, kind) -> io.NodeOutput:
        """A patched clone."""
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        if kind == "sol":
            options["sol_compose"] = {"min_tokens": 4096}
            options[OVERRIDE] = lambda func, *args, **kwargs: func(*args, **kwargs)
            return io.NodeOutput(clone)
        blocks = options.get("patches_replace", {}).get("dit", {})
        for layer_idx in range(len(model.model.diffusion_model.blocks)):
            patch = make_h3_block_patch()
            if kind == "newer core":  # it chains, and marks what it is
                patch = _Marked(blocks.get(("double_block", layer_idx)))
            clone.set_model_patch_replace(patch, "dit", "double_block", layer_idx)
        return io.NodeOutput(clone)


def make_h3_block_patch():
    """Under the name of core's."""

    def block_patch(args, extra):
        return extra["original_block"](args)

    return block_patch


class _Marked:
    _block_sparse_attention_patch = True

    def __init__(self, previous):
        self.previous = previous

    def __call__(self, args, extra):
        return (self.previous or (lambda a, e: e["original_block"](a)))(args, extra)


NODES = [TinyH3OwnForward, TinyH3OtherSparse]
