"""Bundle: the file of a Veda predictor, read strictly and written byte for byte."""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import FileError, RequestError, one_line, quote
from ..tensor_file import damaged, read_header
from .bundle_info import BundleInfo, FaultError, read_info, write_metadata

SCALE = ".__scale"  # name of an e4m3 tensor's scales, behind its own
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
NUM_FEATURES = 3  # mean, max and min of a tile's rows


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle: what it says of itself, and its tensors exactly as the file holds them."""

    info: BundleInfo
    tensors: dict[str, Tensor]


def read_bundle(path: str | Path) -> Bundle:
    """Read a bundle.

    Raises:
        FileError: The file is missing, truncated, of another kind, or wrong in any part; one
            sentence that names the file and the fault.
    """
    path = Path(path)
    header = read_header(path)
    tensors = {}
    try:
        info = read_info(path.name, header.metadata)
        wanted = _wanted_tensors(info)
        _check_names(set(header.tensors), set(wanted))
        with safe_open(path, framework="pt") as file:
            for name in wanted:
                tensor = file.get_tensor(name)
                _check_tensor(name, tensor, wanted[name])
                tensors[name] = tensor.clone()  # it is mapped to the file, and would change with it
    except FaultError as fault:
        raise FileError(f"{path.name}: {fault}.") from fault
    except (SafetensorError, OSError) as error:
        raise FileError(damaged(path, error)) from error
    except RuntimeError as error:  # torch's, where the file cannot be mapped
        raise FileError(f"{path.name} cannot be read: {one_line(str(error), 120)}.") from error
    return Bundle(info, tensors)


class _Wanted(NamedTuple):
    """What a tensor of a bundle must be."""

    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtype: torch.dtype


def _wanted_tensors(info: BundleInfo) -> dict[str, _Wanted]:
    """Every tensor that a bundle must hold; it may hold no other."""
    dtype: torch.dtype = getattr(torch, info.dtype)
    scale_shape = (info.num_heads,)
    wanted = {}
    for name, shape in weight_shapes(info).items():
        wanted[name] = _Wanted((shape,), dtype)
        if dtype == E4M3:
            shapes = (scale_shape, ()) if len(shape) == 1 else (scale_shape,)
            wanted[name + SCALE] = _Wanted(shapes, torch.float32)
    return wanted


def weight_shapes(info: BundleInfo) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of a predictor, by its name in the file."""
    heads, dim, rank = info.num_heads, info.head_dim, info.second_order_rank
    shapes: dict[str, tuple[int, ...]] = {
        "proj_q": (heads, NUM_FEATURES * dim, dim),
        "proj_k": (heads, NUM_FEATURES * dim, dim),
    }
    if rank:
        shapes |= {"so_q": (heads, dim, rank), "so_k": (heads, dim, rank)}
    if info.count_term:
        shapes["count_gain"] = (heads,)
    return {
        f"layers.{layer_idx}.{name}": shape
        for layer_idx in range(info.num_layers)
        for name, shape in shapes.items()
    }


def _check_names(names: set[str], wanted: set[str]) -> None:
    faults = ("is missing", wanted - names), ("does not belong here", names - wanted)
    for fault, found in faults:
        if found:
            others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise FaultError(f"tensor {quote(min(found))}{others} {fault}")


def _check_tensor(name: str, tensor: Tensor, wanted: _Wanted) -> None:
    if tensor.dtype != wanted.dtype:
        raise FaultError(f"tensor {name} is {_text(tensor.dtype)}, {_text(wanted.dtype)} is needed")
    if tuple(tensor.shape) not in wanted.shapes:
        shape = list(wanted.shapes[0])
        raise FaultError(f"tensor {name} has shape {list(tensor.shape)}, {shape} is needed")
    if name.endswith(SCALE):
        if not (tensor.isfinite() & (tensor > 0)).all():
            raise FaultError(f"tensor {name} holds a scale that is not a positive number")
        if not (tensor * E4M3_MAX).bfloat16().isfinite().all():
            raise FaultError(f"tensor {name} holds a scale that makes its weights infinite")
    elif not _is_finite(tensor):
        raise FaultError(f"tensor {name} holds a value that is not a number")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == E4M3:  # two codes are NaN, none is infinite
        return not bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return bool(tensor.isfinite().all())


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- writing -------------------------------------------------------------------------------------


def write_bundle(path: str | Path, bundle: Bundle) -> None:
    """Write a bundle: the same bundle gives the same bytes.

    Also those of the file that it was read from, if the safetensors library wrote that. The library
    alone orders metadata at random; here they keep the bundle's order.

    Raises:
        RequestError: What the bundle says of itself cannot be, such as a budget of 0.
    """
    metadata = _metadata_of(bundle.info)
    data = save(bundle.tensors, metadata=metadata)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = metadata
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(memoryview(data)[8 + size :])


def _metadata_of(info: BundleInfo) -> dict[str, str]:
    """Its own metadata where they say what it says, else made to."""
    for metadata in (info.metadata, write_metadata(info)):
        try:
            if read_info(info.name, metadata) == replace(info, metadata=metadata):
                return metadata
            fault = "its parts contradict each other"
        except FaultError as error:
            fault = str(error)
    raise RequestError(f"This bundle cannot be written: {fault}.")


# ---- e4m3 ----------------------------------------------------------------------------------------


def quantise(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as e4m3, with a scale per head beside each, or one alone for a vector.

    Args:
        weights: Name -> float32, heads first.
    """
    tensors = {}
    smallest = torch.finfo(torch.float32).smallest_normal
    for name, weight in weights.items():
        axes = tuple(range(1, weight.ndim)) or (0,)
        scale = (weight.abs().amax(axes) / E4M3_MAX).clamp(min=smallest)
        tensors[name] = (weight / _by_head(scale, weight)).to(E4M3)
        tensors[name + SCALE] = scale
    return tensors


def dequantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they stay in memory: bfloat16, or float32 where the file has that."""
    weights = {}
    for name, tensor in tensors.items():
        if tensor.dtype == E4M3:
            scale = tensors[name + SCALE]
            weights[name] = (tensor.float() * _by_head(scale, tensor)).bfloat16()
        elif not name.endswith(SCALE):
            weights[name] = tensor
    return weights


def _by_head(scale: Tensor, weight: Tensor) -> Tensor:
    """Scale broadcast over a weight's first axis."""
    return scale.view(-1, *(1,) * (weight.ndim - 1)) if scale.ndim else scale
