"""Stopwatch: how long work takes on its device, without waiting for it."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from statistics import median
from threading import Lock

import torch


class Stopwatch:
    """Milliseconds of pieces of work, by key.

    On a GPU two events enclose the work, and are read once the GPU has passed them; elsewhere work
    is done when its call returns. Safe to share by threads.
    """

    def __init__(self):
        self._times_ms: defaultdict[Hashable, list[float]] = defaultdict(list)
        self._pending: deque[tuple[Hashable, float, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._reading = Lock()

    @contextmanager
    def time(self, key: Hashable, device: torch.device, scale: float = 1.0) -> Iterator[None]:
        """Time what runs inside; an exception there leaves no time.

        Args:
            key: Whose time it is.
            device: Where the work runs; on a GPU, on its current stream.
            scale: What the time is multiplied with.
        """
        if device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._times_ms[key].append(1000 * scale * (time.perf_counter() - start_s))
            return
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        start.record(stream)
        yield
        stop.record(stream)
        self._pending.append((key, scale, start, stop))

    def read(self, *, wait: bool) -> None:
        """Read the events that the GPU has passed, or, after waiting for it, all."""
        with self._reading:
            while self._pending:
                key, scale, start, stop = self._pending[0]
                if wait:
                    stop.synchronize()
                elif not stop.query():
                    return
                self._times_ms[key].append(scale * start.elapsed_time(stop))
                self._pending.popleft()

    def median_ms(self, key: Hashable) -> float | None:
        """The middle one of a key's times; None without one. Odd first times do not move it."""
        times = self._times_ms.get(key)
        return median(times) if times else None
