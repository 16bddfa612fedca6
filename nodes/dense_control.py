"""Nox Dense Steps and Blocks: where sparse attention stays dense."""

from comfy_api.latest import io

from ..nox_kernels.request import DENSE_KERNELS, DenseRequest, parse_blocks
from . import patch


class NoxDenseControl(io.ComfyNode):
    """Keeps chosen steps and blocks dense."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs keep their names and order for ever: saved workflows hold them."""
        return io.Schema(
            node_id="NoxDenseControl",
            display_name="Nox Dense Steps and Blocks",
            category="Nox",
            description="Which steps and blocks stay dense while Nox H3 Attention runs sparse or "
            "veda. Wire it before or after Nox H3 Attention; without it, block 0 and the first "
            "fifth of the schedule are dense, under veda the first step.",
            search_aliases=["dense steps", "warmup", "sparse window", "nox"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax-H3 model, from any loader."),
                io.Int.Input(
                    "first_steps",
                    default=-1,
                    min=-1,
                    max=50,
                    tooltip="Dense steps at the start. -1 = auto: 1 of 4 steps, 2 of 8, 4 of 20; "
                    "under veda always 1. Keep at least 1 with 8 steps or fewer.",
                ),
                io.Int.Input(
                    "last_steps", default=0, min=0, max=50, tooltip="Dense steps at the end."
                ),
                io.String.Input(
                    "blocks",
                    default="0",
                    tooltip="Blocks that are dense in every step, such as 0 or 0, 48-49. H3 has "
                    "blocks 0 to 49. Empty = none.",
                ),
                io.Float.Input(
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Sparse from this part of the schedule on; 0.2 = after the first fifth.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Sparse up to this part of the schedule; 0.9 = dense in the last tenth.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(DENSE_KERNELS),
                    default="sage",
                    tooltip="What computes the dense steps and blocks. sage: Nox in INT8. native: "
                    "ComfyUI's own attention; in mode sage it then serves these steps and blocks.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def validate_inputs(cls, blocks=None) -> bool | str:
        """Say what is wrong with the text before anything runs; by wire it is still None."""
        try:
            parse_blocks(blocks or "")
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model, blocks, **inputs) -> io.NodeOutput:
        """Return a patched clone; the model that came in stays as it is."""
        request = DenseRequest(blocks=parse_blocks(blocks), **inputs)
        return io.NodeOutput(patch.apply_dense_request(model, request))
