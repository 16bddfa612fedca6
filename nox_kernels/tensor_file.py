"""Tensor file: the header of a safetensors file, read without its tensors."""

import json
import struct
from pathlib import Path
from typing import NamedTuple

from .errors import FileError

MAX_HEADER_BYTES = 1 << 27  # a real header is under 1 MB per thousand tensors


class Header(NamedTuple):
    """What a safetensors file says of itself.

    Attributes:
        tensors: Name -> {dtype, shape, data_offsets}.
        metadata: Free text by key, in the file's order.
    """

    tensors: dict[str, dict]
    metadata: dict[str, str]


def read_header(path: str | Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        FileError: The file is not safetensors, or is shorter than its header says; one sentence.
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
        raise FileError(f"{path.name} cannot be read: {error.strerror}.") from error
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise FileError(no_safetensors)
    if len(text) < header_bytes:
        raise FileError(_truncated(path, size_bytes, 8 + header_bytes))
    try:
        tensors = json.loads(text)
        metadata = tensors.pop("__metadata__", {})
        offsets = [tuple(map(int, entry["data_offsets"])) for entry in tensors.values()]
        is_valid = all(0 <= first <= last for first, last in offsets)
        is_valid &= all(isinstance(value, str) for value in metadata.values())
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise FileError(no_safetensors) from error
    if not offsets or not is_valid:
        raise FileError(no_safetensors)
    end = max(last for _, last in offsets)
    if 8 + header_bytes + end > size_bytes:
        raise FileError(_truncated(path, size_bytes, 8 + header_bytes + end))
    return Header(tensors, metadata)


def _truncated(path: Path, size_bytes: int, needed_bytes: int) -> str:
    return (
        f"{path.name} is truncated: it has {size_bytes:,} bytes, its header asks for "
        f"{needed_bytes:,} or more. Download it again."
    )
