"""Driver: the right GPU, stream and struct for every launch; every return code becomes a sentence."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from nox_kernels import build, cuda_api, driver
from nox_kernels.build import Image, Unit
from nox_kernels.cuda_api import CudaApi
from nox_kernels.driver import Driver
from nox_kernels.errors import BuildError, DriverError

UNITS = (
    Unit("attend", ("sm_90a", "sm_120"), {"sage": 168, "sparse": 168}, ptx="compute_80"),
    Unit("hopper", ("sm_90a",), {"hop": 168}, ptx=None),
)
GPU = [torch.device("cuda", idx) for idx in range(3)]
CONTEXT, STREAM, MODULE, FUNCTION = 0xC0, 0x500, 0x1000, 0xF000
ERRORS = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available"),
    218: ("CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"),
    222: ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with ..."),
    500: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
}


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("count", ctypes.c_int))


class OtherParams(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


class FakeCuda:
    """Stands for libcuda: plays the calls that Nox makes and keeps what it was told."""

    def __init__(self, without=()):
        self.calls = []  # (function, argument that tells the calls apart)
        self.codes = {}  # function -> codes of its next calls, then 0
        self.launches = []
        self.threads = threading.local()
        self.version = 12080
        names = [*cuda_api._ARGUMENTS, *cuda_api._OPTIONAL_ARGUMENTS]
        for name in names:
            if name not in without:
                setattr(self, name, self.make_function(name))

    def make_function(self, name):
        # like a function of ctypes, it takes argtypes and restype
        def function(*args):
            told = getattr(self, f"_{name}")(*args)
            self.calls.append((name, told))
            return self.codes.get(name, []).pop(0) if self.codes.get(name) else 0

        return function

    @property
    def contexts(self):
        """Contexts current on this thread, the last one on top."""
        if not hasattr(self.threads, "stack"):
            self.threads.stack = []
        return self.threads.stack

    def count(self, name):
        return sum(call[0] == name for call in self.calls)

    def _cuInit(self, flags):  # noqa: N802
        return flags

    def _cuDriverGetVersion(self, out):  # noqa: N802
        out._obj.value = self.version

    def _cuGetErrorName(self, code, out):  # noqa: N802
        out._obj.value = ERRORS[code][0].encode() if code in ERRORS else None

    def _cuGetErrorString(self, code, out):  # noqa: N802
        out._obj.value = ERRORS[code][1].encode() if code in ERRORS else None

    def _cuDeviceGet(self, out, idx):  # noqa: N802
        out._obj.value = idx + 10
        return idx

    def _cuDevicePrimaryCtxRetain(self, out, device):  # noqa: N802
        out._obj.value = CONTEXT + device - 10
        return device

    def _cuCtxPushCurrent_v2(self, context):  # noqa: N802
        self.contexts.append(context.value)
        return context.value

    def _cuCtxPopCurrent_v2(self, out):  # noqa: N802
        out._obj.value = self.contexts.pop()

    def _cuModuleLoadData(self, out, image):  # noqa: N802
        assert self.contexts
        out._obj.value = MODULE + self.contexts[-1]
        return image

    def _cuModuleGetFunction(self, out, module, name):  # noqa: N802
        assert module.value == MODULE + self.contexts[-1]
        out._obj.value = FUNCTION + self.contexts[-1]
        return name

    def _cuFuncLoad(self, function):  # noqa: N802
        return function.value

    def _cuFuncGetParamInfo(self, function, idx, offset, size):  # noqa: N802
        size._obj.value = ctypes.sizeof(Params)

    def _cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        assert attribute == 8
        return value

    def _cuLaunchKernel(self, function, *args):  # noqa: N802
        *shape, stream, pointers, extra = args
        assert extra is None
        assert self.contexts, "no context is current"
        params = Params.from_address(pointers[0])
        self.launches.append(
            SimpleNamespace(
                function=function.value,
                context=self.contexts[-1],
                grid=tuple(shape[:3]),
                block=tuple(shape[3:6]),
                shared_bytes=shape[6],
                stream=stream,
                params=(params.out, params.count),
            )
        )


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Three Hoppers; what torch says of them."""
    state = SimpleNamespace(capability=(9, 0), current=0, capturing=False)
    cuda = torch.cuda
    monkeypatch.setattr(build, "UNITS", UNITS)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: state.capability)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM + device)
    )
    return state


