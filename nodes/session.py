"""Session: what a Nox H3 Attention node asks."""

from dataclasses import dataclass

from comfy.model_patcher import ModelPatcher

from ..nox_kernels.layout_table import LayoutTable
from ..nox_kernels.request import AttentionRequest
from .h3_sequence import ModelShape


@dataclass(eq=False)
class Session:
    """What one Nox H3 Attention node's patch asks.

    Attributes:
        request: What the node asks.
        table: Layout of every head.
        predictor: Of mode veda, around a `VedaPredictor`.
        shape: Of the model.
        node_id: The node.
        announced_in: The prompt in which the user was last told what computes.
    """

    request: AttentionRequest
    table: LayoutTable
    predictor: ModelPatcher | None
    shape: ModelShape
    node_id: str
    announced_in: str | None = None
