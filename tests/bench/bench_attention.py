"""Time one attention call of a 5-second H3 clip (1344 x 768, 38,304 rows, 56 heads).

    python tests/bench/bench_attention.py [--device cuda] [--repeats 3]

Prints one JSON object: the card, and milliseconds and extra peak memory of each mode beside torch's
own attention, which is what the hosts use. Medians; every mode in one run.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nox_kernels.attention import attend_layer
from nox_kernels.capability import KernelCase, pick
from nox_kernels.layer_plan import LayerPlan
from nox_kernels.layout_table import preset_table
from nox_kernels.plan import make_plan
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import t2va_sequence
from nox_kernels.veda.predictor import VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan

NUM_HEADS = 56
SEQUENCE = t2va_sequence(1344, 768, 124, num_text=594)
MODES = (("sage", 1.0), ("sparse", 0.5), ("sparse", 0.15), ("veda", 0.1))


def layer_plan(mode: str, keep_ratio: float, num_heads: int, device: str) -> LayerPlan:
    """One layer of a mode; Veda's predictor has random weights and two tile shapes."""
    dense = DenseRequest(first_steps=0, blocks=())
    sizes = {"num_layers": 1, "num_heads": num_heads}
    veda_plan = random_plan("16x9_t37", SEQUENCE.token_grid, ("4x8x4", "2x8x8"), **sizes)
    bundle = random_bundle((veda_plan,), **sizes)
    plan = make_plan(
        AttentionRequest(mode, keep_ratio=keep_ratio, veda_keep_ratio=keep_ratio),
        dense,
        SEQUENCE,
        preset_table("uniform", **sizes),
        Schedule.resolve((1.0, 0.0), dense, lambda percent: 1 - percent),
        device=device,
        predictor=VedaPredictor.from_bundle(bundle).to(device),
        **sizes,
    )
    return plan.layer(0, plan.decide(0, 0.5).kind)


def measure(call, device: str, repeats: int) -> dict:
    times = []
    peak_bytes = 0
    for idx in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
        if idx:  # the first call warms up
            times.append(1e3 * (time.perf_counter() - start))
    return {"ms": round(statistics.median(times), 1), "extra_peak_mb": peak_bytes >> 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    generator = torch.Generator(args.device).manual_seed(0)
    buffer = torch.randn(
        SEQUENCE.num_rows,
        3,
        NUM_HEADS,
        128,
        device=args.device,
        dtype=torch.bfloat16,
        generator=generator,
    )
    q, k, v = (buffer[:, part].transpose(0, 1) for part in range(3))  # views, as H3 passes them

    def torch_attention():
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])

    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "rows": SEQUENCE.num_rows,
        "computed_by": str(
            pick(
                KernelCase.on(torch.device(args.device), torch.bfloat16, 128, "accurate", NUM_HEADS)
            )
        ),
        "torch attention": measure(torch_attention, args.device, args.repeats),
    }
    for mode, keep_ratio in MODES:
        layer = layer_plan(mode, keep_ratio, NUM_HEADS, args.device)
        name = mode if mode == "sage" else f"{mode} {100 * keep_ratio:.0f} %"
        timing = measure(
            lambda layer=layer: attend_layer(layer, q, k, v), args.device, args.repeats
        )
        result[name] = {**timing, "kept_share": round(layer.kept_share, 4)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