@pytest.fixture
def library():
    return FakeCuda()


@pytest.fixture
def images():
    """What find_image was asked for."""
    return []


@pytest.fixture
def loader(library, images):
    def find_image(unit_name, architecture, on_progress):
        images.append((unit_name, architecture))
        return Image(f"{unit_name} {architecture}".encode(), "test image")

    return Driver(CudaApi(library), find_image)


def launch(kernel, params=None, **changes):
    shape = {"grid": (132, 2, 3), "block": 384, "shared_bytes": 1024} | changes
    kernel.launch(params or Params(0x7F0000000000, 77), **shape)


# Launching


@pytest.mark.parametrize("device", GPU, ids=str)
def test_a_launch_goes_to_its_own_gpu_and_stream(loader, library, device):
    launch(loader.kernel("attend", "sage", device))
    (one,) = library.launches
    assert one.context == CONTEXT + device.index
    assert one.function == FUNCTION + one.context
    assert one.stream == STREAM + device.index
    assert (one.grid, one.block, one.shared_bytes) == ((132, 2, 3), (384, 1, 1), 1024)
    assert one.params == (0x7F0000000000, 77)


def test_a_device_without_index_is_the_current_one(loader, library, machine):
    machine.current = 2
    launch(loader.kernel("attend", "sage", torch.device("cuda")))
    assert library.launches[0].context == CONTEXT + 2


def test_the_callers_gpu_is_current_again_after_a_launch(loader, library):
    library.contexts.append(0xABC)
    launch(loader.kernel("attend", "sage", GPU[1]))
    assert library.contexts == [0xABC]
    library.codes["cuLaunchKernel"] = [1]
    with pytest.raises(DriverError):
        launch(loader.kernel("attend", "sage", GPU[1]))
    assert library.contexts == [0xABC]


def test_the_primary_context_is_retained_once_a_gpu(loader, library):
    for device in (GPU[0], GPU[1], GPU[0]):
        for name in ("sage", "sparse"):
            launch(loader.kernel("attend", name, device))
    assert library.count("cuDevicePrimaryCtxRetain") == 2


def test_more_shared_memory_is_asked_for_once(loader, library):
    kernel = loader.kernel("attend", "sage", GPU[0])
    for shared_bytes in (48 << 10, 100_000, 100_000, 60_000, 200_000):
        launch(kernel, shared_bytes=shared_bytes)
    asked = [told for name, told in library.calls if name == "cuFuncSetAttribute"]
    assert asked == [100_000, 200_000]
    assert len(library.launches) == 5


@pytest.mark.parametrize(
    "grid", [(0, 1, 1), (1, 0, 1), (2**31, 1, 1), (1, 65536, 1), (1, 1, 65536)]
)
def test_a_grid_that_cuda_cannot_run_is_refused(loader, library, grid):
    with pytest.raises(DriverError, match=r"sage .* cannot run on a launch grid of"):
        launch(loader.kernel("attend", "sage", GPU[0]), grid=grid)
    assert not library.launches


def test_the_largest_grid_is_not_refused(loader, library):
    launch(loader.kernel("attend", "sage", GPU[0]), grid=(2**31 - 1, 65535, 65535))
    assert len(library.launches) == 1


def test_a_struct_of_another_size_is_never_launched(loader, library):
    kernel = loader.kernel("attend", "sage", GPU[0])
    launch(kernel)
    for _ in range(2):
        with pytest.raises(DriverError, match="a parameter of 16 bytes, not 8"):
            launch(kernel, OtherParams(1))
    assert len(library.launches) == 1


def test_an_older_driver_needs_no_newer_function():
    library = FakeCuda(without=cuda_api._OPTIONAL_ARGUMENTS)
    loader = Driver(CudaApi(library), lambda *args: Image(b"image", "test image"))
    launch(loader.kernel("attend", "sage", GPU[0]))
    assert len(library.launches) == 1


