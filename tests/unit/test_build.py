"""Build: images are right or refused, whoever asks, and whatever the disk holds."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nox_kernels import build, nvrtc
from nox_kernels.build import ImageFinder, Unit
from nox_kernels.cuda_source import Source
from nox_kernels.errors import BuildError
from nox_kernels.nvrtc import Compiled

UNIT = Unit("tiny", ("sm_80", "sm_120"), {"tiny": 16}, ptx="compute_80")
NO_NVRTC = "This machine has no NVRTC"

PARAMS = """
#pragma once
struct TinyParams {
  float* out;
  int count;
};
"""
TINY = """
#include "../primitives/value.cuh"

extern "C" __global__ void __launch_bounds__(128) tiny(const __grid_constant__ TinyParams params) {
  params.out[threadIdx.x] = value(params);
}
"""
VALUE = """
#pragma once
#include "../params.h"
__device__ inline float value(const TinyParams& params) { return params.count; }
"""


def write_source(folder, tiny=TINY):
    for name, text in {
        "params.h": PARAMS,
        "primitives/value.cuh": VALUE,
        "instances/tiny.cu": tiny,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return Source(folder)


class CountingCompiler:
    """Stands for NVRTC: gives an image that tells what it was made from."""

    version_text = "12.8"
    path = Path("libnvrtc.so.12")

    def __init__(self):
        self.num_calls = 0

    def compile(self, name, text, headers, flags):
        self.num_calls += 1
        threading.Event().wait(0.05)  # give other threads a chance to come in
        return Compiled(f"{name} {flags[0]}".encode(), "")


@pytest.fixture
def compiler():
    return CountingCompiler()


@pytest.fixture
def make_finder(tmp_path, compiler):
    """Finders as separate runs of a program would make them, over one cache."""
    source = write_source(tmp_path / "csrc")

    def make(
        wheel_dir=None, cache_dir=tmp_path / "cache", open_nvrtc=lambda architecture: compiler
    ):
        return ImageFinder(source, wheel_dir, cache_dir, open_nvrtc)

    return make


@pytest.fixture(scope="module")
def real_nvrtc():
    try:
        return build.open_nvrtc("sm_120")
    except BuildError as error:
        pytest.skip(str(error))


def cached_file(tmp_path):
    (path,) = (tmp_path / "cache").rglob("*.cubin")
    return path


def write_wheel(folder, source_hash, data=b"from the wheel", claimed=b"from the wheel"):
    folder.mkdir()
    (folder / "tiny.sm_80.cubin").write_bytes(data)
    entry = {"sha256": hashlib.sha256(claimed).hexdigest()}
    manifest = {"format": 1, "source_hash": source_hash, "files": {"tiny.sm_80.cubin": entry}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def no_nvrtc(architecture):
    raise BuildError(NO_NVRTC)


# What serves which GPU


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "compute_80"),
        ((10, 3), "compute_80"),
        ((11, 0), "compute_80"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), "compute_80"),
    ],
)
def test_each_gpu_gets_the_image_that_runs_on_it(capability, architecture):
    assert build.architecture_for(capability) == architecture


def test_a_spark_falls_back_to_ptx():
    assert build.architectures_for((12, 1)) == ("sm_120", "compute_80")


@pytest.mark.parametrize("unit", build.UNITS, ids=lambda unit: unit.name)
def test_every_unit_is_built_for_known_architectures(unit):
    assert set(unit.architectures) <= set(build.ARCHITECTURES)


# Source


def test_line_ends_do_not_make_another_source(tmp_path):
    unix = write_source(tmp_path / "unix")
    windows = write_source(tmp_path / "windows", TINY.replace("\n", "\r\n"))
    assert unix.hash == windows.hash


def test_any_change_makes_another_source(tmp_path, monkeypatch):
    hashes = {write_source(tmp_path / "one").hash}
    hashes.add(write_source(tmp_path / "two", TINY + "\n").hash)
    (tmp_path / "one" / "params.h").rename(tmp_path / "one" / "renamed.h")
    hashes.add(Source(tmp_path / "one").hash)
    monkeypatch.setattr("nox_kernels.cuda_source.FLAGS", ("--std=c++20",))
    hashes.add(write_source(tmp_path / "two", TINY + "\n").hash)
    assert len(hashes) == 4


def test_includes_are_spelled_from_the_root(tmp_path):
    source = write_source(tmp_path)
    assert '#include "primitives/value.cuh"' in source.text["instances/tiny.cu"]
    assert '#include "params.h"' in source.text["primitives/value.cuh"]


# Compiling


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", [*build.ARCHITECTURES, "compute_80"])
def test_a_unit_compiles_from_a_folder_with_an_awkward_name(tmp_path, real_nvrtc, target):
    source = write_source(tmp_path / "csrc f\u00fcr Nox")
    image, log = build.compile_unit(UNIT, target, real_nvrtc, source)
    assert image.startswith(b"\x7fELF") == target.startswith("sm_")
    assert b"tiny" in image
    assert "error" not in log


@pytest.mark.nvrtc
def test_the_same_source_gives_the_same_bytes(tmp_path, real_nvrtc):
    images = {
        build.compile_unit(UNIT, "sm_80", real_nvrtc, write_source(tmp_path / name)).image
        for name in ("one", "two")
    }
    assert len(images) == 1


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("tiny", "line"),
    [
        (TINY.replace("value(", "valve("), 'tiny.cu(5): error: identifier "valve" is undefined'),
        (TINY.replace("value.cuh", "valve.cuh"), 'cannot open source file "../primitives/valve'),
    ],
)
def test_a_compile_error_is_told_with_its_line(tmp_path, real_nvrtc, tiny, line):
    source = write_source(tmp_path, tiny)
    with pytest.raises(BuildError) as error:
        build.compile_unit(UNIT, "sm_80", real_nvrtc, source)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_told(tmp_path, real_nvrtc):
    assert not real_nvrtc.supports("sm_999")
    with pytest.raises(BuildError, match=r"instances/tiny.cu does not compile: .*architecture"):
        build.compile_unit(UNIT, "sm_999", real_nvrtc, write_source(tmp_path))


def test_a_missing_source_is_told(tmp_path, compiler):
    (tmp_path / "csrc").mkdir()
    with pytest.raises(BuildError, match=r"instances/tiny.cu is missing: install Nox again"):
        build.compile_unit(UNIT, "sm_80", compiler, Source(tmp_path / "csrc"))


# Cache


def test_an_image_is_compiled_once_and_then_read(make_finder, compiler, caplog):
    caplog.set_level(logging.INFO, "nox")
    texts = []
    first = make_finder().find(UNIT, "sm_80", texts.append)
    second = make_finder().find(UNIT, "sm_80", texts.append)
    assert first.data == second.data == b"instances/tiny.cu --gpu-architecture=sm_80"
    assert first.origin == "compiled with NVRTC 12.8 at libnvrtc.so.12"
    assert second.origin.startswith("cache, ")
    assert compiler.num_calls == 1
    assert texts == [record.getMessage() for record in caplog.records]
    before, after = texts
    assert "compiling its GPU kernels (tiny) for sm_80, once; about 5 seconds." in before
    assert " s, kept in " in after


def test_other_architectures_and_ptx_have_images_of_their_own(make_finder, compiler, tmp_path):
    images = {make_finder().find(UNIT, target).data for target in UNIT.targets}
    assert len(images) == compiler.num_calls == 3
    kept = {path.name for path in (tmp_path / "cache").rglob("tiny.*") if path.suffix != ".lock"}
    assert kept == {"tiny.sm_80.cubin", "tiny.sm_120.cubin", "tiny.compute_80.ptx"}


def test_another_nvrtc_has_a_cache_of_its_own(make_finder, compiler):
    make_finder().find(UNIT, "sm_80")
    compiler.version_text = "13.0"
    make_finder().find(UNIT, "sm_80")
    assert compiler.num_calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-1],
        lambda content: b"X" + content[1:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: hashlib.sha256(b"").digest(),  # fits an empty image
    ],
    ids=["empty", "short", "cut", "changed", "other digest", "no image"],
)
def test_a_damaged_cache_file_is_compiled_again(make_finder, compiler, tmp_path, caplog, damage):
    image = make_finder().find(UNIT, "sm_80")
    path = cached_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert make_finder().find(UNIT, "sm_80").data == image.data
    assert compiler.num_calls == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning == f"Nox: {path} is damaged; it is compiled again."
    assert path.read_bytes() == whole


@pytest.mark.parametrize("place", ["file", "nowhere"])
def test_a_cache_that_cannot_be_written_is_done_without(
    make_finder, compiler, tmp_path, caplog, place
):
    (tmp_path / "file").write_text("in the way")
    finder = make_finder(cache_dir=None if place == "nowhere" else tmp_path / "file")
    for target in ("sm_80", "sm_120", "sm_80"):
        assert target.encode() in finder.find(UNIT, target).data
    assert compiler.num_calls == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == (place == "file")
    assert all("cannot be written" in w and "NOX_CACHE_DIR" in w for w in warnings)


def test_a_write_that_fails_leaves_nothing_behind(make_finder, tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    make_finder().find(UNIT, "sm_80")
    assert [p.suffix for p in (tmp_path / "cache").rglob("*") if p.is_file()] in ([], [".lock"])


def test_eight_threads_compile_once(make_finder, compiler):
    finder, images, texts = make_finder(), [], []
    start = threading.Barrier(8)

    def ask():
        start.wait()
        images.append(finder.find(UNIT, "sm_80", texts.append))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 8
    assert len(set(images)) == 1
    assert compiler.num_calls == 1
    assert len(texts) == 2


PROCESS = """
import sys, time
from pathlib import Path
from nox_kernels.build import ImageFinder, Unit
from nox_kernels.cuda_source import Source
from nox_kernels.nvrtc import Compiled

