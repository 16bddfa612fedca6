"""Nox Load Veda Predictor: a trained scorer of tiles, for mode veda."""

import os

import comfy.model_management
import comfy.model_patcher
import folder_paths
from comfy_api.latest import io

from ..nox_kernels.veda.bundle import read_bundle
from ..nox_kernels.veda.predictor import VedaPredictor
from . import status
from .model_folders import PREDICTORS

VedaPredictorType = io.Custom("NOX_VEDA_PREDICTOR")


class NoxLoadVedaPredictor(io.ComfyNode):
    """Loads a Veda predictor."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs keep their names and order for ever: saved workflows hold them."""
        return io.Schema(
            node_id="NoxLoadVedaPredictor",
            display_name="Nox Load Veda Predictor",
            category="Nox",
            description="Loads a Veda predictor, which says what parts of the video each part "
            "must look at. Wire it to Nox H3 Attention and choose mode veda there.",
            search_aliases=["veda", "sparse attention", "predictor", "minimax", "nox"],
            inputs=[
                io.Combo.Input(
                    "predictor_name",
                    options=folder_paths.get_filename_list(PREDICTORS),
                    display_name="predictor",
                    tooltip="A predictor in models/veda_predictors, made for your MiniMax-H3.",
                ),
            ],
            outputs=[VedaPredictorType.Output("predictor")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, predictor_name) -> tuple[int, int]:
        """A file that was replaced under its name is another predictor."""
        if predictor_name is None:  # it comes by wire, and ComfyUI asks before that has a value
            return 0, 0
        state = os.stat(folder_paths.get_full_path_or_raise(PREDICTORS, predictor_name))
        return state.st_mtime_ns, state.st_size

    @classmethod
    def execute(cls, predictor_name) -> io.NodeOutput:
        """Read the file strictly; ComfyUI moves the weights together with the model's."""
        bundle = read_bundle(folder_paths.get_full_path_or_raise(PREDICTORS, predictor_name))
        # A plain module: weights of ComfyUI's own would share a cast buffer with the model's.
        patcher = comfy.model_patcher.CoreModelPatcher(
            VedaPredictor.from_bundle(bundle),
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
        status.describe_predictor(str(cls.hidden.unique_id), bundle.info)
        return io.NodeOutput(patcher)
