"""Memory of this process on the host; Linux only."""

import ctypes
import gc
from pathlib import Path


def memory_bytes(name: str) -> int:
    """VmRSS, what it holds now, or VmHWM, the most it held since reset_peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def reset_peak() -> None:
    """Begin anew for VmHWM, without what the allocator keeps of earlier work."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
