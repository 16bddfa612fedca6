"""NVRTC: find NVIDIA's run-time compiler on this machine, and call it."""

import ctypes
import ctypes.util
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import BuildError, one_line

INSTALL = "pip install nvidia-cuda-nvrtc-cu12==12.8.93"
RELEASE_VERSION = (12, 8)  # its cubins load on every driver from 525 on; those of 13 need 580
_SUCCESS, _COMPILATION_FAILED = 0, 6
_IS_WINDOWS = sys.platform == "win32"
_PATTERN = "nvrtc64_*.dll" if _IS_WINDOWS else "libnvrtc*.so*"


class Compiled(NamedTuple):
    """What came out of one compilation.

    Attributes:
        image: A cubin, or PTX as text where the architecture is virtual (compute_80).
        log: NVRTC's log, with the resource report of ptxas.
    """

    image: bytes
    log: str


class Nvrtc:
    """One NVRTC library.

    Args:
        path: Its file, or a bare name that the system's loader resolves.

    Raises:
        BuildError: It does not load, or misses its second file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._library = ctypes.CDLL(str(path))
            self.version = self._read_version()
            self._load_builtins()
        except (OSError, AttributeError) as error:
            raise BuildError(
                f"NVRTC at {path} does not load ({one_line(str(error), 200)})."
            ) from error

    @property
    def version_text(self) -> str:
        """Version as "12.8"."""
        return "{}.{}".format(*self.version)

    def supports(self, architecture: str) -> bool:
        """Whether it can compile for "sm_90a" or "compute_80"."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        return int(architecture.partition("_")[2].rstrip("a")) in list(numbers)

    def compile(
        self, name: str, text: str, headers: Mapping[str, str], flags: Sequence[str]
    ) -> Compiled:
        """Compile one translation unit.

        Args:
            name: What messages call it.
            text: Its source.
            headers: Name as included -> source. In memory, so no path of the user's machine
                has to pass through the compiler.
            flags: Command line; one of them is --gpu-architecture=....

        Raises:
            BuildError: With the compiler's first error line.
        """
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                text.encode(),
                name.encode(),
                len(headers),
                _strings(headers.values()),
                _strings(headers),
            )
        )
        try:
            code = self._library.nvrtcCompileProgram(program, len(flags), _strings(flags))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code == _COMPILATION_FAILED:
                raise BuildError(f"{name} does not compile: {_first_error(log)}")
            if code != _SUCCESS:
                raise BuildError(
                    f"{name} does not compile: {self._error(code)}; {_first_error(log)}"
                )
            is_virtual = any(flag.startswith("--gpu-architecture=compute_") for flag in flags)
            return Compiled(self._read(program, "PTX" if is_virtual else "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read_version(self) -> tuple[int, int]:
        self._declare()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def _load_builtins(self) -> None:
        # NVRTC opens its second file by bare name, which finds it next to the first one on some
        # systems only. One that is already in the process is found on all.
        major, minor = self.version
        file = f"libnvrtc-builtins.so.{major}.{minor}"
        if _IS_WINDOWS:
            file = f"nvrtc-builtins64_{major}{minor}.dll"
        if self.path.parent != Path():
            file = str(self.path.parent / file)
        ctypes.CDLL(file)

    def _declare(self) -> None:
        integer, pointer = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
        size = ctypes.POINTER(ctypes.c_size_t)
        text, texts = ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)
        arguments = {
            "nvrtcVersion": (integer, integer),
            "nvrtcGetNumSupportedArchs": (integer,),
            "nvrtcGetSupportedArchs": (integer,),
            "nvrtcCreateProgram": (pointer, text, text, ctypes.c_int, texts, texts),
            "nvrtcCompileProgram": (ctypes.c_void_p, ctypes.c_int, texts),
            "nvrtcDestroyProgram": (pointer,),
        }
        for what in ("ProgramLog", "PTX", "CUBIN"):
            arguments[f"nvrtcGet{what}Size"] = (ctypes.c_void_p, size)
            arguments[f"nvrtcGet{what}"] = (ctypes.c_void_p, text)
        for function, types in arguments.items():
            getattr(self._library, function).argtypes = types
            getattr(self._library, function).restype = ctypes.c_int
        self._library.nvrtcGetErrorString.argtypes = (ctypes.c_int,)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _error(self, code: int) -> str:
        return self._library.nvrtcGetErrorString(code).decode(errors="replace")

    def _check(self, code: int) -> None:
        if code != _SUCCESS:
            raise BuildError(f"NVRTC {self.path} failed: {self._error(code)}.")


def _strings(texts) -> ctypes.Array:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines or ["no reason given"])[0]


def find_nvrtc(architecture: str, path: str | Path | None, cuda_path: str | None) -> Nvrtc:
    """The first NVRTC of this machine that can compile for an architecture.

    Args:
        architecture: "sm_90a", "compute_80", ...
        path: The only one to consider, or None to search.
        cuda_path: Folder of an installed CUDA toolkit, if the user named one.

    Raises:
        BuildError: There is none; with each one's reason and the remedy.
    """
    reasons = []
    for candidate in [path] if path else _candidates(cuda_path):
        try:
            nvrtc = Nvrtc(candidate)
            if nvrtc.supports(architecture):
                return nvrtc
        except BuildError as error:
            reasons.append(str(error))
        else:
            reasons.append(
                f"NVRTC {nvrtc.version_text} at {nvrtc.path} cannot compile for {architecture}."
            )
    found = " ".join(reasons) or "This machine has no NVRTC, NVIDIA's run-time compiler."
    raise BuildError(f"{found} Run: pip install nox-kernels, or: {INSTALL}")


def _candidates(cuda_path: str | None) -> Iterator[str | Path]:
    """PyPI's package first, then what torch brings, then the system's."""
    for folder in _package_folders():
        yield from _libraries(folder)
    for folder in _toolkit_folders(cuda_path):
        yield from _libraries(folder)
    name = ctypes.util.find_library("nvrtc")
    if name and not _IS_WINDOWS:
        yield name


def _libraries(folder: Path) -> list[Path]:
    """Full builds of NVRTC, not its second file nor the slimmed-down `.alt` one."""
    return [
        path
        for path in sorted(folder.glob(_PATTERN))
        if "builtins" not in path.name and ".alt" not in path.name
    ]


def _package_folders() -> Iterator[Path]:
    roots = [Path(entry or ".") / "nvidia" for entry in sys.path]
    library = "bin" if _IS_WINDOWS else "lib"
    for package in ("cuda_nvrtc", "cu12", "cu13"):
        for root in roots:
            yield root / package / library
            yield root / package / library / "x86_64"
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield Path(torch.origin).parent / "lib"


def _toolkit_folders(cuda_path: str | None) -> Iterator[Path]:
    roots = [Path(cuda_path)] if cuda_path else []
    if not _IS_WINDOWS:
        roots.append(Path("/usr/local/cuda"))
    for root in roots:
        for folder in ("bin", "bin/x64") if _IS_WINDOWS else ("lib64",):
            yield root / folder
