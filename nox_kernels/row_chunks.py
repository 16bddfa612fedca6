"""Row chunks: work that treats each row alone, done some rows at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def in_row_chunks(work: Callable[[Tensor], Tensor], x: Tensor, max_rows: int) -> Tensor:
    """`work(x)`, with the memory of its intermediate results for `max_rows` rows only.

    The chunks are as even as they can be: a small last one could get another matrix multiplication,
    which sums in another order, and then other bits.

    Args:
        work: [s, C] -> [s, C'], each row from the same row alone.
        x: [S, C].
        max_rows: Of a chunk.
    """
    chunks = x.tensor_split(max(1, -(-len(x) // max_rows)))
    if len(chunks) == 1:
        return work(x)
    first = work(chunks[0])
    out = first.new_empty(len(x), *first.shape[1:])
    parts = out.tensor_split(len(chunks))
    parts[0].copy_(first)
    del first  # before the next one is made
    for part, chunk in zip(parts[1:], chunks[1:], strict=True):
        part.copy_(work(chunk))
    return out
