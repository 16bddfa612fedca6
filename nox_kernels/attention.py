"""Attention: one layer on one screen."""

import torch
from torch import Tensor

from . import ops, route
from .layer_plan import HeadGroup, LayerPlan
from .reference import TileImages, pool_qk
from .route import Selection


def attend_layer(layer: LayerPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one layer as its plan says: pack -> route -> attend.

    Args:
        layer: Plan of the layer, on the tensors' device.
        q: [H, S, 128], any strides, a float dtype.
        k: The same.
        v: The same.

    Returns:
        [S, H * 128] in packed order and q's dtype.
    """
    return attend_packed(layer, pack_layer(layer, q, k, v), q.dtype)


def pack_layer(layer: LayerPlan, q: Tensor, k: Tensor, v: Tensor) -> list[TileImages]:
    """Tile images of each head group. A caller that lets go of q, k and v then has their memory.

    Args:
        layer: As in `attend_layer`.
        q: The same.
        k: The same.
        v: The same.
    """
    if len(layer.groups) == 1:
        return [_pack_group(layer.groups[0], layer.precision, q, k, v)]
    return [
        _pack_group(group, layer.precision, *(x.index_select(0, group.head_idx) for x in (q, k, v)))
        for group in layer.groups
    ]


def attend_packed(layer: LayerPlan, images: list[TileImages], dtype: torch.dtype) -> Tensor:
    """The rest of `attend_layer`.

    Args:
        layer: As in `attend_layer`.
        images: Of `pack_layer`.
        dtype: Of q, k and v.
    """
    if len(layer.groups) == 1:
        return _attend_group(layer.groups[0], images[0], dtype).flatten(1)
    head_dim = images[0].k_mean.shape[1]
    num_rows = layer.groups[0].layout.num_rows
    out = images[0].q.new_empty(num_rows, layer.num_heads, head_dim, dtype=dtype)
    for group, of_group in zip(layer.groups, images, strict=True):
        out.index_copy_(1, group.head_idx, _attend_group(group, of_group, dtype))
    return out.flatten(1)


def _pack_group(group: HeadGroup, precision: str, q: Tensor, k: Tensor, v: Tensor) -> TileImages:
    """[H, S, D] of a group's heads."""
    layout = group.layout
    return ops.pack_tiles(
        q, k, v, layout.slot_row, layout.valid_count, precision=precision, pooling=group.pooling
    )


def _attend_group(group: HeadGroup, images: TileImages, dtype: torch.dtype) -> Tensor:
    """-> [S, H, D]: route -> attend."""
    layout = group.layout
    selection = select_tiles(group, images.q_pool, images.k_pool)
    out, _ = ops.tile_attention(
        images, selection.bits, layout.slot_row, layout.num_rows, dtype=dtype
    )
    return out


def route_group(group: HeadGroup, q: Tensor, k: Tensor) -> Selection:
    """What each query tile of a group keeps, without attending.

    Args:
        group: With a rule.
        q: [h, S, D] of the group's heads.
        k: The same.
    """
    layout = group.layout
    return select_tiles(group, *pool_qk(q, k, layout.slot_row, layout.valid_count, group.pooling))


def select_tiles(group: HeadGroup, q_pool: Tensor, k_pool: Tensor) -> Selection:
    """What each query tile of a group keeps, from the pooled values of its tile images.

    Args:
        group: With or without a rule.
        q_pool: [h, Nq, P, D] float32, see `reference.TileImages`.
        k_pool: [h, Np, P, D].
    """
    if group.rule is None:
        return route.keep_all(group.layout, len(group.heads))
    if group.predictor is None:
        return route.select(q_pool[:, :, 0], k_pool[:, :, 0], group.rule)
    q_embedding, k_embedding = group.predictor.embed(
        q_pool, k_pool, group.layout.query_valid_count, group.predictor_idx
    )
    return route.select(q_embedding, k_embedding, group.rule)
