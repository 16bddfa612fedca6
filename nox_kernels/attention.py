"""Attention: one layer on one screen."""

from torch import Tensor

from . import ops, route
from .layer_plan import HeadGroup, LayerPlan
from .reference import pool_qk
from .route import Selection


def attend_layer(layer: LayerPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one layer as its plan says.

    Args:
        layer: Plan of the layer, on the tensors' device.
        q: [H, S, 128], any strides, a float dtype.
        k: The same.
        v: The same.

    Returns:
        [S, H * 128] in packed order and q's dtype.
    """
    if len(layer.groups) == 1:
        return _attend_group(layer.groups[0], layer.precision, q, k, v).flatten(1)
    out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    for group in layer.groups:
        mine = (x.index_select(0, group.head_idx) for x in (q, k, v))
        out.index_copy_(1, group.head_idx, _attend_group(group, layer.precision, *mine))
    return out.flatten(1)


def _attend_group(group: HeadGroup, precision: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H, S, D] -> [S, H, D]: pack -> route -> attend."""
    layout = group.layout
    images = ops.pack_tiles(
        q, k, v, layout.slot_row, layout.valid_count, precision=precision, pooling=group.pooling
    )
    selection = select_tiles(group, images.q_pool, images.k_pool)
    out, _ = ops.tile_attention(
        images, selection.bits, layout.slot_row, layout.num_rows, dtype=q.dtype
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