# Loading


def test_a_unit_is_loaded_once_a_gpu(loader, library, images):
    for _ in range(2):
        for device in GPU[:2]:
            for name in ("sage", "sparse"):
                loader.kernel("attend", name, device)
    assert library.count("cuModuleLoadData") == 2
    assert library.count("cuModuleGetFunction") == 4
    assert library.count("cuFuncLoad") == 4
    assert images == [("attend", "sm_90a")] * 2
    assert loader.kernel("attend", "sage", GPU[0]) is loader.kernel("attend", "sage", GPU[0])
    assert loader.kernel("attend", "sage", GPU[0]) is not loader.kernel("attend", "sage", GPU[1])


def test_eight_threads_load_once(library):
    def find_image(*args):
        threading.Event().wait(0.05)
        return Image(b"image", "test image")

    loader, start, kernels = Driver(CudaApi(library), find_image), threading.Barrier(8), []

    def use():
        start.wait()
        kernel = loader.kernel("attend", "sage", GPU[0])
        launch(kernel, shared_bytes=100_000)
        kernels.append(kernel)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == len(library.launches) == 8
    assert len(set(kernels)) == 1
    for name in (
        "cuModuleLoadData",
        "cuFuncLoad",
        "cuFuncSetAttribute",
        "cuDevicePrimaryCtxRetain",
    ):
        assert library.count(name) == 1


def test_eight_threads_open_the_driver_once(monkeypatch):
    opened = []

    def open_library():
        threading.Event().wait(0.05)
        opened.append(FakeCuda())
        return opened[-1]

    monkeypatch.setattr(driver, "open_library", open_library)
    monkeypatch.setattr(driver, "_drivers", [])
    versions = []
    threads = [
        threading.Thread(target=lambda: versions.append(driver.driver_version())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == [(12, 8)] * 8
    assert len(opened) == 1


def test_prepare_loads_every_kernel_ahead(loader, library, machine):
    loader.prepare(["attend", "hopper"], GPU[1])
    assert library.count("cuModuleLoadData") == 2
    assert library.count("cuFuncLoad") == 3
    machine.capturing = True
    for unit in UNITS:
        for name in unit.register_budget:
            launch(loader.kernel(unit.name, name, GPU[1]))
    assert len(library.launches) == 3


def test_prepare_passes_progress_on(library):
    def find_image(unit_name, architecture, on_progress):
        on_progress(f"compiling {unit_name}")
        return Image(b"image", "test image")

    texts = []
    Driver(CudaApi(library), find_image).prepare(["attend", "hopper"], GPU[0], texts.append)
    assert texts == ["compiling attend", "compiling hopper"]


def test_nothing_is_loaded_during_a_capture(loader, library, machine):
    machine.capturing = True
    with pytest.raises(DriverError, match="run once before the capture"):
        loader.kernel("attend", "sage", GPU[0])
    assert not library.count("cuModuleLoadData")
    machine.capturing = False
    loader.kernel("attend", "sage", GPU[0])


# Which image


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((9, 0), "sm_90a"), ((10, 0), "compute_80"), ((12, 0), "sm_120")],
)
def test_a_gpu_gets_its_image(loader, library, machine, capability, architecture):
    machine.capability = capability
    assert architecture in loader.kernel("attend", "sage", GPU[0]).title
    assert ("cuModuleLoadData", f"attend {architecture}".encode()) in library.calls


def test_ptx_serves_where_the_cubin_is_refused(loader, library, machine, images):
    machine.capability = (12, 1)
    library.codes["cuModuleLoadData"] = [209]
    assert "compute_80" in loader.kernel("attend", "sage", GPU[0]).title
    assert images == [("attend", "sm_120"), ("attend", "compute_80")]


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (12, 0)])
def test_a_gpu_that_a_unit_is_not_for_is_told(loader, machine, capability):
    machine.capability = capability
    with pytest.raises(BuildError) as error:
        loader.kernel("hopper", "hop", GPU[0])
    major, minor = capability
    assert str(error.value) == (
        f"Nox's GPU kernels hopper are for sm_90a; this GPU has compute capability {major}.{minor}."
    )


