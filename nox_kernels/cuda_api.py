"""CUDA API: the driver's functions through ctypes, every return code checked."""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator

import torch

from .errors import DriverError

# The image does not fit the driver or the GPU: INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX,
# UNSUPPORTED_PTX_VERSION.
REFUSED_IMAGE = {200, 209, 218, 222}
_OUT_OF_MEMORY = 2
# After these every later call of the process fails too: a fault of a kernel (700, 702, 710, 714
# to 719), CONTEXT_IS_DESTROYED, an uncorrectable memory or NVLink error.
_STICKY = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719}

_INT, _UINT, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_OUT_INT, _OUT_POINTER = ctypes.POINTER(_INT), ctypes.POINTER(_POINTER)
_OUT_TEXT, _OUT_SIZE = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)
_ARGUMENTS = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_OUT_INT,),
    "cuGetErrorName": (_INT, _OUT_TEXT),
    "cuGetErrorString": (_INT, _OUT_TEXT),
    "cuDeviceGet": (_OUT_INT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT_POINTER, _INT),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_OUT_POINTER,),
    "cuModuleLoadData": (_OUT_POINTER, ctypes.c_char_p),
    "cuModuleGetFunction": (_OUT_POINTER, _POINTER, ctypes.c_char_p),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuLaunchKernel": (_POINTER, *(_UINT,) * 7, _POINTER, _POINTER, _POINTER),
}
# Drivers for CUDA 12.4 and newer have these.
_OPTIONAL_ARGUMENTS = {
    "cuFuncLoad": (_POINTER,),
    "cuFuncGetParamInfo": (_POINTER, ctypes.c_size_t, _OUT_SIZE, _OUT_SIZE),
}


def open_library() -> ctypes.CDLL:
    """The driver's own library.

    Raises:
        DriverError: This is no machine with an NVIDIA driver.
    """
    if torch.version.hip is not None:
        raise DriverError("Nox's GPU kernels need an NVIDIA GPU; this PyTorch is for AMD (ROCm).")
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(
            f"No NVIDIA driver was found ({name} does not load): install NVIDIA's driver."
        ) from error


class CudaApi:
    """The driver API.

    Args:
        library: libcuda, or what stands for it in a test.
    """

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        for function, types in (*_ARGUMENTS.items(), *_OPTIONAL_ARGUMENTS.items()):
            if function in _ARGUMENTS or self.has(function):
                getattr(library, function).argtypes = types
                getattr(library, function).restype = _INT
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.check(library.cuInit(0), "start")

    def has(self, function: str) -> bool:
        """Whether this driver is new enough for a function."""
        return hasattr(self.library, function)

    def version(self) -> tuple[int, int]:
        """The newest CUDA that the driver serves, (12, 8)."""
        number = _INT()
        self.check(self.library.cuDriverGetVersion(ctypes.byref(number)), "tell its version")
        return number.value // 1000, number.value % 1000 // 10

    def version_text(self) -> str:
        """Version as "12.8"."""
        return "{}.{}".format(*self.version())

    def push(self, device_idx: int) -> None:
        """Make a device's primary context, the one torch uses, current on this thread.

        A thread that has run nothing yet has no context at all.
        """
        self.check(
            self.library.cuCtxPushCurrent_v2(self._context(device_idx)), f"use GPU {device_idx}"
        )

    def pop(self) -> None:
        """Undo the last `push`: the caller's own GPU is current again."""
        before = ctypes.c_void_p()
        self.check(self.library.cuCtxPopCurrent_v2(ctypes.byref(before)), "leave a GPU")

    @contextlib.contextmanager
    def current(self, device_idx: int) -> Iterator[None]:
        """`push`, and `pop` at the end."""
        self.push(device_idx)
        try:
            yield
        finally:
            self.pop()

    def check(self, code: int, action: str) -> None:
        """Raise DriverError where a call failed to do what `action` says."""
        if code == 0:
            return
        sentence = f"The NVIDIA driver could not {action}: {self.error(code)}."
        if code in _STICKY:
            sentence += (
                " This or an earlier GPU kernel failed, and the GPU gives this process no more "
                "results: restart the program."
            )
        elif code == _OUT_OF_MEMORY:
            sentence += " Free GPU memory and run again."
        raise DriverError(sentence)

    def error(self, code: int) -> str:
        """The driver's name of a return code and its words for it."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        self.library.cuGetErrorString(code, ctypes.byref(text))
        known = [part.value.decode(errors="replace") for part in (name, text) if part.value]
        return ", ".join(known) or f"error {code}"

    def _context(self, device_idx: int) -> ctypes.c_void_p:
        context = self._contexts.get(device_idx)
        if context is None:
            with self._lock:
                device, context = _INT(), ctypes.c_void_p()
                action = f"open GPU {device_idx}"
                self.check(self.library.cuDeviceGet(ctypes.byref(device), device_idx), action)
                # Never released: torch holds it as long as the process lives.
                code = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.value)
                self.check(code, action)
                self._contexts[device_idx] = context
        return context
