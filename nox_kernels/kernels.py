"""Kernels: the CUDA side of Nox's ops - their parameters, their outputs and workspaces, their launches."""

import ctypes
import functools

import torch
from torch import Tensor

from . import driver
from .errors import SequenceError
from .reference import POOLINGS, TileImages, pool_qk, pooled_tile

UNITS = ("pack", "attend_sm90")
COMPUTE_CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEADS = 64  # a kernel keeps the heads it serves in one 64-bit word

HEAD_DIM = 128
QUERY_TILE = 128
SAMPLE_CHUNKS = 16  # params.h
AMAX_CHUNKS = 32
HEADER_FIELDS = 8
ATTEND_SHARED_BYTES = 2 * 16384 + 4 * 2 * 16384 + 4 * 2 * 32 + 2 * 128 * 4 + 256  # AttendShared
ATTEND_THREADS = 384
PACK_THREADS = 256
# 1 / sqrt(D) * log2(e), every factor and the product rounded to float32
LOG2_SCALE = float(torch.tensor(HEAD_DIM**-0.5) * torch.tensor(1.44269504))

_pointer = ctypes.c_void_p


class PackParams(ctypes.Structure):
    """`nox::PackParams` of params.h."""

    _fields_ = (
        *((name, _pointer) for name in ("q", "k", "v", "slot_row", "valid_count", "k_smooth_mean")),
        *((name, _pointer) for name in ("q_image", "q_scale", "k_image", "header", "v_image")),
        *((name, _pointer) for name in ("v_channel_scale", "v_is_e4m3", "k_mean")),
        *((name, _pointer) for name in ("q_pool", "k_pool")),
        *((name, _pointer) for name in ("sample", "k_mean_rotated", "v_power", "v_amax")),
        *((f"{x}_{axis}_stride", ctypes.c_longlong) for x in "qkv" for axis in ("head", "row")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "num_query_tiles")),
        *((name, ctypes.c_int) for name in ("num_stats", "is_aligned", "is_faithful")),
    )


class AttendParams(ctypes.Structure):
    """`nox::AttendParams` of params.h."""

    _fields_ = (
        *((name, _pointer) for name in ("q", "q_scale", "k", "v", "header", "v_channel_scale")),
        *((name, _pointer) for name in ("v_is_e4m3", "selection", "slot_row", "out", "lse")),
        ("next_item", _pointer),
        ("num_rows", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("num_heads", "num_query_tiles", "num_words")),
        ("out_dtype", ctypes.c_int),
        ("log2_scale", ctypes.c_float),
    )


