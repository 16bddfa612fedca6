"""Conflicts: other nodes' patches on a model beside which Nox would not run, each by its name."""

import re
from collections.abc import Iterator

from ..nox_kernels.errors import RequestError

OVERRIDE = "optimized_attention_override"
_ATTENTION_FORWARD = re.compile(r"diffusion_model\.blocks\.\d+\.attn\.forward")
_CORE_SPARSE_PATCH = "make_h3_block_patch.<locals>.block_patch"
_CORE_SPARSE_MARK = "_block_sparse_attention_patch"
# of what ComfyUI hands to a block, what Sol-Attn publishes; its hooks on the blocks do nothing
# without it, and stay there for ever
_SOL_ATTN_OPTION = "sol_compose"
_H3_OPTIMIZATIONS_PLAN = "h3_optimizations_plan"  # of its nodes on a model, in model_options
_KNOWN_FORWARDS = {
    "minimax_sageattn_forward": "MiniMax H3 Mem Eff Sage Attention Patch (KJNodes)",
}


def refuse(object_patches: dict, model_options: dict) -> None:
    """Stop where a patch computes H3's attention past ours, or makes it sparse as well.

    Args:
        object_patches: Of a ModelPatcher.
        model_options: Of the same, or of the run.

    Raises:
        RequestError: Which node it is and what to do.
    """
    for name, forward in object_patches.items():
        if _ATTENTION_FORWARD.fullmatch(name) and not _reaches_override(forward):
            raise RequestError(
                f"{_owner_of_forward(forward, model_options)} owns attention.forward on this "
                f"model; Nox would never run. Remove it."
            )
    options = model_options.get("transformer_options", {})
    blocks = block_patches(options)
    entries = [*blocks.values(), options.get(OVERRIDE)]
    if any(_is_core_sparse(patch) for entry in entries for patch in chain(entry)):
        raise _second_sparsifier("Model Sparse Attention")
    if _SOL_ATTN_OPTION in options:
        raise _second_sparsifier("Patch Sol-Attn")


def block_patches(transformer_options: dict) -> dict:
    """What replaces H3's blocks: ("double_block", index) -> patch."""
    return transformer_options.get("patches_replace", {}).get("dit", {})


def chain(patch) -> Iterator:
    """A patch and those that it calls, outermost first."""
    while patch is not None:
        yield patch
        patch = getattr(patch, "previous", None)


def owner_of(function) -> str:
    """Whose code a function or a patch is: the path behind custom_nodes, or its module."""
    module = getattr(function, "__module__", None) or "unknown"
    return re.split(r"custom_nodes[\\/]", module)[-1]


def _second_sparsifier(name: str) -> RequestError:
    return RequestError(
        f"{name} is on this model too, and only one node can decide which tiles are skipped. "
        f"Remove it, or bypass Nox H3 Attention."
    )


def _is_core_sparse(patch) -> bool:
    name = getattr(patch, "__qualname__", "")
    return name == _CORE_SPARSE_PATCH or hasattr(patch, _CORE_SPARSE_MARK)


def _reaches_override(forward) -> bool:
    """Whether a replacement of attention.forward still calls ComfyUI's optimized_attention.

    Patches that only save memory do; some say so by an attribute.
    """
    if getattr(forward, "_uses_optimized_attention", False):
        return True
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and "optimized_attention" in code.co_names


def _owner_of_forward(forward, model_options: dict) -> str:
    plan = model_options.get(_H3_OPTIMIZATIONS_PLAN)
    if hasattr(forward, "_h3_optimizations_attention"):
        is_sparse = getattr(plan, "sparse", None) is not None
        return "H3 Sparse Attention" if is_sparse else "H3 Memory Optimization"
    name = getattr(forward, "__name__", "")
    return _KNOWN_FORWARDS.get(name) or f"Another node (its code: {owner_of(forward)})"
