"""Driver: load a cubin and launch it on torch's current stream."""

import ctypes
import threading
from collections.abc import Callable, Iterable

import torch

from . import build
from .build import Image, Progress
from .cuda_api import REFUSED_IMAGE, CudaApi, open_library
from .errors import BuildError, DriverError

_MAX_GRID = (2**31 - 1, 65535, 65535)
_DEFAULT_SHARED_BYTES = 48 << 10  # above, a kernel has to ask
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute


class Kernel:
    """One kernel on one device.

    Args:
        api: The driver API.
        function: Its CUfunction.
        device_idx: Its device.
        title: What errors call it.
    """

    def __init__(self, api: CudaApi, function: ctypes.c_void_p, device_idx: int, title: str):
        self.title = title
        self.device_idx = device_idx
        self._api = api
        self._function = function
        self._lock = threading.Lock()
        self._params_type: type[ctypes.Structure] | None = None
        self._shared_bytes = _DEFAULT_SHARED_BYTES

    def launch(
        self,
        params: ctypes.Structure,
        *,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
    ) -> None:
        """Queue one launch on torch's current stream of the kernel's device.

        Args:
            params: The kernel's one parameter, passed by value.
            grid: CTAs in x, y, z.
            block: Threads of a CTA.
            shared_bytes: Dynamic shared memory of a CTA.

        Raises:
            DriverError: The driver refuses it, or an earlier kernel has failed.
        """
        if not all(1 <= size <= most for size, most in zip(grid, _MAX_GRID, strict=True)):
            raise DriverError(f"{self.title} cannot run on a launch grid of {grid}.")
        if type(params) is not self._params_type or shared_bytes > self._shared_bytes:
            self._admit(params, shared_bytes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = torch.cuda.current_stream(self.device_idx).cuda_stream
        api = self._api
        api.push(self.device_idx)
        code = api.library.cuLaunchKernel(
            self._function, *grid, block, 1, 1, shared_bytes, stream, pointers, None
        )
        api.pop()
        if code != 0:
            api.check(
                code,
                f"launch {self.title} with a grid of {grid}, {block} threads and "
                f"{shared_bytes:,} bytes of shared memory",
            )

    def _admit(self, params: ctypes.Structure, shared_bytes: int) -> None:
        """What a first launch needs: the right struct, and leave for more shared memory."""
        with self._lock, self._api.current(self.device_idx):
            if shared_bytes > self._shared_bytes:
                code = self._api.library.cuFuncSetAttribute(
                    self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
                )
                action = f"give {self.title} {shared_bytes:,} bytes of shared memory"
                self._api.check(code, action)
                self._shared_bytes = shared_bytes
            self._check_size(ctypes.sizeof(params))
            self._params_type = type(params)

    def _check_size(self, size_bytes: int) -> None:
        """A struct unlike the one in params.h would make the kernel use wild addresses."""
        if not self._api.has("cuFuncGetParamInfo"):
            return
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        code = self._api.library.cuFuncGetParamInfo(
            self._function, 0, ctypes.byref(offset), ctypes.byref(size)
        )
        self._api.check(code, f"describe the parameter of {self.title}")
        if size.value != size_bytes:
            raise DriverError(
                f"{self.title} takes a parameter of {size.value} bytes, not {size_bytes}: files "
                "of different versions of Nox are mixed; install it again."
            )


class Driver:
    """What is loaded on each device of this process.

    Args:
        api: The driver API.
        find_image: Gives the image of a unit for an architecture.
    """

    def __init__(
        self,
        api: CudaApi,
        find_image: Callable[[str, str, Progress | None], Image] = build.find_image,
    ):
        self.api = api
        self.find_image = find_image
        self._lock = threading.RLock()
        # By device index and unit: the module and its architecture.
        self._modules: dict[tuple[int, str], tuple[ctypes.c_void_p, str]] = {}
        self._kernels: dict[tuple[int, str, str], Kernel] = {}

    def kernel(self, unit_name: str, name: str, device: torch.device) -> Kernel:
        """A kernel, loaded on a device at first use; any number of threads may ask.

        Raises:
            BuildError: Its image can be neither found nor compiled.
            DriverError: The driver refuses it.
        """
        key = (_device_idx(device), unit_name, name)
        found = self._kernels.get(key)
        if found is None:
            with self._lock:
                if key not in self._kernels:
                    self._kernels[key] = self._load_kernel(*key)
                found = self._kernels[key]
        return found

    def prepare(
        self, unit_names: Iterable[str], device: torch.device, on_progress: Progress | None = None
    ) -> None:
        """Load every kernel of some units, so that nothing is compiled in the middle of a run."""
        for unit_name in unit_names:
            with self._lock:
                self._load_module(_device_idx(device), unit_name, on_progress)
            for name in build.unit_named(unit_name).register_budget:
                self.kernel(unit_name, name, device)

    def _load_kernel(self, device_idx: int, unit_name: str, name: str) -> Kernel:
        module, architecture = self._load_module(device_idx, unit_name, None)
        title = f"{name} ({architecture}, driver for CUDA {self.api.version_text()})"
        function = ctypes.c_void_p()
        library = self.api.library
        with self.api.current(device_idx):
            code = library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            self.api.check(code, f"find {title}")
            # Left to itself the driver loads the code at the first launch, which a capture forbids.
            if self.api.has("cuFuncLoad"):
                self.api.check(library.cuFuncLoad(function), f"load {title}")
        return Kernel(self.api, function, device_idx, title)

    def _load_module(
        self, device_idx: int, unit_name: str, on_progress: Progress | None
    ) -> tuple[ctypes.c_void_p, str]:
        key = (device_idx, unit_name)
        if key not in self._modules:
            if torch.cuda.is_current_stream_capturing():
                raise DriverError(
                    "Nox's GPU kernels cannot be loaded while a CUDA graph is captured: run once "
                    "before the capture."
                )
            self._modules[key] = self._first_that_loads(*key, on_progress)
        return self._modules[key]

    def _first_that_loads(
        self, device_idx: int, unit_name: str, on_progress: Progress | None
    ) -> tuple[ctypes.c_void_p, str]:
        unit = build.unit_named(unit_name)
        major, minor = torch.cuda.get_device_capability(device_idx)
        known = [a for a in build.architectures_for((major, minor)) if a in unit.targets]
        refusal = ""
        for architecture in known:
            image = self.find_image(unit_name, architecture, on_progress)
            module = ctypes.c_void_p()
            with self.api.current(device_idx):
                code = self.api.library.cuModuleLoadData(ctypes.byref(module), image.data)
            if code not in REFUSED_IMAGE:
                self.api.check(code, f"load {unit_name} ({architecture}, {image.origin})")
                return module, architecture
            refusal = refusal or (
                f"The NVIDIA driver (for CUDA {self.api.version_text()}) is too old for "
                f"{unit_name} ({architecture}, {image.origin}; {self.api.error(code)}): update it "
                "to 525 (RTX 30 and 40, Hopper) or 570 (RTX 50) or newer."
            )
        if refusal:
            raise DriverError(refusal)
        raise BuildError(
            f"Nox's GPU kernels {unit_name} are for {', '.join(unit.targets)}; this GPU has compute "
            f"capability {major}.{minor}."
        )


def _device_idx(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_opening = threading.Lock()
_drivers: list[Driver] = []  # the one of this process, once it is open


def _driver() -> Driver:
    with _opening:
        if not _drivers:
            _drivers.append(Driver(CudaApi(open_library())))
        return _drivers[0]


def kernel(unit_name: str, name: str, device: torch.device) -> Kernel:
    """A kernel, loaded on a device at first use; see `Driver.kernel`."""
    return _driver().kernel(unit_name, name, device)


def prepare(
    unit_names: Iterable[str], device: torch.device, on_progress: Progress | None = None
) -> None:
    """Load every kernel of some units ahead; see `Driver.prepare`."""
    _driver().prepare(unit_names, device, on_progress)


def driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver serves, (12, 8).

    Raises:
        DriverError: There is no driver, or it does not start.
    """
    return _driver().api.version()
