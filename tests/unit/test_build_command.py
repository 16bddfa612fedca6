"""Build command: only whole and checked files leave it."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nox_kernels import build, build_command
from nox_kernels.__main__ import main
from nox_kernels.build import ImageFinder, Unit
from nox_kernels.cuda_source import Source
from nox_kernels.errors import BuildError

UNIT = Unit("tiny", build.ARCHITECTURES, {"tiny": 16}, ptx="compute_80")
NAMES = {*(f"tiny.{name}.cubin" for name in build.ARCHITECTURES), "tiny.compute_80.ptx"}
TINY = """
struct Params { float* out; };
extern "C" __global__ void tiny(const __grid_constant__ Params params) {
  params.out[threadIdx.x] = 1.0f;
}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A Nox of one small unit."""
    (tmp_path / "csrc" / "instances").mkdir(parents=True)
    (tmp_path / "csrc" / "instances" / "tiny.cu").write_text(TINY)
    source = Source(tmp_path / "csrc")
    monkeypatch.setattr(build, "own_source", lambda: source)
    monkeypatch.setattr(build, "UNITS", (UNIT,))
    return source


@pytest.fixture
def release_nvrtc():
    try:
        compiler = build.open_nvrtc("sm_120")
    except BuildError as error:
        pytest.skip(str(error))
    if compiler.version != (12, 8):
        pytest.skip(f"needs NVRTC 12.8, found {compiler.version_text}")


def no_nvrtc(architecture):
    raise BuildError("not needed")


@pytest.mark.nvrtc
@pytest.mark.usefixtures("release_nvrtc")
def test_every_target_is_written_with_its_digest(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["build", "--out", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source_hash"] == tiny.hash
    assert manifest["nvrtc"] == "12.8"
    assert "--fmad=false" in manifest["flags"]
    assert manifest["files"].keys() == NAMES
    for name, entry in manifest["files"].items():
        data = (out / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["bytes"] == len(data)
        assert name.startswith(f"{entry['unit']}.{entry['architecture']}.")
        assert entry["kernels"].keys() == (set() if name.endswith("ptx") else {"tiny"})
    table = capsys.readouterr().out
    for name in build.ARCHITECTURES:
        assert f"tiny           {name} " in table


@pytest.mark.nvrtc
@pytest.mark.usefixtures("release_nvrtc")
def test_one_architecture_can_be_chosen(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["build", "--out", str(out), "--arch", "sm_90a"]) == 0
    assert {path.name for path in out.iterdir()} == {"tiny.sm_90a.cubin", "manifest.json"}
    assert main(["build", "--out", str(out), "--arch", "sm_90"]) == 2
    assert "--arch sm_90 is none of compute_80, sm_120, " in capsys.readouterr().err


@pytest.mark.nvrtc
@pytest.mark.usefixtures("release_nvrtc", "tiny")
def test_a_fault_writes_nothing(tmp_path, monkeypatch, capsys):
    tight = Unit("tiny", build.ARCHITECTURES, {"tiny": 1}, ptx="compute_80")
    monkeypatch.setattr(build, "UNITS", (tight,))
    assert main(["build", "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err
    for name in build.ARCHITECTURES:
        assert f"tiny.{name}.cubin: tiny uses " in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("release_nvrtc", "tiny")
def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "out").write_text("in the way")
    assert main(["build", "--out", str(tmp_path / "out")]) == 2
    assert "out cannot be written: File exists." in capsys.readouterr().err


@pytest.mark.parametrize("takes_any", [False, True])
def test_a_release_needs_its_own_nvrtc(monkeypatch, takes_any):
    compiler = type("Nvrtc", (), {"version": (13, 0), "version_text": "13.0", "path": Path("x")})
    monkeypatch.setattr(build, "open_nvrtc", lambda *args: compiler)
    if takes_any:
        assert build_command.release_nvrtc(None, True) is compiler
        return
    with pytest.raises(BuildError, match=r"12.8.*x is 13.0.*cu12==12.8.93.*--any-nvrtc"):
        build_command.release_nvrtc(None, False)


def test_the_version_is_the_packs_own():
    text = (Path(build.__file__).resolve().parent.parent / "pyproject.toml").read_text()
    assert f'version = "{build_command.own_version()}"' in text


def has_wheel_tools():
    code = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77; import pip"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("release_nvrtc")
@pytest.mark.skipif(not has_wheel_tools(), reason="needs pip and setuptools>=77")
def test_the_wheel_serves_every_gpu_and_is_the_same_each_time(tiny, tmp_path):
    contents = []
    for name in ("one", "two"):
        assert main(["build", "--out", str(tmp_path / name), "--wheel"]) == 0
        (wheel,) = (tmp_path / name).glob("*.whl")
        assert wheel.name == f"nox_kernels-{build_command.own_version()}-py3-none-any.whl"
        with zipfile.ZipFile(wheel) as archive:
            inside = {item: archive.read(item) for item in archive.namelist()}
            archive.extractall(tmp_path / "site")
        contents.append({k: v for k, v in inside.items() if k.startswith("nox_kernels_cubins/")})
    assert contents[0] == contents[1]
    assert contents[0].keys() == {
        f"nox_kernels_cubins/{name}" for name in (*NAMES, "manifest.json", "__init__.py")
    }
    installed = tmp_path / "site" / build.WHEEL_PACKAGE
    finder = ImageFinder(tiny, installed, None, no_nvrtc)
    for target in UNIT.targets:
        assert finder.find(UNIT, target).origin.startswith("data wheel, ")


@pytest.mark.usefixtures("tiny")
def test_a_wheel_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(BuildError, match=r"could not be made \(No module named pip\).*setuptools"):
        build_command.make_wheel(tmp_path, [])
