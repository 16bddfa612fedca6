"""Doctor: says what this machine can run, by running it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch

from . import build
from .attention import attend_layer
from .capability import KernelCase, KernelSpec, passed_over, pick, prepare
from .driver import driver_version
from .errors import BuildError, DriverError, NoKernelError, NoxError, one_line
from .reference import dense_attention
from .request import PRECISIONS
from .sequence import t2va_sequence
from .trial import kept_keys, trial_layer

# The self-test's problem.
NUM_HEADS = 2
HEAD_DIM = 128
# Relative error against float64 attention, random normal input.
ERROR_LIMIT = {"accurate": 0.020, "faithful": 0.045}
OPTIONAL_PACKAGES = (
    ("av", "writes videos"),
    ("diffusers", "runs the demo"),
    ("transformers", "the demo's text encoder, with --model"),
    ("matplotlib", "draws the route picture"),
    ("comfy-kitchen", "ComfyUI's own kernels"),
    ("sageattention", "not needed by Nox"),
)


def main() -> int:
    """Print the report; 0 if everything that this machine should run works, else 1."""
    devices = find_devices()
    print("Nox doctor")
    print(f"  Nox {package_version('nox-h3') or 'in a checkout, not installed'}")
    print(f"  Python {platform.python_version()} on {platform.platform()}")
    print(f"  PyTorch {torch.__version__}, for {describe_build()}")
    print(f"  NVIDIA driver: {describe_driver()}")
    print(f"  NVRTC, which compiles GPU kernels: {describe_nvrtc(devices)}")
    print("\nDevices")
    for device in devices:
        print(f"  {device}: {describe_device(device)}")
    print("\nWhat computes attention (modes sage, sparse and veda)")
    choices = [Choice.on(device, precision) for device in devices for precision in PRECISIONS]
    for choice in choices:
        print(f"  {choice.title}: {choice}")
    print("\nFiles of the GPU kernels")
    print("\n".join(f"  {line}" for line in describe_files(choices)) or "  none is needed here")
    print("\nOptional packages")
    for name, purpose in OPTIONAL_PACKAGES:
        print(f"  {name} ({purpose}): {package_version(name) or 'not installed'}")
    print("\nSelf-test: relative error against float64")
    is_well = not any(choice.is_broken for choice in choices)
    for choice in choices:
        if choice.spec is not None:
            is_well = _print_self_test(choice) and is_well
    print("\nEverything works." if is_well else "\nSomething does not work; see above.")
    return 0 if is_well else 1


@dataclass(frozen=True)
class Choice:
    """What computes attention of one precision on one device.

    Attributes:
        device: Of q, k and v.
        precision: "accurate" or "faithful".
        spec: What serves them, loaded; None where the host's own attention runs.
        is_broken: A kernel would serve them, but cannot be loaded.
        reason: Why no better one serves them; "" for the best.
    """

    device: torch.device
    precision: str
    spec: KernelSpec | None
    is_broken: bool
    reason: str

    @classmethod
    def on(cls, device: torch.device, precision: str) -> Choice:
        """Choose as a run does, and load what was chosen."""
        case = _case(device, precision)
        spec = None
        try:
            spec = pick(case)
            prepare(spec, device, lambda text: print(f"  {text}"))
        except NoKernelError as error:
            return cls(device, precision, None, spec is not None, str(error))
        return cls(device, precision, spec, False, "; ".join(passed_over(case)))

    @property
    def title(self) -> str:
        """As "cuda:0, accurate"."""
        return f"{self.device}, {self.precision}"

    def __str__(self) -> str:
        if self.spec is None:
            return f"nothing, the host's own attention runs: {self.reason}"
        return f"{self.spec}{'; ' if self.reason else ''}{self.reason}"


def find_devices() -> list[torch.device]:
    """The CPU and every GPU that torch sees."""
    return [torch.device("cpu")] + [
        torch.device("cuda", idx) for idx in range(torch.cuda.device_count())
    ]


def describe_build() -> str:
    """What this PyTorch was built for; names the mistake of a CPU build beside an NVIDIA GPU."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    try:
        driver_version()
    except DriverError:
        return "the CPU only"
    return (
        "the CPU only, though an NVIDIA driver is there: for the GPU, install PyTorch with CUDA "
        "(pytorch.org says how)"
    )


