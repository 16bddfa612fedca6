"""Checkpoint: what a model file is, told from its name and header alone."""

import json
import os
import re
import struct
from pathlib import Path

MAX_HEADER_BYTES = 1 << 27  # a real header is under 1 MB per thousand tensors

H3 = "a MiniMax-H3 model"
LORA = "a LoRA"
UNKNOWN = "another model"
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


def read_header(path: str | Path) -> dict:
    """The tensors of a safetensors file: name -> {dtype, shape, data_offsets}.

    Raises:
        ValueError: The file is not safetensors, or is shorter than its header says; one sentence.
    """
    path = Path(path)
    no_safetensors = f"{path.name} is not a safetensors file. Download it again."
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}.") from error
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise ValueError(no_safetensors)
    if len(text) < header_bytes:
        raise ValueError(_truncated(path, size_bytes, 8 + header_bytes))
    try:
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        offsets = [tuple(map(int, entry["data_offsets"])) for entry in tensors.values()]
        is_valid = all(0 <= first <= last for first, last in offsets)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ValueError(no_safetensors) from error
    if not offsets or not is_valid:
        raise ValueError(no_safetensors)
    end = max(last for _, last in offsets)
    if 8 + header_bytes + end > size_bytes:
        raise ValueError(_truncated(path, size_bytes, 8 + header_bytes + end))
    return tensors


def _truncated(path: Path, size_bytes: int, needed_bytes: int) -> str:
    return (
        f"{path.name} is truncated: it has {size_bytes:,} bytes, its header asks for "
        f"{needed_bytes:,} or more. Download it again."
    )


def kind_of(tensors: dict) -> str:
    """What a header describes, with its article: "a MiniMax-H3 model", "a LoRA", ..."""
    for kind, suffixes in KINDS:
        if all(any(name.endswith(suffix) for name in tensors) for suffix in suffixes):
            return kind
    return UNKNOWN


def check(path: str | Path, wanted: str) -> None:
    """Refuse a file that is not `wanted`, `H3` or `LORA`, or not whole.

    Files of other formats than safetensors (GGUF, .pt) are left to their loader, and so are
    LoRAs of a kind that is not in `KINDS`: there are many.

    Raises:
        ValueError: One sentence.
    """
    path = Path(path)
    if path.suffix.lower() not in (".safetensors", ".sft"):
        return
    kind = kind_of(read_header(path))
    if kind != wanted and (kind, wanted) != (UNKNOWN, LORA):
        raise ValueError(
            f"{path.name} is {kind}, but {wanted} is needed here. Choose another file."
        )


def steps_of(lora_name: str) -> int:
    """Steps that a LoRA was made for, read from its file's name: "..._turbo_8step_..." is 8."""
    name, _ = os.path.splitext(os.path.basename(lora_name.replace("\\", "/")).lower())
    # "8step", "8_steps" or "steps8"; not "epoch8_step2000" nor "step_4000"
    before = r"(?<![\d.])([48])[-_ ]?steps?(?![a-z]|[-_ ]?\d{2,})"
    after = r"(?<![a-z])steps?[-_ ]?([48])(?![\d.k])"
    match = re.search(f"{before}|{after}", name)
    return int(match[1] or match[2]) if match else DEFAULT_STEPS
