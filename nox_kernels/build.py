"""Build: the image of each unit of CUDA source, from the data wheel, the cache, or NVRTC now."""

import functools
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cuda_source import FLAGS, Source
from .errors import BuildError, FileError
from .image_files import CachedImage, DataWheel, file_name
from .nvrtc import Compiled, Nvrtc, find_nvrtc

log = logging.getLogger("nox")

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
WHEEL_PACKAGE = "nox_kernels_cubins"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Unit:
    """One translation unit, csrc/instances/<name>.cu.

    Attributes:
        name: Its stem.
        architectures: What it is built for.
        register_budget: Kernel -> most registers it may use, as ptxas counts them.
        ptx: Virtual architecture whose PTX serves newer GPUs, or None.
        compile_seconds: For the user's patience.
    """

    name: str
    architectures: tuple[str, ...]
    register_budget: Mapping[str, int]
    ptx: str | None
    compile_seconds: int = 5

    @property
    def targets(self) -> tuple[str, ...]:
        """Everything that it is built for, PTX included."""
        return (*self.architectures, *((self.ptx,) if self.ptx else ()))


UNITS = (
    Unit(
        "pack",
        ARCHITECTURES,
        {
            "nox_finish_sample": 64,
            **{
                f"nox_{op}_{dtype}": budget
                for dtype in ("bf16", "f16")
                for op, budget in (
                    ("sample", 64),
                    ("pack", 128),
                    ("pack_faithful", 128),
                    ("flag_values", 64),
                    ("pack_e4m3", 128),
                )
            },
        },
        ptx="compute_80",
    ),
    Unit("attend_sm90", ("sm_90a",), {"nox_attend_int8": 168, "nox_attend_e4m3": 168}, ptx=None),
)


@dataclass(frozen=True)
class Image:
    """A compiled unit.

    Attributes:
        data: Cubin, or PTX.
        origin: Where it came from, for the user.
    """

    data: bytes
    origin: str


def compile_unit(
    unit: Unit, architecture: str, nvrtc: Nvrtc, source: Source | None = None
) -> Compiled:
    """Compile a unit for one architecture.

    Raises:
        BuildError: With the compiler's first error line.
    """
    source = source or own_source()
    name = f"instances/{unit.name}.cu"
    if name not in source.text:
        raise BuildError(f"Nox's source {name} is missing: install Nox again.")
    flags = (f"--gpu-architecture={architecture}", *FLAGS)
    return nvrtc.compile(name, source.text[name], source.headers, flags)


class ImageFinder:
    """Finds images, and keeps those it had to compile.

    Args:
        source: What an image has to be built from.
        wheel_dir: Folder of the data wheel, or None.
        cache_dir: Folder of the cache, or None to keep nothing.
        open_nvrtc: Gives an NVRTC for an architecture, or raises BuildError.
    """

    def __init__(
        self,
        source: Source,
        wheel_dir: Path | None,
        cache_dir: Path | None,
        open_nvrtc: Callable[[str], Nvrtc],
    ):
        self.source = source
        self.wheel = DataWheel.open(wheel_dir, source.hash)
        self.cache_dir = cache_dir
        self.open_nvrtc = open_nvrtc
        self._images: dict[tuple[str, str], Image] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._said: set[str] = set()

    def find(self, unit: Unit, architecture: str, on_progress: Progress | None = None) -> Image:
        """The image of a unit, compiled now if it must be; any number of threads may ask.

        Raises:
            BuildError: It can be neither found nor compiled.
        """
        _check_target(unit, architecture)
        key = (unit.name, architecture)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._images:
                self._images[key] = self._from_wheel(*key) or self._from_cache(
                    unit, architecture, on_progress
                )
            return self._images[key]

    def describe(self, unit: Unit, architecture: str) -> str:
        """Which file would serve, or why none does; compiles nothing."""
        name = file_name(unit.name, architecture)
        try:
            _check_target(unit, architecture)
            if self.wheel.read(name) is not None:
                return f"data wheel, {name}"
            nvrtc = self.open_nvrtc(architecture)
        except (BuildError, FileError) as error:
            return f"none: {error}"
        cached = self._cached(name, nvrtc)
        if cached is not None and cached.path.exists():
            return f"cache, {cached.path}"
        ignored = f" ({self.wheel.fault})" if self.wheel.fault else ""
        return f"would be compiled with NVRTC {nvrtc.version_text} at {nvrtc.path}{ignored}"

    def _from_wheel(self, unit_name: str, architecture: str) -> Image | None:
        name = file_name(unit_name, architecture)
        if self.wheel.fault:
            self._say_once(self.wheel.fault)
        try:
            data = self.wheel.read(name)
        except FileError as error:
            self._say_once(str(error))
            return None
        return None if data is None else Image(data, f"data wheel, {name}")

    def _from_cache(self, unit: Unit, architecture: str, on_progress: Progress | None) -> Image:
        nvrtc = self.open_nvrtc(architecture)
        cached = self._cached(file_name(unit.name, architecture), nvrtc)
        if cached is None:
            return self._compile(unit, architecture, nvrtc, None, on_progress)
        data = cached.read()
        if data is None:
            with cached.lock():
                data = cached.read()  # another process may have been first
                if data is None:
                    return self._compile(unit, architecture, nvrtc, cached, on_progress)
        return Image(data, f"cache, {cached.path}")

    def _compile(
        self,
        unit: Unit,
        architecture: str,
        nvrtc: Nvrtc,
        cached: CachedImage | None,
        on_progress: Progress | None,
    ) -> Image:
        def tell(text: str) -> None:
            log.info("Nox: %s", text)
            if on_progress is not None:
                on_progress(f"Nox: {text}")

        kernels = f"its GPU kernels ({unit.name}) for {architecture}"
        tell(f"compiling {kernels}, once; about {unit.compile_seconds} seconds.")
        start = time.perf_counter()
        data = compile_unit(unit, architecture, nvrtc, self.source).image
        origin = f"compiled with NVRTC {nvrtc.version_text} at {nvrtc.path}"
        kept = "not kept"
        if cached is not None:
            try:
                cached.write(data)
                kept = f"kept in {cached.path}"
            except OSError as error:
                self._say_once(
                    f"{cached.path.parent} cannot be written ({error.strerror}): its GPU kernels "
                    "are compiled again at each start. Set NOX_CACHE_DIR to a folder of yours."
                )
        tell(f"compiled {kernels} in {time.perf_counter() - start:.1f} s, {kept}.")
        return Image(data, origin)

    def _cached(self, name: str, nvrtc: Nvrtc) -> CachedImage | None:
        if self.cache_dir is None:
            return None
        version = f"{self.source.hash[:16]}-nvrtc{nvrtc.version_text}"
        return CachedImage(self.cache_dir / "nox" / "kernels" / version / name)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("Nox: %s", sentence)


