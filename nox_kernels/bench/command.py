"""Command: python -m nox_kernels bench."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..doctor import describe_build, describe_device, driver_release, package_version
from ..errors import FileError, RequestError
from ..sequence import Sequence
from .ceilings import measure_ceilings
from .contenders import CONTENDERS, Problem
from .inputs import SETS, clip_of, make_inputs
from .measure import measure, reason_of
from .monitor import Monitor
from .plot import draw
from .report import report
from .timing import Timer

ROWS = (7_733, 38_304, 104_555)  # of 22, 124 and 345 frames at 1344x768
COMPARED_ROWS = 38_304  # every set is measured at the size nearest to this one
FILES = ("bench.json", "bench.md", "bench.png")


@dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    Attributes:
        out: Folder for the files.
        rows: Every S.
        num_heads: H.
        repeats: Timed calls of each contender.
        sets: Names of inputs; the first is measured at every S.
        device: "cuda" or "cpu"; None takes a GPU where there is one.
        plot_from: A bench.json: only draw its picture.

    Raises:
        RequestError: A number or a name is not one that can be measured.
    """

    out: str = "nox-bench"
    rows: tuple[int, ...] = ROWS
    num_heads: int = 56
    repeats: int = 12
    sets: tuple[str, ...] = SETS
    device: str | None = None
    plot_from: str | None = None

    def __post_init__(self):
        if self.num_heads < 1 or self.repeats < 1:
            raise RequestError(
                f"--heads and --repeats start at 1, got {self.num_heads} and {self.repeats}."
            )
        unknown = [name for name in self.sets if name not in SETS]
        if unknown:
            raise RequestError(f"Set {unknown[0]!r} is unknown; known: {', '.join(SETS)}.")
        if not self.rows or not self.sets:
            raise RequestError("Give --rows and --sets a value each, or leave them out.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RequestError("PyTorch sees no GPU here; leave --device out, or give it cpu.")

    def resolve_device(self) -> torch.device:
        """Where to measure."""
        if self.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def compared_rows(self) -> int:
        """The S at which every set is measured."""
        return min(self.rows, key=lambda num_rows: abs(num_rows - COMPARED_ROWS))


def main(request: BenchRequest) -> int:
    """Measure, and write bench.json, bench.md and bench.png."""
    if request.plot_from is not None:
        return _plot_from(Path(request.plot_from))
    clips = {num_rows: clip_of(num_rows) for num_rows in request.rows}
    json_path, table_path, plot_path = _new_files(Path(request.out))
    device = request.resolve_device()
    timer = Timer(device)
    results = {
        "machine": describe_machine(device),
        "request": asdict(request),
        "compared_rows": request.compared_rows,
        "ceilings": measure_ceilings(timer, request.repeats, reason_of),
        "runs": [],
        "skipped": [],
    }
    for num_rows, clip in clips.items():
        sets = request.sets if num_rows == request.compared_rows else request.sets[:1]
        for name in sets:
            print(f"Measuring S = {num_rows:,}, set {name}", flush=True)
            try:
                results["runs"].append(_run(name, clip, request, timer))
            except Exception as error:  # noqa: BLE001 - what was measured before must not be lost
                reason = f"Not measured: {reason_of(error)}."
                results["skipped"].append({"num_rows": num_rows, "set": name, "reason": reason})
            # written anew each time, for the same reason
            json_path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    text = report(results)
    table_path.write_text(text, encoding="utf-8")
    plot = f"Wrote {plot_path}."
    try:
        draw(results, str(plot_path))
    except ModuleNotFoundError as error:
        plot = (
            f"No plot: {error.name} is not installed. Where it is, run: "
            f"python -m nox_kernels bench --plot-from {json_path}"
        )
    print(f"{text}\nWrote {json_path} and {table_path}.\n{plot}")
    return 0


def _new_files(out: Path) -> list[Path]:
    """Paths of the files to write, in a folder that is there and holds none of them."""
    paths = [out / name for name in FILES]
    for path in paths:
        if path.exists():
            raise RequestError(f"{path} is there already; give --out another folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Cannot write to {out}: {error}.") from error
    return paths


def _run(name: str, clip: Sequence, request: BenchRequest, timer: Timer) -> dict:
    """Measure everything on one clip and one set of inputs."""
    device = timer.device
    with torch.inference_mode(), Monitor(device) as monitor:
        inputs = make_inputs(name, clip.num_rows, request.num_heads, device)
        problem = Problem(clip, inputs, lambda text: print(f"  {text}", flush=True))
        contenders = measure(problem, timer, CONTENDERS, request.repeats)
    return {
        "num_rows": clip.num_rows,
        "set": name,
        "clip": f"{clip.token_grid} video tokens behind {clip.video_start:,} other rows",
        "gpu": monitor.summary(),
        "contenders": contenders,
    }


def _plot_from(path: Path) -> int:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        target = path.with_suffix(".png")
        draw(results, str(target))
    except RequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise FileError(f"{path} is not a bench.json that can be read: {error}.") from error
    except ModuleNotFoundError as error:
        raise RequestError(
            f"{error.name} is not installed; run: pip install {error.name}"
        ) from error
    print(f"Wrote {target}")
    return 0


def describe_machine(device: torch.device) -> dict[str, str]:
    """What was measured on, and versions."""
    packages = ("sageattention", "comfy-kitchen", "triton")
    versions = ((name, package_version(name)) for name in ("nox-h3", *packages))
    return {
        "device": describe_device(device),
        "NVIDIA driver": driver_release() or "none, or nvidia-smi does not tell",
        "PyTorch": f"{torch.__version__}, for {describe_build()}",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),
        "Python": f"{platform.python_version()} on {platform.platform()}",
        **{name: version or "not installed" for name, version in versions},
    }