def serves(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> bool:
    """These kernels compute q, k and v of this kind on this device."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype in DTYPES
        and num_heads <= MAX_HEADS
        and head_dim == HEAD_DIM
        and torch.cuda.get_device_capability(device) == COMPUTE_CAPABILITY
    )


def _dtype_suffix(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "f16"


def _launch(unit: str, name: str, params: ctypes.Structure, device, grid, block, shared_bytes=0):
    driver.kernel(unit, name, device).launch(
        params, grid=grid, block=block, shared_bytes=shared_bytes
    )


def _is_aligned(x: Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0


def pack_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_row: Tensor,
    valid_count: Tensor,
    precision: str,
    pooling: str,
    *,
    smooth_k: bool = True,
) -> TileImages:
    """Gather, centre, rotate, quantise and pool Q, K and V on the GPU; see `reference.pack_tiles`.

    The images hold the same values as the reference's, but for roundings at a tie, in the byte
    order of `images.to_kernel_order`.

    Args:
        q: [H, S, 128] bfloat16 or float16, any strides; H is at most 64.
        k: The same.
        v: The same.
        slot_row: [num_slots] int32.
        valid_count: [Nk] int32.
        precision: "accurate" or "faithful".
        pooling: See `reference.POOLINGS`.
        smooth_k: Take the mean from K, as SageAttention 2.2 does by itself; only for `faithful`.

    Raises:
        SequenceError: More heads than the kernel takes.
    """
    num_heads, num_rows, _ = q.shape
    if num_heads > MAX_HEADS:
        raise SequenceError(
            f"Nox's kernel takes {MAX_HEADS} heads a call at most, got {num_heads}."
        )
    device, dtype = q.device, q.dtype
    num_query_tiles = slot_row.shape[0] // QUERY_TILE
    num_kv_tiles = 2 * num_query_tiles
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_heads, *shape, dtype=dtype, device=device)

    is_faithful = precision == "faithful"
    in_kernel = pooling in ("none", "mean", "extremes")
    num_stats = POOLINGS[pooling] if in_kernel else 0
    num_pooled = slot_row.shape[0] // pooled_tile(pooling)
    images = TileImages(
        q=empty(num_query_tiles, QUERY_TILE, HEAD_DIM, dtype=torch.int8),
        q_scale=empty(num_query_tiles, QUERY_TILE),
        k=empty(num_kv_tiles, 64, HEAD_DIM, dtype=torch.int8),
        header=empty(num_kv_tiles, HEADER_FIELDS),
        v=empty(num_kv_tiles, 64, HEAD_DIM, dtype=torch.int8),
        v_channel_scale=empty(HEAD_DIM),
        v_is_e4m3=empty(dtype=torch.bool),
        k_mean=empty(HEAD_DIM),
        q_pool=empty(num_query_tiles, num_stats, HEAD_DIM),
        k_pool=empty(num_pooled, num_stats, HEAD_DIM),
    )
    smooth_mean = None
    if is_faithful:
        smooth_mean = k.mean(dim=1) if smooth_k else torch.zeros_like(k[:, 0])
        images.k_mean.copy_(smooth_mean)
    workspace = (
        empty(SAMPLE_CHUNKS, 2, HEAD_DIM),
        empty(HEAD_DIM),
        empty(num_query_tiles),
        empty(AMAX_CHUNKS, HEAD_DIM),
    )
    params = PackParams(
        *(x.data_ptr() for x in (q, k, v, slot_row, valid_count)),
        smooth_mean.data_ptr() if smooth_mean is not None and smooth_k else None,
        *(x.data_ptr() for x in images),
        *(x.data_ptr() for x in workspace),
        *(x.stride(axis) for x in (q, k, v) for axis in (0, 1)),
        num_rows,
        num_heads,
        num_query_tiles,
        num_stats,
        all(map(_is_aligned, (q, k, v))),
        is_faithful,
    )
    suffix = _dtype_suffix(dtype)
    if is_faithful:
        grid = (num_heads, num_query_tiles, 2)
        _launch("pack", f"nox_pack_faithful_{suffix}", params, device, grid, PACK_THREADS)
    else:
        grid = (num_heads, SAMPLE_CHUNKS, 1)
        _launch("pack", f"nox_sample_{suffix}", params, device, grid, PACK_THREADS)
        _launch("pack", "nox_finish_sample", params, device, (num_heads, 1, 1), HEAD_DIM)
        grid = (num_heads, num_query_tiles, 3)
        _launch("pack", f"nox_pack_{suffix}", params, device, grid, PACK_THREADS)
    grid = (num_heads, AMAX_CHUNKS, 1)
    _launch("pack", f"nox_flag_values_{suffix}", params, device, grid, PACK_THREADS)
    _launch("pack", f"nox_pack_e4m3_{suffix}", params, device, grid, PACK_THREADS)
    if not in_kernel:
        q_pool, k_pool = pool_qk(q, k, slot_row, valid_count, pooling)
        images = images._replace(q_pool=q_pool, k_pool=k_pool)
    return images


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_attention(
    images: TileImages, bits: Tensor, slot_row: Tensor, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention over the selected KV tiles on the GPU; see `reference.tile_attention`.

    Heads with INT8 values and heads with e4m3 values have a kernel each, which finds its heads by
    their flags on the GPU; without one it ends at once.

    Args:
        images: From `pack_tiles`.
        bits: [H, Nq, ceil(Nk / 32)] int32.
        slot_row: [num_slots] int32.
        num_rows: S.
        dtype: Of the result, bfloat16 or float16.

    Returns:
        [S, H, D] in packed order, and [H, S] float32, the log-sum-exp of each row.
    """
    num_heads, num_query_tiles = images.q.shape[:2]
    device = images.q.device
    out = torch.empty(num_rows, num_heads, HEAD_DIM, dtype=dtype, device=device)
    lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=device)
    next_item = torch.zeros(2, dtype=torch.int32, device=device)
    bits = bits.contiguous()
    params = AttendParams(
        *(x.data_ptr() for x in (images.q, images.q_scale, images.k, images.v, images.header)),
        *(x.data_ptr() for x in (images.v_channel_scale, images.v_is_e4m3, bits, slot_row)),
        out.data_ptr(),
        lse.data_ptr(),
        next_item.data_ptr(),
        num_rows,
        num_heads,
        num_query_tiles,
        bits.shape[2],
        DTYPES.index(dtype),
        LOG2_SCALE,
    )
    grid = (min(_num_multiprocessors(device), num_heads * num_query_tiles), 1, 1)
    for kind, name in enumerate(("nox_attend_int8", "nox_attend_e4m3")):
        params.next_item = next_item.data_ptr() + 4 * kind
        _launch("attend_sm90", name, params, device, grid, ATTEND_THREADS, ATTEND_SHARED_BYTES)
    return out, lse
