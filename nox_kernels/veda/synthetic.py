"""Synthetic: bundles with random weights, for tests, benchmarks and the demo."""

from dataclasses import replace

import torch

from ..layout import TileShape
from ..sequence import TokenGrid
from .budget import Budget
from .bundle import Bundle, quantise, weight_shapes
from .bundle_info import BundleInfo, VedaPlan, write_metadata

HEAD_DIM = 128
DEFAULT_BUDGET = Budget("ratio", 0.1)  # of the released predictors


def random_plan(
    name: str,
    grid: TokenGrid,
    shapes: tuple[str, ...],
    *,
    num_layers: int,
    num_heads: int,
    seed: int = 0,
) -> VedaPlan:
    """A plan that gives heads shapes at random, in each layer of at most two.

    Args:
        name: Of the plan.
        grid: The token grid that it is for.
        shapes: Tile shapes to choose from, such as "4x8x4".
        num_layers: Layers of the model.
        num_heads: Heads of each layer.
        seed: Of the choice.
    """
    generator = torch.Generator().manual_seed(seed)
    head_shape = []
    for _ in range(num_layers):
        pair = torch.randperm(len(shapes), generator=generator)[:2]
        choice = torch.randint(len(pair), (num_heads,), generator=generator)
        head_shape.append(tuple(pair[choice].tolist()))
    parsed = tuple(TileShape.parse(shape) for shape in shapes)
    return VedaPlan(name, name, grid, parsed, tuple(head_shape), "random")


def random_bundle(
    plans: tuple[VedaPlan, ...],
    *,
    num_layers: int,
    num_heads: int,
    dtype: str = "float8_e4m3fn",
    seed: int = 0,
    target_budget: Budget = DEFAULT_BUDGET,
    condition_budget: Budget | None = None,
    tile_conditions: bool = False,
    second_order_rank: int = 0,
    count_term: bool = False,
    name: str = "synthetic.safetensors",
) -> Bundle:
    """A bundle with small random weights: its routes differ from plain mean pooling.

    Args:
        plans: Of the token grids that it knows.
        num_layers: Layers of the model.
        num_heads: Heads of each layer.
        dtype: Of the tensors, as the format names them.
        seed: Of the weights.
        target_budget: For the target video's tiles.
        condition_budget: For tiled conditions.
        tile_conditions: Whether visual conditions are tiled.
        second_order_rank: Rank of the second-order term; 0 = none.
        count_term: Whether scores have a term in the token count.
        name: Of the file that it stands for.
    """
    info = BundleInfo(
        name=name,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=HEAD_DIM,
        dtype=dtype,
        target_budget=target_budget,
        condition_budget=condition_budget,
        tile_conditions=tile_conditions,
        second_order_rank=second_order_rank,
        count_term=count_term,
        plans=tuple(plans),
        metadata={"source": "random weights", "step": "0"},
    )
    info = replace(info, metadata=write_metadata(info))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        key: torch.randn(shape, generator=generator) * (shape[1] ** -0.5 if len(shape) > 1 else 1.0)
        for key, shape in weight_shapes(info).items()
    }
    if dtype == "float8_e4m3fn":
        return Bundle(info, quantise(weights))
    return Bundle(info, {key: weight.to(getattr(torch, dtype)) for key, weight in weights.items()})