def describe_driver() -> str:
    """Version of NVIDIA's driver and the newest CUDA that it serves, or why there is none."""
    try:
        cuda = "for CUDA {}.{}".format(*driver_version())
    except DriverError as error:
        return str(error)
    release = driver_release()
    return f"{release}, {cuda}" if release else cuda


def driver_release() -> str | None:
    """NVIDIA's number of its driver, such as 580.95; None where nvidia-smi does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None


def _architecture(device: torch.device) -> str | None:
    return build.architecture_for(torch.cuda.get_device_capability(device))


def describe_nvrtc(devices: list[torch.device]) -> str:
    """NVRTC's version and place for the first GPU that Nox serves, or what to install."""
    architectures = [_architecture(device) for device in devices if device.type == "cuda"]
    known = [architecture for architecture in architectures if architecture is not None]
    try:
        nvrtc = build.open_nvrtc(known[0] if known else build.ARCHITECTURES[0])
    except BuildError as error:
        return str(error) if known else "none, and without an NVIDIA GPU none is needed"
    return f"{nvrtc.version_text} at {nvrtc.path}"


def describe_device(device: torch.device) -> str:
    """Name, and of a GPU its compute capability and memory."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )


def _case(device: torch.device, precision: str) -> KernelCase:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return KernelCase.on(device, dtype, HEAD_DIM, precision, NUM_HEADS)


def describe_files(choices: list[Choice]) -> list[str]:
    """Which file holds each unit of kernels that serves a device, a line each."""
    lines: dict[str, None] = {}  # both precisions of a device share their files
    for choice in choices:
        if choice.spec is None or not choice.spec.units:
            continue
        architecture = _architecture(choice.device)
        assert architecture is not None  # or nothing would have been loaded
        for unit in choice.spec.units:
            origin = build.describe_image(unit, architecture)
            lines[f"{choice.device}, {unit} ({architecture}): {origin}"] = None
    return list(lines)


def package_version(name: str) -> str | None:
    """Version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_self_test(choice: Choice) -> bool:
    """Test one choice, a line for each mode; whether all passed."""
    limit = ERROR_LIMIT[choice.precision]
    try:
        errors = self_test(choice.device, choice.precision)
    except (NoxError, RuntimeError) as error:  # torch's of a GPU are RuntimeErrors
        print(f"  {choice.title}: FAILED. {one_line(str(error), 300)}")
        return False
    for mode, error in errors.items():
        verdict = "ok" if error <= limit else "FAILED"  # a NaN fails
        print(
            f"  {choice.device}, {mode}, {choice.precision}: {error:.4f} (limit {limit:.3f}) {verdict}"
        )
    return all(error <= limit for error in errors.values())


def self_test(device: torch.device, precision: str) -> dict[str, float]:
    """Relative error of each mode on a small random clip, Veda's with random weights.

    Sparse modes are held against float64 attention over the very keys that they keep.

    Returns:
        "sage", "sparse" and "veda" -> error.
    """
    sequence = t2va_sequence(256, 256, 22, 9)
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_HEADS, sequence.num_rows, HEAD_DIM)
    dtype = _case(device, precision).dtype
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    rows = torch.arange(sequence.num_rows, device=device)
    errors = {}
    for mode in ("sage", "sparse", "veda"):
        layer = trial_layer(mode, sequence, NUM_HEADS, device, precision=precision)
        keep = None if layer.keeps_everything else kept_keys(layer, q, k, v, rows)
        truth = dense_attention(q, k, v, keep).transpose(0, 1).flatten(1)
        out = attend_layer(layer, q, k, v).double()
        errors[mode] = float((out - truth).norm() / truth.norm())
    return errors