def _check_target(unit: Unit, architecture: str) -> None:
    if architecture not in unit.targets:
        built = ", ".join(unit.targets)
        raise BuildError(
            f"Nox's GPU kernels {unit.name} are for {built}; this GPU needs {architecture}."
        )


def architectures_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """What to load on a GPU of a compute capability, best first.

    A cubin serves its own major version from its minor version on; only 9.0 runs sm_90a. PTX of
    compute_80 serves what is newer than every cubin.
    """
    major, minor = capability
    if capability < (8, 0):
        return ()
    if major == 8:
        return ("sm_89",) if minor >= 9 else ("sm_86",) if minor >= 6 else ("sm_80",)
    if capability == (9, 0):
        return ("sm_90a",)
    # 12.1 (DGX Spark) has been reported to refuse plain sm_120.
    return ("sm_120", "compute_80") if major == 12 else ("compute_80",)


def architecture_for(capability: tuple[int, int]) -> str | None:
    """The first choice of `architectures_for`; None for a GPU that Nox does not serve."""
    return next(iter(architectures_for(capability)), None)


def unit_named(name: str) -> Unit:
    """The row of UNITS with that name."""
    return next(unit for unit in UNITS if unit.name == name)


@functools.cache
def own_source() -> Source:
    """Nox's CUDA source, as it was when first asked for."""
    return Source(Path(__file__).resolve().parent / "csrc")


def source_hash() -> str:
    """sha256 of Nox's CUDA source and the compiler's flags, in hex."""
    return own_source().hash


_opening = threading.Lock()


@functools.cache
def _finder() -> ImageFinder:
    return ImageFinder(own_source(), installed_wheel(), cache_dir(), open_nvrtc)


def _own_finder() -> ImageFinder:
    with _opening:  # functools.cache lets two threads in at once
        return _finder()


def find_image(unit_name: str, architecture: str, on_progress: Progress | None = None) -> Image:
    """The image of one of UNITS; see `ImageFinder.find`."""
    return _own_finder().find(unit_named(unit_name), architecture, on_progress)


def describe_image(unit_name: str, architecture: str) -> str:
    """Which file would serve one of UNITS; see `ImageFinder.describe`."""
    return _own_finder().describe(unit_named(unit_name), architecture)


def open_nvrtc(architecture: str, path: str | Path | None = None) -> Nvrtc:
    """NVRTC on this machine, for an architecture; see `nvrtc.find_nvrtc`."""
    return find_nvrtc(architecture, path, _setting("CUDA_PATH"))


def installed_wheel() -> Path | None:
    """Folder of the data wheel, if it is installed."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]) if folders else None


def cache_dir() -> Path | None:
    """Where this user's programs keep what they can make again; None without a home folder."""
    own = _setting("NOX_CACHE_DIR")
    if own:
        return Path(own)
    try:
        if sys.platform == "win32":
            return Path(_setting("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches"
        return Path(_setting("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container's user without an entry in passwd
        return None


def _setting(name: str) -> str | None:
    return os.environ.get(name)  # noqa: TID251
