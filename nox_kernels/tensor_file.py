"""Tensor file: the header of a safetensors file, read without its tensors."""

import stat
import struct
from pathlib import Path
from typing import NamedTuple

from . import strict_json
from .errors import FileError, one_line

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
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise FileError(f"{path.name} cannot be read: it is not a file.")
        size_bytes = state.st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise FileError(f"{path.name} cannot be read: {error.strerror}.") from error
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or not text.startswith(b"{"):
        raise FileError(no_safetensors)
    if len(text) < header_bytes:
        raise FileError(_truncated(path, size_bytes, 8 + header_bytes))
    try:
        header = _parse(text)
    except ValueError as error:
        raise FileError(damaged(path, error)) from error
    end = max(entry["data_offsets"][1] for entry in header.tensors.values())
    if 8 + header_bytes + end > size_bytes:
        raise FileError(_truncated(path, size_bytes, 8 + header_bytes + end))
    return header


def _parse(text: bytes) -> Header:
    """Raises ValueError with the fault."""
    tensors = strict_json.parse(text)
    if not isinstance(tensors, dict):
        raise ValueError("it does not list tensors")
    metadata = tensors.pop("__metadata__", {})
    is_text = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_text:
        raise ValueError("its metadata are not text")
    if not all(map(_has_place, tensors.values())):
        raise ValueError("it does not say where a tensor is")
    if not tensors:
        raise ValueError("it lists no tensor")
    return Header(tensors, metadata)


def _has_place(entry: object) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2:
        return False
    first, last = offsets
    return type(first) is int and type(last) is int and 0 <= first <= last < 1 << 63


def damaged(path: Path, fault: Exception) -> str:
    """The sentence for a safetensors file that is wrong in itself."""
    reason = str(fault).removeprefix("Error while deserializing header: ").rstrip(".")
    return (
        f"{path.name} is a damaged safetensors file ({one_line(reason, 120)}). Download it again."
    )


def _truncated(path: Path, size_bytes: int, needed_bytes: int) -> str:
    return (
        f"{path.name} is truncated: it has {size_bytes:,} bytes, its header asks for "
        f"{needed_bytes:,} or more. Download it again."
    )
