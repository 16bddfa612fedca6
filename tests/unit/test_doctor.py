"""Doctor: what it says can be relied on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nox_kernels import build, doctor, driver, kernels
from nox_kernels.__main__ import main
from nox_kernels.errors import BuildError, DriverError
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
    layer = doctor.trial_layer(mode, sequence, 2, "cpu")
    qkv = torch.randn(3, 2, sequence.num_rows, 128)
    keep = doctor.kept_keys(layer, *qkv, torch.arange(sequence.num_rows))
    video = keep[:, sequence.video_start :]
    assert 0.1 < video.float().mean() < 0.9
    assert video[:, :, : sequence.video_start].all()  # text and audio are always kept


def test_the_report_covers_devices_kernels_and_packages(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert torch.__version__ in report
    assert "NVIDIA driver: " in report
    assert "NVRTC, which compiles GPU kernels: " in report
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


def test_a_self_test_that_raises_is_told_and_the_rest_still_runs(capsys, monkeypatch):
    attend = doctor.attend_layer

    def lose_the_gpu(layer, *tensors):
        if layer.precision == "accurate":
            raise DriverError("The NVIDIA driver could not launch nox_attend_int8.")
        return attend(layer, *tensors)

    monkeypatch.setattr(doctor, "attend_layer", lose_the_gpu)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "cpu, accurate: FAILED. The NVIDIA driver could not launch" in report
    assert "cpu, veda, faithful: 0.0" in report


def test_a_device_that_nothing_serves_is_explained_and_no_fault():
    choice = doctor.Choice.on(torch.device("mps"), "accurate")
    assert str(choice).startswith("nothing, the host's own attention runs: ")
    assert "mps" in str(choice)
    assert not choice.is_broken


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose compute capability a test sets; everything beyond it is real."""

    def set_capability(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda", 0)

    return set_capability


def test_a_gpu_without_a_kernel_says_why_it_is_slow(gpu):
    choice = doctor.Choice.on(gpu(8, 9), "accurate")
    assert str(choice) == (
        "PyTorch reference on the GPU (right, but far slower than dense); "
        "Nox INT8 kernel (sm_90a) is for compute capability 9.0, this GPU has 8.9"
    )
    assert doctor.describe_files([choice]) == []


def test_a_kernel_that_cannot_be_loaded_fails_the_command(gpu, monkeypatch, capsys):
    def refuse(*args):
        raise DriverError("The NVIDIA driver (for CUDA 11.4) is too old.")

    device = gpu(9, 0)
    monkeypatch.setattr(driver, "prepare", refuse)
    monkeypatch.setattr(doctor, "find_devices", lambda: [device])
    monkeypatch.setattr(doctor, "describe_device", str)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "cuda:0, accurate: nothing, the host's own attention runs: The NVIDIA driver" in report
    assert "Something does not work" in report


def test_each_file_is_named_once_with_where_it_comes_from(gpu, monkeypatch):
    device = gpu(9, 0)
    monkeypatch.setattr(driver, "prepare", lambda *args: None)
    choices = [doctor.Choice.on(device, precision) for precision in PRECISIONS]
    lines = doctor.describe_files(choices)
    assert lines == [
        f"cuda:0, {unit} (sm_90a): {build.describe_image(unit, 'sm_90a')}" for unit in kernels.UNITS
    ]


def test_nvrtc_is_asked_for_only_where_a_gpu_needs_it(gpu, monkeypatch):
    def find_none(architecture, path=None):
        raise BuildError(f"No NVRTC for {architecture}. Run: pip install nox-kernels")

    monkeypatch.setattr(build, "open_nvrtc", find_none)
    cpu = torch.device("cpu")
    assert doctor.describe_nvrtc([cpu]) == "none, and without an NVIDIA GPU none is needed"
    assert doctor.describe_nvrtc([cpu, gpu(12, 0)]).startswith("No NVRTC for sm_120. Run: pip")
    assert doctor.describe_nvrtc([gpu(7, 5)]).startswith("none, and")


def test_a_cpu_build_of_pytorch_beside_a_driver_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "driver_version", lambda: (12, 8))
    assert "though an NVIDIA driver is there" in doctor.describe_build()
    assert doctor.describe_driver().endswith("for CUDA 12.8")


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
