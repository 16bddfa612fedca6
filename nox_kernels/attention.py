"""Attention: one layer on one screen."""

from torch import Tensor

from . import ops, route
from .plan import HeadGroup, LayerPlan


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
        heads = list(group.heads)
        out[:, heads] = _attend_group(group, layer.precision, q[heads], k[heads], v[heads])
    return out.flatten(1)


def _attend_group(group: HeadGroup, precision: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H, S, D] -> [S, H, D]: pack -> route -> attend."""
    layout = group.layout
    images = ops.pack_tiles(q, k, v, layout.slot_row, layout.valid_count, precision)
    selection = route.select(images, layout, group.num_kept)
    return ops.tile_attention(
        images, selection.bits, layout.valid_count, layout.row_slot, dtype=q.dtype
    )
