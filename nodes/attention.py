"""Nox H3 Attention: the mode switch."""

from comfy_api.latest import io

from ..nox_kernels.errors import RequestError
from ..nox_kernels.request import (
    MODES,
    ON_UNKNOWN_GEOMETRY,
    PRECISIONS,
    WINDOWS,
    AttentionRequest,
)
from . import h3_sequence, layout_files, patch
from .load_veda_predictor import VedaPredictorType
from .session import Session


class NoxAttention(io.ComfyNode):
    """Chooses how MiniMax-H3 computes attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs keep their names and order for ever: saved workflows hold them."""
        return io.Schema(
            node_id="NoxAttention",
            display_name="Nox H3 Attention",
            category="Nox",
            description="Makes MiniMax-H3's attention cheaper. Wire it after the model and its "
            "LoRAs, before the scheduler and the guider.",
            search_aliases=["sage", "sparse attention", "minimax", "speed", "nox"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax-H3 model, from any loader."),
                VedaPredictorType.Input(
                    "predictor",
                    optional=True,
                    lazy=True,
                    tooltip="Only for veda: from Nox Load Veda Predictor.",
                ),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="sage",
                    tooltip="sage: every tile, in INT8. sparse: only the best tiles, in INT8. "
                    "veda: the same, chosen by a trained predictor. dense: ComfyUI's own attention, as if this node were bypassed.",
                ),
                io.Int.Input(
                    "budget",
                    default=15,
                    min=1,
                    max=100,
                    step=1,
                    display_mode=io.NumberDisplay.slider,
                    display_name="kept %",
                    tooltip="Only for sparse: per cent of the video's tiles that each tile looks "
                    "at. 15 keeps 15 % and skips 85 %; 100 equals sage. Text, conditions and "
                    "audio are always kept on top. With few-step LoRAs start higher: 30 for 8 "
                    "steps, 50 for 4 (unproven; the help page has a table).",
                ),
                io.Combo.Input(
                    "layout",
                    options=layout_files.layout_names(),
                    default=WINDOWS,
                    advanced=True,
                    tooltip="Only for sparse: how video tokens are grouped into tiles. windows: "
                    "3D boxes of time, height and width (uncalibrated). raster: rows of each "
                    "frame. bands-v0: other boxes in early, middle and late blocks (unproven). "
                    "Further tables are files in models/nox_layouts.",
                ),
                io.Combo.Input(
                    "precision",
                    options=list(PRECISIONS),
                    default="accurate",
                    advanced=True,
                    tooltip="accurate: under half the error of SageAttention 2.2. faithful: "
                    "SageAttention 2.2's own arithmetic, to compare with it.",
                ),
                io.Int.Input(
                    "veda_budget",
                    default=0,
                    min=0,
                    max=100,
                    step=1,
                    display_name="veda kept %",
                    advanced=True,
                    tooltip="Only for veda: per cent of the video's tiles that each tile looks at, "
                    "as the predictor counts them, and of conditions where it tiles them. 0 = what "
                    "it was trained for; 100 equals sage.",
                ),
                io.Combo.Input(
                    "on_unknown_geometry",
                    options=list(ON_UNKNOWN_GEOMETRY),
                    default="error",
                    advanced=True,
                    tooltip="Only for veda, where the predictor does not know this canvas and "
                    "length. error: stop and say which it knows. sparse: as mode sparse, with "
                    "kept %. dense: ComfyUI's own attention.",
                ),
                io.Boolean.Input(
                    "route_references",
                    default=False,
                    advanced=True,
                    tooltip="Only for sparse: large reference pictures and videos get a kept % of "
                    "their own. Off: they are kept whole, which costs time.",
                ),
            ],
            outputs=[io.Model.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def check_lazy_status(cls, mode, **inputs) -> list[str]:
        """Only mode veda has the predictor loaded."""
        is_wanted = mode == "veda" and "predictor" in inputs and inputs["predictor"] is None
        return ["predictor"] if is_wanted else []

    @classmethod
    def execute(
        cls,
        model,
        mode,
        budget,
        layout,
        precision,
        veda_budget,
        on_unknown_geometry,
        route_references,
        predictor=None,
    ) -> io.NodeOutput:
        """Return a patched clone; the model that came in stays as it is."""
        shape = h3_sequence.model_shape(model)
        request = AttentionRequest(
            mode=mode,
            keep_ratio=budget / 100,
            layout=layout,
            precision=precision,
            veda_keep_ratio=veda_budget / 100,
            on_unknown_geometry=on_unknown_geometry,
            route_references=route_references,
        )
        if mode == "dense":
            return io.NodeOutput(patch.apply_attention(model, None))
        if mode != "veda":
            predictor = None
        elif predictor is None:
            raise RequestError(
                "Mode veda needs a predictor: wire Nox Load Veda Predictor to this node's "
                "predictor input, or choose mode sparse."
            )
        else:
            predictor.model.info.check_model(shape.num_layers, shape.num_heads, shape.head_dim)
        uses_layout = mode == "sparse" or (mode == "veda" and on_unknown_geometry == "sparse")
        table = layout_files.load_table(
            layout if uses_layout else WINDOWS, shape.num_layers, shape.num_heads
        )
        session = Session(request, table, predictor, shape, str(cls.hidden.unique_id))
        return io.NodeOutput(patch.apply_attention(model, session))
