"""Build command: every unit for every architecture, checked, as files and as the data wheel."""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import build, nvrtc
from .build import Unit
from .cuda_source import FLAGS, Source
from .errors import BuildError
from .image_files import MANIFEST, MANIFEST_FORMAT, file_name
from .nvrtc import Nvrtc
from .ptxas_report import faults, resources

_ROW = "{:14} {:11} {:28} {:>9} {:>10} {:>8}"
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "nox-kernels"
version = "{version}"
description = "GPU kernels of Nox for MiniMax-H3, compiled. Data only: nox-h3 loads it."
license = "Apache-2.0"
{license_files}requires-python = ">=3.10"
dependencies = []

[tool.setuptools]
packages = ["{package}"]
include-package-data = false

[tool.setuptools.package-data]
{package} = ["*.cubin", "*.ptx", "{manifest}"]
"""
_INIT = '"""GPU kernels of Nox for MiniMax-H3, compiled; nox_kernels.build reads them."""\n'


@dataclass(frozen=True)
class BuildRequest:
    """What the command line asked for.

    Attributes:
        out: Folder for the files.
        makes_wheel: Whether to make the data wheel too, in the same folder.
        nvrtc_path: NVRTC to use, or None to search.
        takes_any_nvrtc: Whether NVRTC may be of another version than a release needs.
        architectures: The only ones to build, or () for all.
    """

    out: str
    makes_wheel: bool
    nvrtc_path: str | None
    takes_any_nvrtc: bool
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class BuiltFile:
    """One compiled unit with its row of the manifest."""

    unit: Unit
    architecture: str
    data: bytes
    kernels: dict[str, int | None]  # registers
    faults: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the file."""
        return file_name(self.unit.name, self.architecture)

    @property
    def entry(self) -> dict:
        """What the manifest says of it."""
        return {
            "sha256": hashlib.sha256(self.data).hexdigest(),
            "bytes": len(self.data),
            "unit": self.unit.name,
            "architecture": self.architecture,
            "kernels": self.kernels,
        }


def main(request: BuildRequest) -> int:
    """Compile, check and write; 0 if all went well.

    Raises:
        BuildError: A unit does not compile, or has faults; then nothing is written.
    """
    compiler = release_nvrtc(request.nvrtc_path, request.takes_any_nvrtc)
    print(f"NVRTC {compiler.version_text} at {compiler.path}\n")
    source = build.own_source()
    built = build_all(build.UNITS, request.architectures, compiler, source)
    out = Path(request.out)
    try:
        write_files(out, built, compiler, source)
        print(f"\n{len(built)} files and {MANIFEST} are in {out}")
        if request.makes_wheel:
            print(f"the data wheel is {make_wheel(out, [file.name for file in built])}")
    except OSError as error:
        raise BuildError(f"{out} cannot be written: {error.strerror}.") from error
    return 0


def release_nvrtc(path: str | None, takes_any: bool) -> Nvrtc:
    """The NVRTC to build with.

    Raises:
        BuildError: It is not of the version that a release needs.
    """
    compiler = build.open_nvrtc("sm_120", path)
    if takes_any or compiler.version == nvrtc.RELEASE_VERSION:
        return compiler
    needed = "{}.{}".format(*nvrtc.RELEASE_VERSION)
    raise BuildError(
        f"A release needs NVRTC {needed}, whose cubins load on drivers from 525 on; the one at "
        f"{compiler.path} is {compiler.version_text}. Run: {nvrtc.INSTALL}, or add --any-nvrtc "
        "for files that stay on this machine."
    )


def build_all(
    units: Iterable[Unit], architectures: tuple[str, ...], compiler: Nvrtc, source: Source
) -> list[BuiltFile]:
    """Compile units, printing a row for each kernel.

    Raises:
        BuildError: A unit does not compile or has faults, or an architecture is unknown.
    """
    units = list(units)
    known = {target for unit in units for target in unit.targets}
    unknown = [architecture for architecture in architectures if architecture not in known]
    if unknown:
        raise BuildError(f"--arch {unknown[0]} is none of {', '.join(sorted(known))}.")
    print(_ROW.format("unit", "arch", "kernel", "registers", "bytes", "seconds"))
    built = [
        _build(unit, target, compiler, source)
        for unit in units
        for target in unit.targets
        if not architectures or target in architectures
    ]
    found = [f"{file.name}: {fault}" for file in built for fault in file.faults]
    if found:
        raise BuildError("nothing was written, for there are faults:\n  " + "\n  ".join(found))
    return built


def _build(unit: Unit, target: str, compiler: Nvrtc, source: Source) -> BuiltFile:
    start = time.perf_counter()
    image, log = build.compile_unit(unit, target, compiler, source)
    seconds = time.perf_counter() - start
    if target == unit.ptx:  # has no registers yet
        print(_ROW.format(unit.name, target, "", "", len(image), f"{seconds:.1f}"))
        return BuiltFile(unit, target, image, {}, ())
    kernels = {name: used.num_registers for name, used in sorted(resources(log).items())}
    for name, num_registers in kernels.items():
        print(_ROW.format(unit.name, target, name, num_registers, len(image), f"{seconds:.1f}"))
    return BuiltFile(unit, target, image, kernels, tuple(faults(unit, log)))


def write_files(out: Path, built: list[BuiltFile], compiler: Nvrtc, source: Source) -> None:
    """Write every file and, last, the manifest. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    for file in built:
        (out / file.name).write_bytes(file.data)
    manifest = {
        "format": MANIFEST_FORMAT,
        "source_hash": source.hash,
        "flags": list(FLAGS),
        "nvrtc": compiler.version_text,
        "files": {file.name: file.entry for file in built},
    }
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    (out / MANIFEST).write_text(text, encoding="utf-8", newline="\n")


def make_wheel(out: Path, names: list[str]) -> Path:
    """Make the data wheel from files that `write_files` wrote, with setuptools.

    Returns:
        Its path, in the same folder.

    Raises:
        BuildError: setuptools could not.
    """
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        package = project / build.WHEEL_PACKAGE
        package.mkdir()
        (package / "__init__.py").write_text(_INIT, encoding="utf-8")
        for name in (*names, MANIFEST):
            (package / name).write_bytes((out / name).read_bytes())
        (project / "pyproject.toml").write_text(_project_text(project), encoding="utf-8")
        command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-index", "--wheel-dir", str(project / "wheel"), str(project)]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False
        )
        made = list((project / "wheel").glob("*.whl"))
        if done.returncode != 0 or len(made) != 1:
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise BuildError(
                f"The data wheel could not be made ({reason}). "
                "It needs: pip install --upgrade pip 'setuptools>=77'"
            )
        wheel = out / made[0].name
        wheel.write_bytes(made[0].read_bytes())
    return wheel


def _project_text(project: Path) -> str:
    text = own_license()
    if text is not None:
        (project / "LICENSE").write_bytes(text)
    return _PYPROJECT.format(
        version=own_version(),
        package=build.WHEEL_PACKAGE,
        manifest=MANIFEST,
        license_files="" if text is None else 'license-files = ["LICENSE"]\n',
    )


def own_license() -> bytes | None:
    """Text of Nox's license, in a checkout."""
    path = Path(__file__).resolve().parent.parent / "LICENSE"
    return path.read_bytes() if path.exists() else None


def own_version() -> str:
    """Nox's version: the checkout's, else the installed package's."""
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r'^name = "nox-h3"\nversion = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else metadata.version("nox-h3")
