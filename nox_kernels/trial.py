"""Trial: one layer of a mode without a host around it, and the keys that it lets rows see."""

import torch
from torch import Tensor

from . import ops
from .attention import select_tiles
from .layer_plan import LayerPlan
from .layout_table import preset_table
from .plan import make_plan
from .request import AttentionRequest, DenseRequest
from .schedule import Schedule
from .sequence import Sequence
from .veda.predictor import VedaPredictor
from .veda.synthetic import random_bundle, random_plan

VEDA_SHAPES = ("4x8x4", "2x8x8")


def trial_layer(
    mode: str,
    sequence: Sequence,
    num_heads: int,
    device: torch.device | str,
    *,
    precision: str = "accurate",
    keep_ratio: float = 0.15,
) -> LayerPlan:
    """One layer of a mode as a host would get it.

    Veda's predictor has random weights and two tile shapes: it costs what a trained one costs.
    """
    dense = DenseRequest(first_steps=0, blocks=())
    predictor = None
    if mode == "veda":
        veda_plan = random_plan(
            "trial", sequence.token_grid, VEDA_SHAPES, num_layers=1, num_heads=num_heads
        )
        bundle = random_bundle((veda_plan,), num_layers=1, num_heads=num_heads)
        predictor = VedaPredictor.from_bundle(bundle).to(device)
    plan = make_plan(
        AttentionRequest(mode, keep_ratio, precision=precision, veda_keep_ratio=keep_ratio),
        dense,
        sequence,
        preset_table("uniform", 1, num_heads),
        Schedule.resolve((1.0, 0.0), dense, lambda percent: 1.0 - percent),
        num_layers=1,
        num_heads=num_heads,
        device=device,
        predictor=predictor,
    )
    return plan.layer(0, mode)


def kept_keys(layer: LayerPlan, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """The keys that a layer lets some rows see, selected as its own call selects them.

    Args:
        layer: Of any mode.
        q: [H, S, D], as the call gets it.
        k: The same.
        v: The same.
        rows: [R] int64, on the same device.

    Returns:
        [H, R, S] bool.
    """
    keep = torch.empty(q.shape[0], len(rows), k.shape[1], dtype=torch.bool, device=q.device)
    for group in layer.groups:
        layout, heads = group.layout, group.head_idx
        images = ops.pack_tiles(
            q.index_select(0, heads),
            k.index_select(0, heads),
            v.index_select(0, heads),
            layout.slot_row,
            layout.valid_count,
            precision=layer.precision,
            pooling=group.pooling,
        )
        mask = select_tiles(group, images.q_pool, images.k_pool).mask(layout.num_kv_tiles)
        query_tile = layout.row_slot[rows].long() // layout.query_tile
        kv_tile = layout.row_slot.long() // layout.kv_tile
        keep[heads] = mask[:, query_tile][:, :, kv_tile]
    return keep