folder = Path(sys.argv[1])

class Compiler:
    version_text, path = "12.8", Path("libnvrtc.so.12")

    def compile(self, *args):
        with (folder / "compiled").open("a") as file:
            file.write("x")
        time.sleep(1)
        return Compiled(b"image", "")

unit = Unit("tiny", ("sm_80",), {}, None)
finder = ImageFinder(Source(folder / "csrc"), None, folder / "cache", lambda _: Compiler())
print("ready", flush=True)
sys.stdin.readline()
print(finder.find(unit, "sm_80").data.decode())
"""


def test_two_processes_compile_once(tmp_path):
    write_source(tmp_path / "csrc")
    root = Path(build.__file__).resolve().parent.parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["image\n"] * 2
    assert (tmp_path / "compiled").read_text() == "x"


# Data wheel


def test_the_data_wheel_comes_first(make_finder, compiler, tmp_path):
    finder = make_finder()
    wheel_dir = write_wheel(tmp_path / "wheel", finder.source.hash)
    image = make_finder(wheel_dir, open_nvrtc=no_nvrtc).find(UNIT, "sm_80")
    assert image.data == b"from the wheel"
    assert image.origin == "data wheel, tiny.sm_80.cubin"


def test_what_the_wheel_lacks_is_compiled(make_finder, compiler, tmp_path, caplog):
    wheel_dir = write_wheel(tmp_path / "wheel", make_finder().source.hash)
    make_finder(wheel_dir).find(UNIT, "sm_120")
    assert compiler.num_calls == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_wheel_of_other_source_is_ignored_and_said_once(make_finder, compiler, tmp_path, caplog):
    finder = make_finder(write_wheel(tmp_path / "wheel", "0" * 64))
    for target in ("sm_80", "sm_120"):
        assert finder.find(UNIT, target).data != b"from the wheel"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "belongs to another version of Nox and is ignored" in warning


@pytest.mark.parametrize("lost", [False, True])
def test_a_damaged_file_of_the_wheel_is_never_loaded(make_finder, tmp_path, caplog, lost):
    source_hash = make_finder().source.hash
    wheel_dir = write_wheel(tmp_path / "wheel", source_hash, data=b"from the whee")
    if lost:
        (wheel_dir / "tiny.sm_80.cubin").unlink()
    image = make_finder(wheel_dir).find(UNIT, "sm_80")
    assert image.data == b"instances/tiny.cu --gpu-architecture=sm_80"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "tiny.sm_80.cubin of the package nox-kernels is damaged" in warning
    assert "--force-reinstall" in warning


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"format": 1, "source_hash": "HASH"}', "\x00"]
)
def test_a_damaged_manifest_is_told(make_finder, compiler, tmp_path, caplog, text):
    source_hash = make_finder().source.hash
    wheel_dir = write_wheel(tmp_path / "wheel", source_hash)
    (wheel_dir / "manifest.json").unlink()
    if text is not None:
        (wheel_dir / "manifest.json").write_text(text.replace("HASH", source_hash))
    make_finder(wheel_dir).find(UNIT, "sm_80")
    assert compiler.num_calls == 1
    assert "The package nox-kernels is damaged." in caplog.text


def test_an_installed_wheel_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "WHEEL_PACKAGE", "nox_cubins_of_a_test")
    assert build.installed_wheel() is None
    folder = tmp_path / build.WHEEL_PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert build.installed_wheel() == folder


# Refusals and the doctor's words


def test_a_unit_is_refused_on_an_architecture_it_is_not_for(make_finder):
    with pytest.raises(BuildError, match=r"tiny are for sm_80, sm_120, compute_80.*needs sm_90a"):
        make_finder().find(UNIT, "sm_90a")


def test_without_nvrtc_and_wheel_there_is_a_reason(make_finder):
    with pytest.raises(BuildError, match=NO_NVRTC):
        make_finder(open_nvrtc=no_nvrtc).find(UNIT, "sm_80")


def test_the_doctor_tells_where_an_image_comes_from(make_finder, compiler, tmp_path):
    compile_now = "would be compiled with NVRTC 12.8 at libnvrtc.so.12"
    assert make_finder().describe(UNIT, "sm_80") == compile_now
    assert compiler.num_calls == 0
    make_finder().find(UNIT, "sm_80")
    assert make_finder().describe(UNIT, "sm_80") == f"cache, {cached_file(tmp_path)}"
    finder = make_finder(write_wheel(tmp_path / "wheel", make_finder().source.hash))
    assert finder.describe(UNIT, "sm_80") == "data wheel, tiny.sm_80.cubin"
    other = make_finder(write_wheel(tmp_path / "other", "0" * 64))
    assert "ignored" in other.describe(UNIT, "sm_120")
    assert make_finder(open_nvrtc=no_nvrtc).describe(UNIT, "sm_80") == f"none: {NO_NVRTC}"
    assert make_finder().describe(UNIT, "sm_89").startswith("none: ")


# Finding NVRTC


def test_no_nvrtc_at_all_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setattr(nvrtc, "_candidates", lambda cuda_path: iter(()))
    with pytest.raises(BuildError) as error:
        build.open_nvrtc("sm_80")
    assert str(error.value) == (
        "This machine has no NVRTC, NVIDIA's run-time compiler. Run: pip install nox-kernels, "
        "or: pip install nvidia-cuda-nvrtc-cu12==12.8.93"
    )


def test_a_named_nvrtc_is_the_only_one_considered(tmp_path):
    with pytest.raises(BuildError, match=r"NVRTC at .*nothing.so does not load"):
        build.open_nvrtc("sm_80", tmp_path / "nothing.so")


def test_an_old_nvrtc_is_passed_over(monkeypatch):
    class OldNvrtc:
        def __init__(self, path):
            self.path = Path(path)
            self.version_text = path.partition("-")[2]

        def supports(self, architecture):
            return architecture != "sm_120" or self.version_text == "12.8"

    monkeypatch.setattr(nvrtc, "Nvrtc", OldNvrtc)
    monkeypatch.setattr(nvrtc, "_candidates", lambda cuda_path: iter(["nvrtc-12.6", "nvrtc-12.8"]))
    assert build.open_nvrtc("sm_80").version_text == "12.6"
    assert build.open_nvrtc("sm_120").version_text == "12.8"
    with pytest.raises(
        BuildError, match=r"NVRTC 12.6 at nvrtc-12.6 cannot compile for sm_120. Run: pip install"
    ):
        build.open_nvrtc("sm_120", "nvrtc-12.6")


@pytest.mark.nvrtc
def test_an_nvrtc_without_its_second_file_is_refused(tmp_path, real_nvrtc):
    lonely = tmp_path / real_nvrtc.path.name
    lonely.symlink_to(real_nvrtc.path)
    with pytest.raises(BuildError, match=r"does not load \(.*nvrtc-builtins"):
        build.open_nvrtc("sm_80", lonely)


@pytest.mark.parametrize(
    ("is_windows", "pattern", "found", "passed_over"),
    [
        (
            False,
            "libnvrtc*.so*",
            [
                "site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                "site/nvidia/cu13/lib/libnvrtc.so.13",
                "cuda/lib64/libnvrtc.so.12",
            ],
            [
                "site/nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
                "site/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8",
                "site/nvidia/cu13/lib/libnvrtc-builtins.alt.so.13.0",
            ],
        ),
        (
            True,
            "nvrtc64_*.dll",
            [
                "site/nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll",
                "site/nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll",
                "torch/lib/nvrtc64_130_0.dll",
                "cuda/bin/nvrtc64_120_0.dll",
            ],
            [
                "site/nvidia/cuda_nvrtc/bin/nvrtc64_120_0.alt.dll",
                "site/nvidia/cuda_nvrtc/bin/nvrtc-builtins64_128.dll",
            ],
        ),
    ],
    ids=["linux", "windows"],
)
def test_nvrtc_is_searched_in_order(tmp_path, monkeypatch, is_windows, pattern, found, passed_over):
    for name in [*found, *passed_over, "torch/__init__.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(nvrtc, "_IS_WINDOWS", is_windows)
    monkeypatch.setattr(nvrtc, "_PATTERN", pattern)
    monkeypatch.setattr(nvrtc.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    spec = type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")})
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    candidates = [
        path for path in nvrtc._candidates(str(tmp_path / "cuda")) if tmp_path in path.parents
    ]
    assert candidates == [tmp_path / name for name in found]


# The environment


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("NOX_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build.cache_dir() == Path("/home/user/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert build.cache_dir() == Path("/xdg")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert build.cache_dir() == Path("/local")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build.cache_dir() == Path("/home/user/Library/Caches")
    monkeypatch.setenv("NOX_CACHE_DIR", "/mine")
    assert build.cache_dir() == Path("/mine")


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    for name in ("NOX_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert build.cache_dir() is None
