"""Ops: torch.ops.nox with schema, fake implementation, and a thin call for each."""

from types import ModuleType

import torch
from torch import Tensor

from . import kernels, reference
from .reference import TileImages

# Where a device has no kernel, the op's implementation there is its reference; what
# `capability.pick` returns says so to the user.


def _implementation(x: Tensor, dtype: torch.dtype) -> ModuleType:
    """Where heads x [H, ..., D] whose q, k and v have this dtype are computed."""
    is_served = kernels.serves(x.device, dtype, x.shape[0], x.shape[-1])
    return kernels if is_served else reference


@torch.library.custom_op("nox::pack_tiles", mutates_args=())
def _pack_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_row: Tensor,
    valid_count: Tensor,
    precision: str,
    pooling: str,
) -> list[Tensor]:
    pack = _implementation(q, q.dtype).pack_tiles
    return list(pack(q, k, v, slot_row, valid_count, precision, pooling))


@torch.library.register_fake("nox::pack_tiles")
def _(q, k, v, slot_row, valid_count, precision, pooling):
    num_heads, _, head_dim = q.shape
    num_query_tiles, num_kv_tiles = slot_row.shape[0] // 128, slot_row.shape[0] // 64
    num_pooled_tiles = slot_row.shape[0] // reference.pooled_tile(pooling)
    num_stats = reference.POOLINGS[pooling]
    shapes = TileImages(
        q=((num_query_tiles, 128, head_dim), torch.int8),
        q_scale=((num_query_tiles, 128), torch.float32),
        k=((num_kv_tiles, 64, head_dim), torch.int8),
        header=((num_kv_tiles, 8), torch.float32),
        v=((num_kv_tiles, 64, head_dim), torch.int8),
        v_channel_scale=((head_dim,), torch.float32),
        v_is_e4m3=((), torch.bool),
        k_mean=((head_dim,), torch.float32),
        q_pool=((num_query_tiles, num_stats, head_dim), torch.float32),
        k_pool=((num_pooled_tiles, num_stats, head_dim), torch.float32),
    )
    return [q.new_empty((num_heads, *shape), dtype=dtype) for shape, dtype in shapes]


def pack_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_row: Tensor,
    valid_count: Tensor,
    *,
    precision: str,
    pooling: str,
) -> TileImages:
    """Gather, rotate, quantise and pool Q, K and V; see `reference.pack_tiles`."""
    return TileImages(*_pack_tiles(q, k, v, slot_row, valid_count, precision, pooling))


@torch.library.custom_op("nox::tile_attention", mutates_args=())
def _tile_attention(
    images: list[Tensor], bits: Tensor, slot_row: Tensor, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    named = TileImages(*images)
    attend = _implementation(named.q, dtype).tile_attention
    return attend(named, bits, slot_row, num_rows, dtype)


@torch.library.register_fake("nox::tile_attention")
def _(images, bits, slot_row, num_rows, dtype):
    num_heads, _, _, head_dim = TileImages(*images).q.shape
    return (
        bits.new_empty(num_rows, num_heads, head_dim, dtype=dtype),
        bits.new_empty(num_heads, num_rows, dtype=torch.float32),
    )


def tile_attention(
    images: TileImages, bits: Tensor, slot_row: Tensor, num_rows: int, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention over the selected KV tiles; see `reference.tile_attention`.

    `dtype` is that of the q, k and v which `pack_tiles` got: it decides which implementation
    reads the images, and a kernel's images are in an order of its own.
    """
    return _tile_attention(list(images), bits, slot_row, num_rows, dtype)
