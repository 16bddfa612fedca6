"""Capability: the one choice of a kernel, from what each accepts."""

from dataclasses import dataclass

import torch

from . import driver, kernels
from .driver import Progress
from .errors import BuildError, DriverError, NoKernelError
from .request import PRECISIONS

MIN_COMPUTE_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class KernelCase:
    """One attention problem, as far as the choice of a kernel depends on it.

    Attributes:
        device_type: "cpu", "cuda", "mps", ...
        compute_capability: (major, minor) of a CUDA device, else None.
        is_rocm: A CUDA device that is really an AMD one.
        dtype: Of q, k and v.
        head_dim: D.
        precision: "accurate" or "faithful".
        num_heads: H.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    is_rocm: bool
    dtype: torch.dtype
    head_dim: int
    precision: str
    num_heads: int

    @classmethod
    def on(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        precision: str,
        num_heads: int,
    ) -> "KernelCase":
        """Describe a problem on a device of this machine."""
        is_cuda = device.type == "cuda"
        return cls(
            device_type=device.type,
            compute_capability=torch.cuda.get_device_capability(device) if is_cuda else None,
            is_rocm=torch.version.hip is not None,
            dtype=dtype,
            head_dim=head_dim,
            precision=precision,
            num_heads=num_heads,
        )


@dataclass(frozen=True)
class KernelSpec:
    """What one implementation of Nox's attention accepts, as data.

    Attributes:
        name: Shown to the user.
        device_type: Where it runs.
        head_dim: The only D it takes.
        dtypes: Dtypes of q, k and v.
        precisions: Arithmetic it offers.
        note: What the user should know when it is picked; "" for a kernel at full speed.
        compute_capability: The only one it runs on; None for every one that Nox takes.
        max_heads: Of a call; None for any number.
        units: What it needs loaded, see `build.UNITS`.
    """

    name: str
    device_type: str
    head_dim: int
    dtypes: tuple[torch.dtype, ...]
    precisions: tuple[str, ...]
    note: str
    compute_capability: tuple[int, int] | None = None
    max_heads: int | None = None
    units: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    def why_not(self, case: KernelCase) -> str | None:
        """None if it accepts the case, else the reason."""
        if case.device_type != self.device_type:
            return f"{self.name} runs on {self.device_type}, the tensors are on {case.device_type}"
        if case.is_rocm and self.device_type == "cuda":
            return f"{self.name} needs an NVIDIA GPU, this one runs on ROCm"
        if case.compute_capability and case.compute_capability < MIN_COMPUTE_CAPABILITY:
            major, minor = case.compute_capability
            return f"{self.name} needs compute capability 8.0 (RTX 30 or newer), this GPU has {major}.{minor}"
        if self.compute_capability not in (None, case.compute_capability):
            wanted, given = (
                "none" if of is None else f"{of[0]}.{of[1]}"
                for of in (self.compute_capability, case.compute_capability)
            )
            return f"{self.name} is for compute capability {wanted}, this GPU has {given}"
        if case.head_dim != self.head_dim:
            return f"{self.name} needs head_dim {self.head_dim}, got {case.head_dim}"
        if case.dtype not in self.dtypes:
            return f"{self.name} does not take {str(case.dtype).removeprefix('torch.')}"
        if case.precision not in self.precisions:
            return f"{self.name} has no precision {case.precision}"
        if self.max_heads is not None and case.num_heads > self.max_heads:
            return f"{self.name} takes {self.max_heads} heads at most, got {case.num_heads}"
        return None


def _reference(name: str, device_type: str, note: str) -> KernelSpec:
    return KernelSpec(name, device_type, 128, DTYPES, PRECISIONS, note)


# In order of preference.
KERNELS = (
    KernelSpec(
        name="Nox INT8 kernel (sm_90a)",
        device_type="cuda",
        head_dim=kernels.HEAD_DIM,
        dtypes=kernels.DTYPES,
        precisions=PRECISIONS,
        note="",
        compute_capability=kernels.COMPUTE_CAPABILITY,
        max_heads=kernels.MAX_HEADS,
        units=kernels.UNITS,
    ),
    _reference("PyTorch reference on the CPU", "cpu", "right, but slow"),
    _reference("PyTorch reference on the GPU", "cuda", "right, but far slower than dense"),
)


def pick(case: KernelCase) -> KernelSpec:
    """The implementation that serves a case.

    Raises:
        NoKernelError: None does; the message holds every candidate's reason.
    """
    reasons = []
    for spec in KERNELS:
        reason = spec.why_not(case)
        if reason is None:
            return spec
        reasons.append(reason)
    raise NoKernelError("; ".join(reasons))


def passed_over(case: KernelCase) -> list[str]:
    """Why each implementation for this kind of device that comes before the picked one is not it."""
    reasons = []
    for spec in KERNELS:
        reason = spec.why_not(case)
        if reason is None:
            break
        if spec.device_type == case.device_type:
            reasons.append(reason)
    return reasons


def prepare(
    spec: KernelSpec, device: torch.device, on_progress: Progress | None = None
) -> KernelSpec:
    """Load what an implementation needs, compiling it where this machine has never done so.

    Args:
        spec: From `pick`.
        device: Where it will run.
        on_progress: Told what is done, if it takes long.

    Returns:
        The same `spec`.

    Raises:
        NoKernelError: Its kernels can be neither found nor compiled, or the driver refuses them.
    """
    try:
        if spec.units:
            driver.prepare(spec.units, device, on_progress)
    except (BuildError, DriverError) as error:
        raise NoKernelError(str(error).rstrip(".")) from error
    return spec
