"""Ops: torch.ops.nox with schema, fake implementation, and a thin call for each."""

import torch
from torch import Tensor

from . import reference
from .reference import TileImages

# Until a kernel exists for a device, the op's implementation there is its reference; what
# `capability.pick` returns says so to the user.


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
    return list(reference.pack_tiles(q, k, v, slot_row, valid_count, precision, pooling))


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
        k_scale=((num_kv_tiles, 4), torch.float32),
        v=((num_kv_tiles, 64, head_dim), torch.int8),
        v_tile_scale=((num_kv_tiles,), torch.float32),
        v_channel_scale=((head_dim,), torch.float32),
        v_is_e4m3=((), torch.bool),
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
    images: list[Tensor], bits: Tensor, valid_count: Tensor, row_slot: Tensor, dtype: torch.dtype
) -> Tensor:
    return reference.tile_attention(TileImages(*images), bits, valid_count, row_slot, dtype)


@torch.library.register_fake("nox::tile_attention")
def _(images, bits, valid_count, row_slot, dtype):
    q = TileImages(*images).q
    return q.new_empty(row_slot.shape[0], q.shape[0], q.shape[3], dtype=dtype)


def tile_attention(
    images: TileImages, bits: Tensor, valid_count: Tensor, row_slot: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Attention over the selected KV tiles; see `reference.tile_attention`."""
    return _tile_attention(list(images), bits, valid_count, row_slot, dtype)
