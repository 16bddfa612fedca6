"""A Veda bundle of the released size: 50 layers, 56 heads, fp8, twelve plans."""

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nox_kernels.sequence import TokenGrid
from nox_kernels.veda.bundle import read_bundle, write_bundle
from nox_kernels.veda.synthetic import random_bundle, random_plan

ROOT = Path(__file__).parents[2]

NUM_LAYERS, NUM_HEADS = 50, 56
RATIOS = {"16x9": (24, 42), "9x16": (42, 24), "4x3": (24, 32), "1x1": (24, 24)}
SHAPES = ("8x4x4", "2x8x8", "4x8x4", "8x8x2", "4x4x8", "8x2x8")

NUM_PARAMETERS = 275_251_200
TENSOR_BYTES = 275_273_600

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The bundle, written once."""
    plans = [
        random_plan(
            f"{ratio}_t{t}",
            TokenGrid(t, *extent),
            SHAPES,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            seed=t,
        )
        for ratio, extent in RATIOS.items()
        for t in (37, 72, 102)
    ]
    bundle = random_bundle(plans, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, dtype="float8_e4m3fn")
    path = tmp_path_factory.mktemp("released") / "released_size.safetensors"
    write_bundle(path, bundle)
    yield path
    path.unlink()


def test_its_parameters_and_bytes_are_those_of_the_released_file(path):
    bundle = read_bundle(path)
    weights = {key: x for key, x in bundle.tensors.items() if not key.endswith(".__scale")}
    assert len(weights) == 2 * NUM_LAYERS
    assert len(bundle.tensors) == 4 * NUM_LAYERS
    assert {x.dtype for x in weights.values()} == {torch.float8_e4m3fn}
    assert sum(x.numel() for x in weights.values()) == NUM_PARAMETERS
    assert sum(x.numel() * x.element_size() for x in bundle.tensors.values()) == TENSOR_BYTES
    # The rest is the header; the published sibling of 275,415,648 bytes has one of 142,048.
    assert 0 < path.stat().st_size - TENSOR_BYTES < 300_000
    assert len(bundle.info.plans) == 12
    bundle.info.check_model(NUM_LAYERS, NUM_HEADS, 128)


def test_saving_it_again_keeps_every_byte(path, tmp_path):
    copy = tmp_path / "copy.safetensors"
    write_bundle(copy, read_bundle(path))
    assert filecmp.cmp(path, copy, shallow=False)
    copy.unlink()


# In a process of its own: one thread, and a peak that counts nothing else.
LOAD_PROGRAM = """
import json
import re
import sys
import time
from pathlib import Path

import torch

from nox_kernels.veda.bundle import read_bundle
from nox_kernels.veda.predictor import VedaPredictor

torch.set_num_threads(1)
start = time.perf_counter()
predictor = VedaPredictor.from_bundle(read_bundle(sys.argv[1]))
seconds = time.perf_counter() - start
weights = [x for layer in predictor.layers for x in (layer.proj_q, layer.proj_k)]
# ru_maxrss would start at the peak of the process that started this one.
status = Path("/proc/self/status")
peak = re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text()) if status.exists() else None
print(json.dumps({
    "seconds": seconds,
    "peak_mib": int(peak[1]) // 1024 if peak else 0,
    "num_layers": len(predictor.layers),
    "num_parameters": sum(x.numel() for x in weights),
    "dtypes": sorted({str(x.dtype) for x in weights}),
}))
"""


def test_one_core_loads_the_predictor_in_ten_seconds_and_three_gigabytes(path):
    done = subprocess.run(
        [sys.executable, "-c", LOAD_PROGRAM, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["num_layers"] == NUM_LAYERS
    assert got["num_parameters"] == NUM_PARAMETERS
    assert got["dtypes"] == ["torch.bfloat16"]
    assert got["seconds"] < 10
    assert got["peak_mib"] < 3000  # 0 where the system does not tell
