"""Contenders: every way to compute one attention call that this machine may have."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import ops
from ..attention import attend_layer, select_tiles
from ..capability import KernelCase, pick, prepare
from ..doctor import package_version
from ..driver import Progress
from ..errors import NoKernelError
from ..layer_plan import LayerPlan
from ..reference import TileImages
from ..sequence import Sequence
from ..trial import trial_layer
from .inputs import HEAD_DIM

Inputs = tuple[Tensor, Tensor, Tensor]

ACCURATE = "nox sage accurate"
CUDNN = "torch cuDNN"
POOLINGS = ("none", "mean", "extremes")
# What multiplies Q by K, and P by V: names of ceilings.
INT8, INT8_FP8, BF16 = ("int8", "int8"), ("int8", "fp8"), ("bf16", "bf16")


@dataclass(frozen=True)
class Problem:
    """One attention call.

    Attributes:
        sequence: Its packed sequence.
        inputs: q, k, v [H, S, 128].
        on_progress: Told what takes long, such as compiling a kernel.
    """

    sequence: Sequence
    inputs: Inputs
    on_progress: Progress

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.inputs[0].device

    @property
    def num_heads(self) -> int:
        """H."""
        return self.inputs[0].shape[0]


@dataclass(frozen=True)
class Ready:
    """A contender that can be called on its problem.

    Attributes:
        call: Returns [S, H * 128] or [1, H, S, 128]; a part of a call returns anything.
        note: What computes it, or its version.
        layer: Plan of the layer, for our modes.
    """

    call: Callable[[], object]
    note: str = ""
    layer: LayerPlan | None = None


@dataclass(frozen=True)
class Contender:
    """Something to measure.

    Attributes:
        name: In the table.
        products: Ceilings of its two matrix products; None for a part of a call without any.
        make: Gets it ready for a problem; raises where it cannot run here.
        is_part: Only a part of a call, whose result is not attention.
    """

    name: str
    products: tuple[str, str] | None
    make: Callable[[Problem], Ready]
    is_part: bool = False


# ---- ours ----------------------------------------------------------------------------------------


def _implementation(problem: Problem, precision: str) -> str:
    """Load what computes our modes; its name."""
    q = problem.inputs[0]
    case = KernelCase.on(q.device, q.dtype, HEAD_DIM, precision, problem.num_heads)
    return str(prepare(pick(case), q.device, problem.on_progress))


def _nox(mode: str, precision: str, keep_ratio: float, problem: Problem) -> Ready:
    note = _implementation(problem, precision)
    if mode == "veda":
        note += ", random predictor"
    layer = trial_layer(
        mode,
        problem.sequence,
        problem.num_heads,
        problem.device,
        precision=precision,
        keep_ratio=keep_ratio,
    )
    return Ready(lambda: attend_layer(layer, *problem.inputs), note, layer)


def _pack(precision: str, pooling: str, problem: Problem) -> Ready:
    note = _implementation(problem, precision)
    layer = trial_layer(
        "sage", problem.sequence, problem.num_heads, problem.device, precision=precision
    )
    layout = layer.groups[0].layout
    call = partial(
        ops.pack_tiles,
        *problem.inputs,
        layout.slot_row,
        layout.valid_count,
        precision=precision,
        pooling=pooling,
    )
    return Ready(call, note)


def _packed(mode: str, precision: str, problem: Problem) -> tuple[str, LayerPlan, TileImages]:
    """Note, plan and tile images of a mode with one head group."""
    note = _implementation(problem, precision)
    layer = trial_layer(
        mode, problem.sequence, problem.num_heads, problem.device, precision=precision
    )
    group = layer.groups[0]
    layout = group.layout
    images = ops.pack_tiles(
        *problem.inputs,
        layout.slot_row,
        layout.valid_count,
        precision=precision,
        pooling=group.pooling,
    )
    return note, layer, images


def _route(problem: Problem) -> Ready:
    note, layer, images = _packed("sparse", "accurate", problem)
    q_pool, k_pool = images.q_pool, images.k_pool
    return Ready(lambda: select_tiles(layer.groups[0], q_pool, k_pool), note)


def _attend(mode: str, precision: str, problem: Problem) -> Ready:
    note, layer, images = _packed(mode, precision, problem)
    group, layout = layer.groups[0], layer.groups[0].layout
    bits = select_tiles(group, images.q_pool, images.k_pool).bits
    dtype = problem.inputs[0].dtype
    call = partial(ops.tile_attention, images, bits, layout.slot_row, layout.num_rows, dtype=dtype)
    return Ready(call, note, layer)


# ---- peers ---------------------------------------------------------------------------------------


def _needs_gpu(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise NoKernelError("needs an NVIDIA GPU")


def _sdpa(backend: SDPBackend, problem: Problem) -> Ready:
    if backend != SDPBackend.FLASH_ATTENTION:
        _needs_gpu(problem)
    q, k, v = (x[None] for x in problem.inputs)
    note = f"torch {torch.__version__}"
    if backend == SDPBackend.EFFICIENT_ATTENTION and q.stride(2) * q.shape[2] >= 1 << 31:
        # it multiplies row and stride in 32 bits: an illegal access would end the whole process
        q, k, v = (x.contiguous() for x in (q, k, v))
        note += ", on contiguous copies made beforehand: its row offsets have 32 bits"

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return Ready(call, note)


def _peer(module: str, function_name: str, problem: Problem) -> tuple[Callable, str]:
    """A function of an installed package, and the package's version."""
    found = importlib.import_module(module)
    _needs_gpu(problem)
    package = module.replace("_", "-")
    version = f"{package} {package_version(package) or 'of unknown version'}"
    function = getattr(found, function_name, None)
    if function is None:
        raise NoKernelError(f"{version} has no {function_name}")
    return function, version


