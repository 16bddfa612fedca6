"""Bench on a GPU: a small real run, with events, clocks and memory."""

import json

import pytest

from nox_kernels.__main__ import main
from nox_kernels.bench.contenders import ACCURATE, CUDNN
from tests.gpu.kernels_case import needs_kernel

pytestmark = needs_kernel


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    arguments = ["--device", "cuda", "--rows", "7733", "--heads", "8", "--repeats", "3"]
    assert main(["bench", *arguments, "--out", str(out)]) == 0
    return json.loads((out / "bench.json").read_text())


def test_ours_and_torchs_run_on_every_set(results):
    assert [run["set"] for run in results["runs"]] == ["normal", "strong", "outlier"]
    for run in results["runs"]:
        entries = {entry["name"]: entry for entry in run["contenders"]}
        ours = [e for e in entries.values() if e["is_part"] or e["name"].startswith("nox")]
        for entry in (*ours, entries[CUDNN], entries["torch flash"]):
            assert entry["reason"] is None, entry["name"]
            assert len(entry["samples"]["device_ms"]) == 3
            assert 0.005 < entry["median_ms"] < 1000
            assert entry["host_ms"] > 0
            assert entry["samples"]["peak_extra_bytes"] > 0
        assert entries[ACCURATE]["quality"]["error"] < (0.05 if run["set"] == "outlier" else 0.020)
        assert entries["nox sparse 15 %"]["quality"]["error"] < 0.05
        assert entries[CUDNN]["quality"]["error"] < 0.005


def test_ceilings_and_clocks_are_those_of_a_gpu(results):
    for name in ("int8", "fp8", "bf16", "copy"):
        assert results["ceilings"][name]["rate"] is not None, results["ceilings"][name]["reason"]
    assert results["ceilings"]["bf16"]["rate"] > 100  # TFLOPS
    for run in results["runs"]:
        assert run["gpu"]["reason"] is not None or run["gpu"]["sm_mhz"]["median"] > 100
