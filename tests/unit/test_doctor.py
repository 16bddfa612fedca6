"""Doctor: what it says can be relied on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nox_kernels import doctor
from nox_kernels.__main__ import main
from nox_kernels.request import PRECISIONS

ROOT = Path(doctor.__file__).resolve().parent.parent


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_self_test_measures_a_real_error(precision):
    errors = doctor.self_test(torch.device("cpu"), precision)
    assert errors.keys() == {"sage", "sparse", "veda"}
    for error in errors.values():
        assert 0.005 < error < doctor.ERROR_LIMIT[precision]


@pytest.mark.parametrize("mode", ["sparse", "veda"])
def test_a_sparse_self_test_skips_keys(mode):
    from nox_kernels.sequence import t2va_sequence

    sequence = t2va_sequence(256, 256, 22, 9)
    layer = doctor._one_layer(mode, "accurate", sequence, torch.device("cpu"))
    q, k = torch.randn(2, 2, sequence.num_rows, 128)
    keep = doctor._kept_keys(layer, q, k)
    video = keep[:, sequence.video_start :]
    assert 0.1 < video.float().mean() < 0.9
    assert video[:, :, : sequence.video_start].all()  # text and audio are always kept


def test_the_report_covers_devices_kernels_and_packages(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert torch.__version__ in report
    for precision in PRECISIONS:
        assert f"cpu, {precision}: " in report
        assert f"cpu, sparse, {precision}: 0.0" in report
    for name, _ in doctor.OPTIONAL_PACKAGES:
        assert name in report
    assert "FAILED" not in report


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_wrong_kernel_fails_the_command(capsys, monkeypatch, wrong):
    attend = doctor.attend_layer
    monkeypatch.setattr(doctor, "attend_layer", lambda *args: attend(*args) + wrong)
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_device_that_nothing_serves_is_explained():
    choice = doctor.describe_choice(torch.device("mps"), "accurate")
    assert choice.startswith("nothing, the host's own attention runs: ")
    assert "mps" in choice


def test_an_absent_package_is_not_found():
    assert doctor.package_version("no-such-package-of-nox") is None


def test_help_does_not_load_torch():
    program = (
        "import sys; from nox_kernels.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True)