def _sageattention(granularity: str, problem: Problem) -> Ready:
    name = "sageattn_qk_int8_pv_fp8_cuda_sm90"
    function, version = _peer("sageattention", name, problem)
    q, k, v = (x[None] for x in problem.inputs)
    return Ready(lambda: function(q, k, v, tensor_layout="HND", qk_quant_gran=granularity), version)


def _comfy_kitchen(problem: Problem) -> Ready:
    function, version = _peer("comfy_kitchen", "int8_attention", problem)
    q, k, v = (x[None] for x in problem.inputs)
    return Ready(lambda: function(q, k, v), version)


CONTENDERS = (
    Contender(ACCURATE, INT8, partial(_nox, "sage", "accurate", 1.0)),
    Contender("nox sage faithful", INT8_FP8, partial(_nox, "sage", "faithful", 1.0)),
    Contender("nox sparse 15 %", INT8, partial(_nox, "sparse", "accurate", 0.15)),
    Contender("nox veda 10 %", INT8, partial(_nox, "veda", "accurate", 0.10)),
    Contender(CUDNN, BF16, partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Contender("torch flash", BF16, partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    Contender("torch efficient", BF16, partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    Contender("sageattention per_warp", INT8_FP8, partial(_sageattention, "per_warp")),
    Contender("sageattention per_thread", INT8_FP8, partial(_sageattention, "per_thread")),
    Contender("comfy-kitchen int8", INT8, _comfy_kitchen),
    *(
        Contender(f"pre-pass {precision}, pooling {pooling}", None, make, is_part=True)
        for precision in ("accurate", "faithful")
        for pooling in POOLINGS
        for make in (partial(_pack, precision, pooling),)
    ),
    Contender("route sparse 15 %", None, _route, is_part=True),
    Contender("attention accurate", INT8, partial(_attend, "sage", "accurate"), is_part=True),
    Contender("attention faithful", INT8_FP8, partial(_attend, "sage", "faithful"), is_part=True),
    Contender("attention sparse 15 %", INT8, partial(_attend, "sparse", "accurate"), is_part=True),
)
