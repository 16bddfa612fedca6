"""Doctor: says what this machine can run, by running it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

import torch
from torch import Tensor

from .attention import attend_layer, route_group
from .capability import KernelCase, KernelSpec, pick, prepare
from .errors import NoKernelError
from .layer_plan import LayerPlan
from .layout_table import preset_table
from .plan import make_plan
from .reference import dense_attention
from .request import PRECISIONS, AttentionRequest, DenseRequest
from .schedule import Schedule
from .sequence import Sequence, t2va_sequence
from .veda.predictor import VedaPredictor
from .veda.synthetic import random_bundle, random_plan

# The self-test's problem.
NUM_HEADS = 2
HEAD_DIM = 128
# Relative error against float64 attention, random normal input.
ERROR_LIMIT = {"accurate": 0.020, "faithful": 0.045}
KEEP_RATIO = 0.15
OPTIONAL_PACKAGES = (
    ("av", "writes videos"),
    ("diffusers", "runs the demo"),
    ("transformers", "the demo's text encoder, with --model"),
    ("matplotlib", "draws the route picture"),
    ("comfy-kitchen", "ComfyUI's own kernels"),
    ("sageattention", "not needed by Nox"),
)


def main() -> int:
    """Print the report; 0 if every self-test passed, else 1."""
    print("Nox doctor")
    print(f"  Python {platform.python_version()} on {platform.platform()}")
    print(f"  PyTorch {torch.__version__}")
    print("\nDevices")
    devices = find_devices()
    for device in devices:
        print(f"  {device}: {describe_device(device)}")
    print("\nWhat computes attention (modes sage, sparse and veda)")
    for device in devices:
        for precision in PRECISIONS:
            print(f"  {device}, {precision}: {describe_choice(device, precision)}")
    print("\nOptional packages")
    for name, purpose in OPTIONAL_PACKAGES:
        print(f"  {name} ({purpose}): {package_version(name) or 'not installed'}")
    print("\nSelf-test: relative error against float64")
    all_passed = True
    for device in devices:
        for precision in PRECISIONS:
            if serving_kernel(device, precision) is None:
                continue
            for mode, error in self_test(device, precision).items():
                limit = ERROR_LIMIT[precision]
                passed = error <= limit  # a NaN fails
                all_passed = all_passed and passed
                verdict = "ok" if passed else "FAILED"
                print(f"  {device}, {mode}, {precision}: {error:.4f} (limit {limit:.3f}) {verdict}")
    print("\nEverything works." if all_passed else "\nA self-test failed: do not trust the output.")
    return 0 if all_passed else 1


def find_devices() -> list[torch.device]:
    """The CPU and every GPU that torch sees."""
    return [torch.device("cpu")] + [
        torch.device("cuda", idx) for idx in range(torch.cuda.device_count())
    ]


def describe_device(device: torch.device) -> str:
    """Name, and of a GPU its compute capability, memory and driver."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    driver = driver_version()
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB" + (f", driver {driver}" if driver else "")
    )


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where nvidia-smi does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None


def _case(device: torch.device, precision: str) -> KernelCase:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return KernelCase.on(device, dtype, HEAD_DIM, precision, NUM_HEADS)


def serving_kernel(device: torch.device, precision: str) -> KernelSpec | None:
    """The kernel that serves a device, loaded, or None."""
    try:
        return prepare(pick(_case(device, precision)), device)
    except NoKernelError:
        return None


def describe_choice(device: torch.device, precision: str) -> str:
    """What serves a device, or why nothing does."""
    try:
        return str(prepare(pick(_case(device, precision)), device))
    except NoKernelError as error:
        return f"nothing, the host's own attention runs: {error}"


def package_version(name: str) -> str | None:
    """Version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def self_test(device: torch.device, precision: str) -> dict[str, float]:
    """Relative error of each mode on a small random clip, Veda's with random weights.

    Sparse modes are held against float64 attention over the very keys that they keep.

    Returns:
        "sage", "sparse" and "veda" -> error.
    """
    sequence = t2va_sequence(256, 256, 22, 9)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_HEADS, sequence.num_rows, HEAD_DIM)
    dtype = _case(device, precision).dtype
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    errors = {}
    for mode in ("sage", "sparse", "veda"):
        layer = _one_layer(mode, precision, sequence, device)
        keep = None if layer.keeps_everything else _kept_keys(layer, q, k)
        truth = dense_attention(q, k, v, keep).transpose(0, 1).flatten(1)
        out = attend_layer(layer, q, k, v).double()
        errors[mode] = float((out - truth).norm() / truth.norm())
    return errors


def _one_layer(mode: str, precision: str, sequence: Sequence, device: torch.device) -> LayerPlan:
    dense = DenseRequest(first_steps=0, blocks=())
    shapes = ("4x8x4", "8x4x4")
    veda_plan = random_plan(
        "self-test", sequence.token_grid, shapes, num_layers=1, num_heads=NUM_HEADS
    )
    bundle = random_bundle((veda_plan,), num_layers=1, num_heads=NUM_HEADS)
    plan = make_plan(
        AttentionRequest(mode, KEEP_RATIO, precision=precision, veda_keep_ratio=KEEP_RATIO),
        dense,
        sequence,
        preset_table("uniform", 1, NUM_HEADS),
        Schedule.resolve((1.0, 0.0), dense, lambda percent: 1.0 - percent),
        num_layers=1,
        num_heads=NUM_HEADS,
        device=device,
        predictor=VedaPredictor.from_bundle(bundle).to(device),
    )
    return plan.layer(0, mode)


def _kept_keys(layer: LayerPlan, q: Tensor, k: Tensor) -> Tensor:
    """[H, S, S] bool: the keys that each row sees."""
    keep = torch.empty((*q.shape[:2], k.shape[1]), dtype=torch.bool, device=q.device)
    for group in layer.groups:
        layout, heads = group.layout, group.head_idx
        mask = route_group(group, q[heads], k[heads]).mask(layout.num_kv_tiles)
        slot = layout.row_slot
        keep[heads] = mask[:, slot // layout.query_tile][:, :, slot // layout.kv_tile]
    return keep
