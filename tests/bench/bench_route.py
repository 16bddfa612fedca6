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
from nox_kernels.layout_table import preset_table
from nox_kernels.plan import make_plan
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import t2va_sequence
from nox_kernels.veda.predictor import VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan

SEQUENCE = t2va_sequence(1344, 768, 124, num_text=594)  # S = 38,304


def groups_of(mode: str, num_heads: int, device: str) -> tuple[HeadGroup, ...]:
    """The head groups of one layer of a mode."""
    dense = DenseRequest(first_steps=0, blocks=())
    shapes = ("4x8x4", "2x8x8")
    veda_plan = random_plan(
        "16x9_t37", SEQUENCE.token_grid, shapes, num_layers=1, num_heads=num_heads
    )
    bundle = random_bundle((veda_plan,), num_layers=1, num_heads=num_heads)
    plan = make_plan(
        AttentionRequest(mode, keep_ratio=0.15),
        dense,
        SEQUENCE,
        preset_table("uniform", 1, num_heads),
        Schedule.resolve((1.0, 0.0), dense, lambda percent: 1 - percent),
        num_layers=1,
        num_heads=num_heads,
        device=device,
        predictor=VedaPredictor.from_bundle(bundle).to(device),
    )
    return plan.layer(0, mode).groups


def measure(groups, q, k, repeats: int) -> dict:
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
    for mode in ("sparse", "veda"):
        groups = groups_of(mode, args.heads, args.device)
        result[mode] = measure(groups, q, k, args.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
