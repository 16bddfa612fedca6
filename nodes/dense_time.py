"""Dense time: how long ComfyUI's own attention takes, measured once for each length."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from comfy import model_prefetch
from comfy.ldm.modules import attention as host_attention
from comfy.model_management import OOM_EXCEPTION

from ..nox_kernels.stopwatch import Stopwatch

MAX_LENGTHS = 256  # a length is a few numbers
# Rows of all timed heads together that keep a large GPU as busy as all of them do: 128 rows are a
# CTA of the usual kernels, so this makes 2048, twelve for each of 170 SMs.
FULL_LOAD_ROWS = 1 << 18

# ms of one block's attention on all its heads, by what it depends on; None: cannot be measured.
_known: dict[tuple, float | None] = {}


def key_of(device: torch.device, dtype: torch.dtype, num_rows: int, num_heads: int) -> tuple:
    """What the time depends on."""
    return (str(device), dtype, num_rows, num_heads)


def known_ms(keys: Iterable[tuple]) -> float | None:
    """The mean time of some lengths; None unless all were measured."""
    times = [_known.get(key) for key in keys]
    known = [time_ms for time_ms in times if time_ms is not None]
    return sum(known) / len(known) if known and len(known) == len(times) else None


def measure(
    stopwatch: Stopwatch, key: tuple, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Time ComfyUI's own attention on the tensors of a call, where the time is not known yet.

    Two calls, of which the first makes ready what the second, the timed one, uses. Of a long
    sequence they compute a few heads: both together cost a quarter of a dense call at 38,304 rows
    of 56 heads, and an eighth of its memory. Their outputs are dropped.

    Args:
        stopwatch: Gets the time of the whole block.
        key: From `key_of`, whose num_heads are those of the block.
        q: [1, H, S, D] of the call, of some or all heads of the block.
        k: The same.
        v: The same.
    """
    if key in _known:
        return
    _, _, num_rows, num_heads = key
    heads = min(q.shape[1], -(-FULL_LOAD_ROWS // num_rows))
    part = [x[:, :heads] for x in (q, k, v)]
    try:
        with _outside_the_memory_plan():
            host_attention.optimized_attention(*part, heads, skip_reshape=True)
            with stopwatch.time(key, q.device, scale=num_heads / heads):
                host_attention.optimized_attention(*part, heads, skip_reshape=True)
    except OOM_EXCEPTION:  # a time that is nice to have must not end a run
        _known[key] = None


def learn(stopwatch: Stopwatch, keys: Iterable[tuple]) -> None:
    """Keep what a stopwatch measured."""
    for key in keys:
        time_ms = stopwatch.median_ms(key)
        if time_ms is not None:
            _known[key] = time_ms
    while len(_known) > MAX_LENGTHS:
        del _known[next(iter(_known))]


def _outside_the_memory_plan():
    """Newer ComfyUI records what a block allocates; what happens once has no place in that."""
    return getattr(model_prefetch, "pause_malloc_graph", nullcontext)()
