"""Checkpoint: what a model file is, told from its name and header alone."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from . import strict_json
from .errors import FileError, one_line
from .tensor_file import read_header

H3 = "a MiniMax-H3 model"
LORA = "a LoRA"
UNKNOWN = "another model"
QUANT_SUFFIX = ".comfy_quant"  # of a tensor with the JSON that says how a layer is stored
QUANT_METADATA = "_quantization_metadata"  # the same of all layers at once, in older files
DEFAULT_STEPS = 20

# The first kind with a key that ends in each of its suffixes; keys may stand behind a prefix.
KINDS = (
    (LORA, (".lora_A.weight",)),
    (LORA, (".lora_A.default.weight",)),
    (LORA, (".lora_down.weight",)),
    (LORA, (".lora.down.weight",)),
    (H3, ("video_patch_proj.weight", "audio_patch_proj.weight")),
    ("a text encoder", ("embed_tokens.weight",)),
    ("an audio VAE", ("decoder.conv_pre.weight",)),
    ("an audio VAE", ("dec_in_proj.weight",)),
    ("a video VAE", ("decoder.x_embedder.weight",)),
    ("a VAE", ("encoder.conv_in.weight", "decoder.conv_in.weight")),
    ("a preview VAE", ("encoder.0.weight", "decoder.1.weight")),
)


def kind_of(tensors: Iterable[str]) -> str:
    """What tensors of these names are, with its article: "a MiniMax-H3 model", "a LoRA", ..."""
    for kind, suffixes in KINDS:
        if all(any(name.endswith(suffix) for name in tensors) for suffix in suffixes):
            return kind
    return UNKNOWN


def is_safetensors(path: str | Path) -> bool:
    """Whether a file's name says that it is one."""
    return Path(path).suffix.lower() in (".safetensors", ".sft")


def check(path: str | Path, wanted: str) -> None:
    """Refuse a file that is not `wanted`, `H3` or `LORA`, or not whole.

    Files of other formats than safetensors (GGUF, .pt) are left to their loader, and so are
    LoRAs of a kind that is not in `KINDS`: there are many.

    Raises:
        FileError: One sentence.
    """
    path = Path(path)
    if not is_safetensors(path):
        return
    kind = kind_of(read_header(path).tensors)
    if kind != wanted and (kind, wanted) != (UNKNOWN, LORA):
        raise FileError(f"{path.name} is {kind}, but {wanted} is needed here. Choose another file.")


def quant_formats(path: str | Path) -> set[str]:
    """How the quantised layers of a safetensors file are stored, in ComfyUI's words.

    Such as "float8_e4m3fn", "nvfp4" or "int8_tensorwise"; empty where no layer says so.

    Raises:
        FileError: A layer's description is no description; one sentence.
    """
    path = Path(path)
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            texts = [
                file.get_tensor(name).numpy().tobytes()
                for name in header.tensors
                if name.endswith(QUANT_SUFFIX)
            ]
        layers: list[Any] = [strict_json.parse(text) for text in texts]
        if QUANT_METADATA in header.metadata:
            described: Any = strict_json.parse(header.metadata[QUANT_METADATA])
            layers += described["layers"].values()
        return {layer["format"] for layer in layers}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path.name} does not say how its layers are stored ({one_line(str(error), 120)}). "
            f"Download it again."
        ) from error


def h3_tensors(path: str | Path) -> set[str]:
    """Names of the tensors in a MiniMax-H3 safetensors file, without their prefix."""
    names = read_header(path).tensors
    anchor = "video_patch_proj.weight"
    prefix = next(name for name in names if name.endswith(anchor)).removesuffix(anchor)
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def steps_of(lora_name: str) -> int:
    """Steps that a LoRA was made for, read from its file's name: "..._turbo_8step_..." is 8."""
    name, _ = os.path.splitext(os.path.basename(lora_name.replace("\\", "/")).lower())
    # "8step", "8_steps" or "steps8"; not "epoch8_step2000" nor "step_4000"
    before = r"(?<![\d.])([48])[-_ ]?steps?(?![a-z]|[-_ ]?\d{2,})"
    after = r"(?<![a-z])steps?[-_ ]?([48])(?![\d.k])"
    match = re.search(f"{before}|{after}", name)
    return int(match[1] or match[2]) if match else DEFAULT_STEPS
