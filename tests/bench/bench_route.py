"""Routing alone (pool, score, select) at 1344x768, 124 frames: milliseconds of one layer.

python tests/bench/bench_route.py [--device cpu] [--heads 4]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nox_kernels.attention import route_group
from nox_kernels.layer_plan import HeadGroup
from nox_kernels.sequence import t2va_sequence
from nox_kernels.trial import trial_layer

SEQUENCE = t2va_sequence(1344, 768, 124, num_text=594)  # S = 38,304


def measure(groups: tuple[HeadGroup, ...], q: torch.Tensor, k: torch.Tensor, repeats: int) -> dict:
    """Median and fastest time of routing every group."""

    def synchronize():
        if q.is_cuda:
            torch.cuda.synchronize()

    parts = [
        (group, q.index_select(0, group.head_idx), k.index_select(0, group.head_idx))
        for group in groups
    ]
    times = []
    for idx in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        for group, own_q, own_k in parts:
            route_group(group, own_q, own_k)
        synchronize()
        if idx >= 2:  # the first calls warm up
            times.append(1e3 * (time.perf_counter() - start))
    return {"median_ms": round(statistics.median(times), 2), "fastest_ms": round(min(times), 2)}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    generator = torch.Generator(args.device).manual_seed(0)
    buffer = torch.randn(
        SEQUENCE.num_rows,
        2,
        args.heads,
        128,
        device=args.device,
        dtype=torch.bfloat16,
        generator=generator,
    )
    q, k = (buffer[:, part].transpose(0, 1) for part in range(2))
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "num_rows": SEQUENCE.num_rows,
        "num_heads": args.heads,
    }
    for mode, keep_ratio in (("sparse", 0.15), ("veda", 0.1)):
        layer = trial_layer(mode, SEQUENCE, args.heads, args.device, keep_ratio=keep_ratio)
        result[mode] = measure(layer.groups, q, k, args.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
