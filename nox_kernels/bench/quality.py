"""Quality: how far a contender's output is from float64 attention, on sampled rows."""

import math

import torch
from torch import Tensor

from ..reference import dense_attention
from .contenders import Inputs

NUM_SAMPLED = 64


def sampled_rows(num_rows: int) -> Tensor:
    """[min(64, S)] int64, ascending: the same rows every time, the first and the last among them."""
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(max(0, num_rows - 2), generator=generator)[: NUM_SAMPLED - 2] + 1
    return torch.cat((torch.tensor([0, num_rows - 1]), inner)).unique()


def float64_rows(inputs: Inputs, rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """[H, R, 128] float64 attention of some rows, a head at a time to bound memory.

    Args:
        inputs: q, k, v [H, S, 128].
        rows: [R] int64.
        keep: [H, R, Nkeys] bool, the keys that each row sees; None = all.
    """
    q, k, v = inputs
    heads = []
    for head in range(q.shape[0]):
        one = slice(head, head + 1)
        seen = None if keep is None else keep[one]
        heads.append(dense_attention(q[one, rows], k[one], v[one], seen))
    return torch.cat(heads)


def output_rows(out: Tensor, rows: Tensor, num_heads: int) -> Tensor:
    """[H, R, 128] float64 of a contender's [S, H * 128] or [1, H, S, 128]."""
    if out.dim() == 4:
        return out[0][:, rows].double()
    return out[rows].unflatten(1, (num_heads, -1)).transpose(0, 1).double()


def _finite(x: Tensor) -> float | None:
    value = float(x)
    return value if math.isfinite(value) else None


def compare(out: Tensor, truth: Tensor) -> dict[str, float | None]:
    """Relative L2 error and cosine of each row of each head; None where a value is not finite.

    Args:
        out: [H, R, D] float64.
        truth: The same.

    Returns:
        "error" and "cosine", means over rows and heads, and "worst_cosine".
    """
    error = (out - truth).norm(dim=2) / truth.norm(dim=2)
    cosine = torch.nn.functional.cosine_similarity(out, truth, dim=2)
    return {
        "error": _finite(error.mean()),
        "cosine": _finite(cosine.mean()),
        "worst_cosine": _finite(cosine.min()),
    }
