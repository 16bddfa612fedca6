"""Memory of one block of MiniMax-H3's real size: attention by the host and by Nox, and the MLP.

python tests/bench/bench_block_memory.py [--frames 124] [--device cpu]

On the CPU (Linux) Nox computes on its reference, which takes about half an hour and 12 GB.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nox_kernels.attention import attend_packed, pack_layer
from nox_kernels.layer_plan import LayerPlan
from nox_kernels.row_chunks import in_row_chunks
from nox_kernels.sequence import t2va_sequence
from nox_kernels.trial import trial_layer
from tests.bench.host_memory import memory_bytes, reset_peak

NUM_HEADS, HEAD_DIM, HIDDEN, FFN = 56, 128, 5376, 14336
CHUNKS = (2048, 4096, 16384)  # rows
NUM_TEXT = 594  # makes S = 38,304 of 124 frames


class Block:
    """What a block works on, in bf16: hidden states, and the weights of its MLP."""

    def __init__(self, num_frames: int = 124, device: str = "cuda"):
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            x = torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)
            return x.mul_(0.02)

        self.device = device
        self.sequence = t2va_sequence(1344, 768, num_frames, num_text=NUM_TEXT)
        self.num_rows = self.sequence.num_rows
        self.x = random(self.num_rows, HIDDEN)
        self.fc1, self.fc2 = random(2 * FFN, HIDDEN), random(HIDDEN, FFN)

    def mlp(self, rows: Tensor) -> Tensor:
        """[s, HIDDEN] -> [s, HIDDEN]."""
        gate, up = functional.linear(rows, self.fc1).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate).mul_(up), self.fc2)

    def chunked_mlp(self, max_rows: int) -> Tensor:
        """The MLP of all rows, some at a time."""
        return in_row_chunks(self.mlp, self.x, max_rows)

    def attention(self, attend: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """As ComfyUI calls it: q and k are views of a fused buffer, V is a copy, nobody else holds them."""
        width = 3 * NUM_HEADS * HEAD_DIM
        # ones: the CPU gives zeros no memory until they are written
        fused = torch.ones(self.num_rows, width, device=self.device, dtype=self.x.dtype)
        shape = (self.num_rows, NUM_HEADS, HEAD_DIM)
        q, k, v = (part.view(shape).transpose(0, 1) for part in fused.chunk(3, dim=-1))
        held = [q, k, v.clone()]
        del fused, q, k, v
        return attend(held)

    def layer(self, mode: str) -> LayerPlan:
        """What Nox does in a mode, at 15 % kept."""
        return trial_layer(mode, self.sequence, NUM_HEADS, self.device, keep_ratio=0.15)


def by_host(held: list[Tensor]) -> Tensor:
    """PyTorch's attention, which holds its inputs as ComfyUI's own does."""
    return functional.scaled_dot_product_attention(*(x[None] for x in held))


def by_nox(layer: LayerPlan) -> Callable[[list[Tensor]], Tensor]:
    """As our patch calls it."""

    def attend(held: list[Tensor]) -> Tensor:
        images = pack_layer(layer, *held)
        held.clear()
        return attend_packed(layer, images, torch.bfloat16)

    return attend


def peak_mib(work: Callable[[], Tensor], device: str) -> float:
    """What work needs at its peak beside what is there before.

    Raises:
        AssertionError: Something outlived it (on a GPU).
    """
    if device == "cpu":
        return _peak_mib_on_cpu(work)
    work()  # makes ready what later calls use
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    return round((torch.cuda.max_memory_allocated() - before) / (1 << 20), 1)


def _peak_mib_on_cpu(work: Callable[[], Tensor]) -> float:
    reset_peak()
    before = memory_bytes("VmRSS")
    work()
    return round((memory_bytes("VmHWM") - before) / (1 << 20), 1)


def measure(block: Block) -> dict:
    """Peaks in MiB, and values that chunks change."""
    whole = block.mlp(block.x)
    other_values = {rows: int((block.chunked_mlp(rows) != whole).sum()) for rows in CHUNKS}
    del whole
    peak = partial(peak_mib, device=block.device)
    modes = ("sparse",) if block.device == "cpu" else ("sage", "sparse")
    return {
        "num_rows": block.num_rows,
        "attention": {
            "host": peak(partial(block.attention, by_host)),
            **{mode: peak(partial(block.attention, by_nox(block.layer(mode)))) for mode in modes},
        },
        "mlp": peak(partial(block.mlp, block.x)),
        "chunked_mlp": {rows: peak(partial(block.chunked_mlp, rows)) for rows in CHUNKS},
        "values_that_chunks_change": other_values,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    names = {"device": device, "torch": torch.__version__}
    print(json.dumps(names | measure(Block(args.frames, args.device)), indent=2))


if __name__ == "__main__":
    main()
