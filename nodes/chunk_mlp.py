"""Nox Chunk MLP: the MLP of each block some rows at a time, for less peak memory."""

import logging

import torch
from comfy_api.latest import io

from ..nox_kernels.row_chunks import in_row_chunks
from . import h3_sequence

log = logging.getLogger("nox")


class NoxChunkMLP(io.ComfyNode):
    """Patches a clone of the model; the weights and the results stay as they are."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs keep their names and order for ever: saved workflows hold them."""
        return io.Schema(
            node_id="NoxChunkMLP",
            display_name="Nox Chunk MLP",
            category="Nox",
            description="For long or large clips on small GPUs: computes the MLP of each block some "
            "rows at a time. Less peak memory, the same clip.",
            search_aliases=["low vram", "memory", "feed forward", "chunk", "nox"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax-H3 model from any loader."),
                io.Int.Input(
                    "rows",
                    default=4096,
                    min=256,
                    max=1 << 20,
                    step=256,
                    tooltip="At most so many rows at a time; fewer take less memory. A clip has "
                    "38,000 to 200,000. Below 2048 it gets slower.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, rows) -> io.NodeOutput:
        """Wrap what each block's MLP is at this point of the chain, other nodes' patches included."""
        clone = model.clone()
        num_whole = 0
        for layer_idx in range(h3_sequence.model_shape(model).num_layers):
            name = f"diffusion_model.blocks.{layer_idx}.mlp"
            if _mixes_rows(clone.get_model_object(name)):
                num_whole += 1
                continue
            forward = clone.get_model_object(f"{name}.forward")
            clone.add_object_patch(f"{name}.forward", ChunkedForward(forward, rows))
        if num_whole:
            log.warning(
                "Nox Chunk MLP leaves %d blocks whole: this nvfp4 file has no input scales, so "
                "ComfyUI takes one from all rows, and chunks would change the clip. Files stored "
                "as bf16, fp8_scaled or int8_convrot can be chunked.",
                num_whole,
            )
        return io.NodeOutput(clone)


class ChunkedForward:
    """What stands in for `mlp.forward`: the same, some rows at a time."""

    def __init__(self, forward, max_rows: int):
        self.forward = forward
        self.max_rows = max_rows

    def __call__(self, x, *args, **kwargs):
        """[S, C] -> [S, C]; a newer ComfyUI's further arguments go through."""
        return in_row_chunks(lambda rows: self.forward(rows, *args, **kwargs), x, self.max_rows)


def _mixes_rows(mlp: torch.nn.Module) -> bool:
    """Whether a row's result depends on other rows, by a scale that quantisation takes from all."""
    return any(
        getattr(layer, "quant_format", None) == "nvfp4"
        and getattr(layer, "input_scale", None) is None
        for layer in mlp.modules()
    )
