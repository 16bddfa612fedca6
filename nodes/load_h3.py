"""Nox Load MiniMax-H3: the diffusion model, its few-step LoRA, and how many steps that takes."""

import logging
import os
from functools import partial

import comfy.quant_ops
import comfy.sd
import comfy.utils
import comfyui_version
import folder_paths
import torch
from comfy_api.latest import io

from ..nox_kernels import checkpoint
from ..nox_kernels.errors import FileError
from . import patch, status

log = logging.getLogger("nox")

NO_LORA = "none"
WEIGHT_DTYPES = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}


class NoxLoadH3(io.ComfyNode):
    """Loads MiniMax-H3 and, if wanted, a few-step LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs keep their names and order for ever: saved workflows hold them."""
        return io.Schema(
            node_id="NoxLoadH3",
            display_name="Nox Load MiniMax-H3",
            category="Nox",
            description="Loads a MiniMax-H3 diffusion model and a few-step LoRA, and gives the "
            "number of steps to the scheduler. Every other Nox node works with any loader.",
            search_aliases=["load diffusion model", "unet loader", "minimax", "lora", "nox"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    display_name="model",
                    tooltip="A MiniMax-H3 file in models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    advanced=True,
                    tooltip="Leave default: quantised files know their own types.",
                ),
                io.Combo.Input(
                    "lora_name",
                    options=[NO_LORA, *folder_paths.get_filename_list("loras")],
                    default=NO_LORA,
                    display_name="few-step LoRA",
                    tooltip="A turbo LoRA in models/loras; with none, 20 steps.",
                ),
                io.Float.Input(
                    "lora_strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.01,
                    tooltip="Strength of the LoRA; 0 leaves it out.",
                ),
            ],
            outputs=[
                io.Model.Output(),
                io.Int.Output(
                    "steps",
                    tooltip="4 or 8 as the LoRA's name says, else 20; wire it to the scheduler.",
                ),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, unet_name, weight_dtype, lora_name, lora_strength) -> io.NodeOutput:
        """Check the files' headers first, then load as ComfyUI's own nodes do."""
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        checkpoint.check(path, checkpoint.H3)
        if checkpoint.is_safetensors(path):
            _refuse_unknown_formats(unet_name, path)
        check_task = partial(_refuse_wrong_task, unet_name)
        check_task(_uses_references(cls.hidden.prompt or {}))
        use_lora = lora_name != NO_LORA and lora_strength != 0
        if use_lora:
            lora_path = folder_paths.get_full_path_or_raise("loras", lora_name)
            checkpoint.check(lora_path, checkpoint.LORA)
        model = comfy.sd.load_diffusion_model(path, model_options=dict(WEIGHT_DTYPES[weight_dtype]))
        if checkpoint.is_safetensors(path):
            _compare(cls.hidden.unique_id, unet_name, path, model.model.diffusion_model)
        if use_lora:
            lora, metadata = comfy.utils.load_torch_file(
                lora_path, safe_load=True, return_metadata=True
            )
            model, _ = comfy.sd.load_lora_for_models(
                model, None, lora, lora_strength, 0, lora_metadata=metadata
            )
            if not model.patches:
                raise FileError(
                    f"{lora_name} changes nothing in {unet_name}: none of its tensors belongs to "
                    f"MiniMax-H3. Choose a LoRA made for MiniMax-H3, or none."
                )
        # again at the start of a run: this node may be cached while the graph around it changes
        model = patch.check_at_start(model, check_task)
        return io.NodeOutput(
            model, checkpoint.steps_of(lora_name) if use_lora else checkpoint.DEFAULT_STEPS
        )


def _refuse_unknown_formats(unet_name: str, path: str) -> None:
    """ComfyUI itself would stop with a KeyError, after reading the whole file."""
    known = comfy.quant_ops.QUANT_ALGOS
    unknown = sorted(checkpoint.quant_formats(path) - known.keys())
    if unknown:
        raise FileError(
            f"{unet_name} is stored as {', '.join(unknown)}, which ComfyUI "
            f"{comfyui_version.__version__} cannot read; it reads {', '.join(known)}. Update "
            f"ComfyUI, or choose a file of one of these."
        )


def _compare(node_id: str, unet_name: str, path: str, model: torch.nn.Module) -> None:
    """Say where a file and the model that ComfyUI made of it differ; it loads such a file silently.

    Raises:
        FileError: The file lacks weights, which would be whatever memory held.
    """
    tensors = checkpoint.h3_tensors(path)
    missing = [name for name, _ in model.named_parameters() if name not in tensors]
    if missing:
        raise FileError(
            f"{unet_name} is incomplete: it lacks {len(missing)} of MiniMax-H3's tensors, such as "
            f"{missing[0]}. Download it again, or choose another file."
        )
    known = {name for name, _ in model.named_modules()} | model.state_dict().keys()
    owners = {name.rpartition(".")[0] or name for name in tensors}
    if unknown := sorted({owner.rpartition(".")[2] for owner in owners - known}):
        more = ", ..." if len(unknown) > 3 else ""
        log.warning(
            "Nox: %s has parts that ComfyUI %s does not know (%s%s): it was made for a newer "
            "ComfyUI. They are left out, so the clip may differ. Update ComfyUI.",
            unet_name,
            comfyui_version.__version__,
            ", ".join(unknown[:3]),
            more,
        )
        status.show(node_id, "Made for a newer ComfyUI:\nsee the log.")


def _uses_references(prompt: dict) -> bool | None:
    """Whether a graph conditions on references; None where it does both, or neither."""
    classes = {node.get("class_type") for node in prompt.values()}
    by_references = "MiniMaxH3ReferenceToVideo" in classes
    return by_references if by_references != ("MiniMaxH3ImageToVideo" in classes) else None


def _refuse_wrong_task(unet_name: str, uses_references: bool | None) -> None:
    """The two released models differ by their file name only, and each is useless for the other's."""
    name = os.path.basename(unet_name.replace("\\", "/")).lower()
    if "ref2v" in name and uses_references is False:
        raise FileError(
            f"{unet_name} is the reference-to-video model, but this graph makes video from text or "
            f"keyframes. Choose the fl2va file, or load it with Load Diffusion Model to try anyway."
        )
    if "fl2v" in name and uses_references is True:
        raise FileError(
            f"{unet_name} is the text- and keyframe-to-video model, but this graph uses references. "
            f"Choose the ref2va file, or load it with Load Diffusion Model to try anyway."
        )
