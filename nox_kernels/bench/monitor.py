"""Monitor: clocks, power and temperature of the GPU while something runs on it."""

import shutil
import statistics
import subprocess
import threading

import torch

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
KEYS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
PERIOD_S = 0.5


class Monitor:
    """Samples nvidia-smi in a thread from `with` to its end.

    Attributes:
        samples: [sm_mhz, memory_mhz, power_w, temperature_c], each as read.
        reason: Why there is none; None where there is.
    """

    def __init__(self, device: torch.device):
        self.samples: list[list[float]] = []
        self.reason: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        program = shutil.which("nvidia-smi")
        if device.type != "cuda":
            self.reason = "not a GPU"
        elif program is None:
            self.reason = "nvidia-smi was not found"
        else:
            uuid = torch.cuda.get_device_properties(device).uuid
            query = f"--query-gpu={','.join(FIELDS)}"
            self._command = [program, f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits"]

    def __enter__(self) -> "Monitor":
        if self.reason is None:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                answer = subprocess.run(
                    self._command, capture_output=True, text=True, timeout=10, check=True
                )
                values = [float(value) for value in answer.stdout.split("\n")[0].split(",")]
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self.reason = f"nvidia-smi gave no clocks: {error}"
                return
            self.samples.append(values)
            if self._stop.wait(PERIOD_S):
                return

    def summary(self) -> dict:
        """Median, lowest and highest of each value, the raw samples, and the reason of a lack."""
        columns = zip(*self.samples, strict=True) if self.samples else ()
        ranges = {
            key: {"median": statistics.median(column), "min": min(column), "max": max(column)}
            for key, column in zip(KEYS, columns, strict=False)
        }
        return {**ranges, "samples": self.samples, "reason": self.reason}