# Return codes


@pytest.mark.parametrize("code", [200, 209, 218, 222])
def test_an_old_driver_is_told_what_to_update_to(loader, library, code):
    library.version = 11040
    library.codes["cuModuleLoadData"] = [code] * 2
    with pytest.raises(DriverError) as error:
        loader.kernel("attend", "sage", GPU[0])
    text = str(error.value)
    assert "The NVIDIA driver (for CUDA 11.4) is too old for attend (sm_90a, test image; " in text
    assert ERRORS[code][0] in text
    assert "update it to 525 (RTX 30 and 40, Hopper) or 570 (RTX 50) or newer" in text


def test_a_kernel_that_is_not_in_its_unit_is_told(loader, library):
    library.codes["cuModuleGetFunction"] = [500]
    with pytest.raises(
        DriverError, match=r"find sage \(sm_90a, driver for CUDA 12.8\): .*NOT_FOUND"
    ):
        loader.kernel("attend", "sage", GPU[0])
    assert library.contexts == []


def test_a_refused_launch_names_kernel_gpu_and_driver(loader, library):
    library.codes["cuLaunchKernel"] = [1]
    with pytest.raises(DriverError) as error:
        launch(loader.kernel("attend", "sparse", GPU[0]))
    assert str(error.value) == (
        "The NVIDIA driver could not launch sparse (sm_90a, driver for CUDA 12.8) with a grid of "
        "(132, 2, 3), 384 threads and 1,024 bytes of shared memory: CUDA_ERROR_INVALID_VALUE, "
        "invalid argument."
    )


@pytest.mark.parametrize("code", sorted(cuda_api._STICKY))
def test_a_lost_gpu_is_told_once_and_never_tried_again(loader, library, code):
    kernel = loader.kernel("attend", "sage", GPU[0])
    library.codes["cuLaunchKernel"] = [code]
    with pytest.raises(DriverError, match="restart the program"):
        launch(kernel)
    assert len(library.launches) == 1


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncLoad",
        "cuFuncSetAttribute",
        "cuFuncGetParamInfo",
        "cuLaunchKernel",
    ],
)
def test_no_return_code_is_ignored(loader, library, function):
    library.codes[function] = [2]
    with pytest.raises(
        DriverError, match=r"CUDA_ERROR_OUT_OF_MEMORY, out of memory. Free GPU memory"
    ):
        launch(loader.kernel("attend", "sage", GPU[0]), shared_bytes=100_000)


def test_a_failed_load_can_be_tried_again(loader, library):
    library.codes["cuModuleLoadData"] = [2]
    with pytest.raises(DriverError):
        loader.kernel("attend", "sage", GPU[0])
    launch(loader.kernel("attend", "sage", GPU[0]))
    assert len(library.launches) == 1


def test_a_code_that_the_driver_does_not_know_is_shown_as_a_number(library):
    with pytest.raises(DriverError, match="could not dance: error 4321"):
        CudaApi(library).check(4321, "dance")


def test_a_driver_that_does_not_start_is_told():
    library = FakeCuda()
    library.codes["cuInit"] = [3]
    with pytest.raises(DriverError, match="could not start: CUDA_ERROR_NOT_INITIALIZED"):
        CudaApi(library)


# No driver


def test_rocm_is_told_apart_from_no_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(DriverError, match="need an NVIDIA GPU; this PyTorch is for AMD"):
        cuda_api.open_library()


def test_a_missing_driver_is_told(monkeypatch):
    def fail(name):
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(driver, "_drivers", [])
    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(
        DriverError, match=r"No NVIDIA driver was found .*: install NVIDIA's driver"
    ):
        driver.kernel("attend", "sage", GPU[0])
    with pytest.raises(DriverError, match="No NVIDIA driver was found"):
        driver.driver_version()


def test_the_version_is_cudas(loader, library):
    library.version = 13000
    assert loader.api.version() == (13, 0)
