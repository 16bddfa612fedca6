"""Timing: how long a call takes on the device and on the host, and what memory it adds."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 512 << 20  # ten times the L2 cache of an H200
BUDGET_S = 7.0  # of all timed calls of one contender: slower ones run fewer times, once at least
SLOW_S = 3.0  # a call that takes longer warms up once, others twice


@dataclass
class Samples:
    """Raw measurements of one call.

    Attributes:
        device_ms: Of each timed call, between two events on a GPU.
        host_ms: Of each timed call, until it returned; empty on the CPU.
        peak_extra_bytes: Memory at most, its result included, beside what was allocated before;
            None on the CPU.
    """

    device_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    peak_extra_bytes: int | None = None


class Timer:
    """Times calls on one device, with its cache flushed before each."""

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"
        num_bytes = FLUSH_BYTES if self.is_cuda else 0
        self._flushed = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def warm_up(self, call: Callable[[], object], samples: Samples) -> tuple[float, object]:
        """Call until nothing is left to load or compile; measures memory.

        Returns:
            Seconds of a warm call, roughly, and what it returned.
        """
        seconds, result = 0.0, None
        for _ in range(2):
            before, result = 0, None
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device)
            start = time.perf_counter()
            result = call()
            self.synchronize()
            seconds = time.perf_counter() - start
            if self.is_cuda:
                samples.peak_extra_bytes = torch.cuda.max_memory_allocated(self.device) - before
            if seconds > SLOW_S:
                break
        return seconds, result

    def sample(self, call: Callable[[], object], samples: Samples) -> None:
        """Time one call."""
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            samples.device_ms.append(1e3 * (time.perf_counter() - start))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        self._flushed.zero_()  # runs while the host launches what comes next
        begin.record()
        start = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - start)
        end.record()
        end.synchronize()
        samples.device_ms.append(begin.elapsed_time(end))
        samples.host_ms.append(host_ms)


def num_runs(seconds: float, repeats: int) -> int:
    """Timed calls of a contender whose warm call took this long."""
    return max(1, min(repeats, int(BUDGET_S / max(seconds, 1e-9))))


def median(values: list[float]) -> float | None:
    """Median; None of nothing."""
    return statistics.median(values) if values else None
