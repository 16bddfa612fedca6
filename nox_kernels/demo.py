"""Demo: renders one clip on diffusers' H3 in every attention mode, and compares them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .attention import route_group
from .errors import NoxError, RequestError
from .layer_plan import LayerPlan
from .layout import TileLayout
from .pipeline import Clip, Job, Model, check_packages, load_model, make_synthetic, render
from .request import AttentionRequest
from .sequence import FPS, TOKEN_PIXELS, TokenGrid, canvas, snap_num_frames, token_grid

MODES = {
    "dense": AttentionRequest("dense"),
    "sage": AttentionRequest("sage"),
    "sparse-15": AttentionRequest("sparse", 0.15),
    "sparse-50": AttentionRequest("sparse", 0.50),
    "veda": AttentionRequest("veda"),
}
LABELS = {
    "dense": "dense (diffusers)",
    "sage": "sage",
    "sparse-15": "sparse 15 %",
    "sparse-50": "sparse 50 %",
    "veda": "veda",
}
SIDE_BY_SIDE, SUMMARY, ROUTE = "side-by-side.mp4", "summary.json", "route.png"
FILES = (*(f"{mode}.mp4" for mode in MODES), SIDE_BY_SIDE, ROUTE, SUMMARY)
MADE_BY = "nox demo"

# diffusers' pipeline renders 5 to 15 seconds; 345 frames is the longest legal count inside.
MIN_SECONDS, MAX_FRAMES = 5.0, 345
SYNTHETIC_CANVAS, SYNTHETIC_STEPS = (256, 256), 3
REAL_STEPS = 20
DEFAULT_PROMPT = "A red kite climbs over a windy beach while waves roll in and gulls call."
SYNTHETIC_NOTE = (
    "The model is a tiny synthetic one with random weights, and so is Veda's predictor: pictures "
    "and sound are noise. They prove that every mode runs and how far its output is from dense "
    "attention, not quality or speed."
)
PACKAGES = ("diffusers", "transformers", "av", "matplotlib", "PIL", "tqdm")
MODEL_PACKAGES = ("accelerate",)  # diffusers loads a model with some float32 layers only with it


@dataclass(frozen=True)
class DemoRequest:
    """What the command line asked; None = the default of the model in use.

    Attributes:
        out: Folder for the files.
        model: Folder of weights in diffusers' layout; None = the tiny synthetic model.
        predictor: File of a Veda predictor for those weights; None leaves mode veda out.
        prompt: What the clip shows.
        width: Pixels.
        height: Pixels.
        seconds: Length, rounded up to a legal frame count.
        steps: Denoising steps.
        seed: Of the noise.
    """

    out: str
    model: str | None = None
    predictor: str | None = None
    prompt: str | None = None
    width: int | None = None
    height: int | None = None
    seconds: float = MIN_SECONDS
    steps: int | None = None
    seed: int = 0


def main(request: DemoRequest) -> int:
    """Run the demo.

    Raises:
        NoxError: Something is missing or the request cannot be served; no file was written.
    """
    check_packages(PACKAGES + MODEL_PACKAGES if request.model else PACKAGES)
    job = _resolve(request)
    out = _output_folder(request.out)
    with _quiet(), _spare_cores():
        _check_diffusers()
        if request.model:
            model = load_model(request.model, job, request.predictor)
        else:
            model = make_synthetic(job)
        if model.is_synthetic:
            print(SYNTHETIC_NOTE)
        if model.predictor is None:
            print("Mode veda is left out: give a predictor with --predictor FILE.")
        clips, route = _render_modes(model, job)
        summary = _summary(model, job, clips)
    with tempfile.TemporaryDirectory(prefix=".nox-demo-", dir=out) as part:
        _write_files(Path(part), clips, route, summary)
        for name in FILES:  # only now may older files of ours go
            (out / name).unlink(missing_ok=True)
        for path in Path(part).iterdir():
            path.replace(out / path.name)
    _print_summary(summary, out)
    return 0


# ---- checks ----


def _check_diffusers() -> None:
    import diffusers

    if not hasattr(diffusers, "MiniMaxH3Blocks"):
        raise NoxError(
            f"diffusers {diffusers.__version__} has no MiniMax-H3; run: pip install 'nox-h3[demo]'."
        )


def _resolve(request: DemoRequest) -> Job:
    if (request.width is None) != (request.height is None):
        raise RequestError("Give both --width and --height, or neither.")
    if request.model is not None and not Path(request.model).is_dir():
        raise RequestError(f"--model {request.model} is not a folder.")
    if request.predictor is not None and request.model is None:
        raise RequestError("--predictor needs --model: the synthetic model brings its own.")
    default_canvas = canvas(16, 9) if request.model else SYNTHETIC_CANVAS
    width, height = request.width or default_canvas[0], request.height or default_canvas[1]
    for name, pixels in (("width", request.width), ("height", request.height)):
        if pixels is not None and (pixels < TOKEN_PIXELS or pixels % TOKEN_PIXELS):
            raise RequestError(
                f"--{name} must be a positive multiple of {TOKEN_PIXELS}, got {pixels}."
            )
    if not 1 / 4 <= width / height <= 4:
        raise RequestError(f"The canvas must be between 1:4 and 4:1, got {width} x {height}.")
    if not MIN_SECONDS <= request.seconds <= MAX_FRAMES / FPS:
        raise RequestError(
            f"--seconds must be between {MIN_SECONDS:g} and {MAX_FRAMES / FPS:.3f}, got "
            f"{request.seconds:g}."
        )
    default_steps = REAL_STEPS if request.model else SYNTHETIC_STEPS
    num_steps = default_steps if request.steps is None else request.steps
    if not 2 <= num_steps <= 1000:
        raise RequestError(
            f"--steps must be between 2 and 1000 (in sparse the first one computes every tile), "
            f"got {num_steps}."
        )
    if not 0 <= request.seed < 2**63:
        raise RequestError(f"--seed must be between 0 and 2^63 - 1, got {request.seed}.")
    prompt = DEFAULT_PROMPT if request.prompt is None else request.prompt
    if not prompt.strip():
        raise RequestError("--prompt is empty.")
    num_frames = snap_num_frames(math.floor(request.seconds * FPS + 1e-6))
    return Job(prompt, width, height, num_frames, num_steps, request.seed)


def _output_folder(name: str) -> Path:
    """Make the folder; refuse one that we may not write to or whose files are not ours."""
    out = Path(name)
    if out.exists() and not out.is_dir():
        raise NoxError(f"--out {name} is a file, not a folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise NoxError(f"--out {name} cannot be written to: {error.strerror or error}.") from error
    taken = [file for file in FILES if (out / file).exists()]
    if taken and not _is_ours(out / SUMMARY):
        raise NoxError(
            f"--out {name} holds {taken[0]}, which is not from a demo; choose another folder."
        )
    return out


def _is_ours(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["made_by"] == MADE_BY
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what diffusers and torch have to say about their own insides."""
    import diffusers
    import transformers

    loggers = (diffusers.logging, transformers.logging)
    levels = [log.get_verbosity() for log in loggers]
    for log in loggers:
        log.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for log, level in zip(loggers, levels, strict=True):
            log.set_verbosity(level)


@contextmanager
def _spare_cores() -> Iterator[None]:
    """Compute on half of torch's threads.

    They wait for each other by spinning, so one core that something else uses stalls them all:
    on two busy cores four steps took 417 s with two threads, 87 to 150 s with one (2026-12-01).
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# ---- rendering ----


def _render_modes(model: Model, job: Job) -> tuple[dict[str, Clip], object]:
    """Every mode's clip from the same noise, and the route picture."""
    from tqdm import tqdm

    route = _RouteSnapshot(layer_idx=model.pipeline.transformer.config.num_layers // 2)
    clips: dict[str, Clip] = {}
    modes = [mode for mode in MODES if mode != "veda" or model.predictor is not None]
    with tqdm(total=len(modes) * (job.num_steps + 1), unit="step") as bar:
        for mode in modes:
            bar.set_description(f"{LABELS[mode]:>17}")
            observe = route if mode == "sparse-15" else None
            clips[mode] = clip = render(model, job, MODES[mode], observe, bar.update)
            clip.facts.update(_difference(clip, clips["dense"]))
            clip.facts["frames_sha256"] = _digest(clip.frames)
            clip.facts["audio_sha256"] = _digest(clip.waveform)
            if mode != "dense":
                clip.frames = clip.frames.half()  # the files hold 8 bits; long clips are large
            bar.update()
    return clips, route.picture(token_grid(job.width, job.height, job.num_frames))


class _RouteSnapshot:
    """Sees one layer's calls and remembers what a query tile of its first head kept last."""

    def __init__(self, layer_idx: int):
        self.layer_idx = layer_idx
        self.drawing: tuple[TileLayout, Tensor, int] | None = None

    def __call__(
        self, layer_idx: int, sigma: float, layer: LayerPlan, q: Tensor, k: Tensor
    ) -> None:
        """See `hosts.diffusers.Observer`."""
        group = layer.groups[0]
        if layer_idx != self.layer_idx or group.rule is None:
            return
        heads = list(group.heads)
        mask = route_group(group, q[heads], k[heads]).mask(group.layout.num_kv_tiles)
        query_tile = group.layout.num_video_query_tiles // 2
        self.drawing = group.layout, mask[0, query_tile], query_tile

    def picture(self, grid: TokenGrid):
        """The picture, or None where no call was sparse."""
        from .figures import route_picture

        if self.drawing is None:
            return None
        layout, mask_row, query_tile = self.drawing
        return route_picture(layout, mask_row, query_tile, grid)


# ---- comparing and writing ----


def _difference(clip: Clip, dense: Clip) -> dict[str, float]:
    return {
        "frames_mean_abs_difference": float((clip.frames - dense.frames).abs().mean()),
        "audio_mean_abs_difference": float((clip.waveform - dense.waveform).abs().mean()),
    }


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def _summary(model: Model, job: Job, clips: dict[str, Clip]) -> dict:
    import diffusers

    device = model.device
    return {
        "made_by": MADE_BY,
        "host": f"diffusers {diffusers.__version__}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": model.name,
        "is_synthetic": model.is_synthetic,
        "note": SYNTHETIC_NOTE if model.is_synthetic else "",
        "prompt": job.prompt,
        "width": job.width,
        "height": job.height,
        "num_frames": job.num_frames,
        "fps": FPS,
        "num_steps": job.num_steps,
        "seed": job.seed,
        "modes": {mode: clip.facts for mode, clip in clips.items()},
    }


def _write_files(folder: Path, clips: dict[str, Clip], route, summary: dict) -> None:
    from tqdm import tqdm

    from .figures import side_by_side
    from .sound import Audio
    from .video import write_video

    num_frames = len(clips["dense"].frames)
    with tqdm(total=(len(clips) + 1) * num_frames, unit="frame") as bar:

        def advance(num_done: int, num_total: int) -> None:
            bar.update()

        def write(name: str, frames: Tensor, clip: Clip, tag: dict) -> None:
            bar.set_description(f"{name:>17}")
            written = write_video(
                folder / name,
                frames,
                Audio(clip.waveform, clip.sample_rate),
                fps=FPS,
                preset="veryfast",
                metadata={"nox": json.dumps(tag)},
                progress=advance,
            )
            for warning in written.warnings:
                bar.write(f"{name}: {warning}")

        for mode, clip in clips.items():
            write(f"{mode}.mp4", clip.frames, clip, clip.facts)
        write(
            SIDE_BY_SIDE,
            side_by_side({LABELS[mode]: clip.frames for mode, clip in clips.items()}),
            clips["dense"],
            {"modes": list(clips)},
        )
    if route is not None:
        route.save(folder / ROUTE)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2), encoding="utf-8")


def _print_summary(summary: dict, out: Path) -> None:
    print(f"\n{summary['model']} on {summary['device']} ({summary['host']})")
    print(
        f"{'mode':<10} {'step 0':>8} {'others':>8}   {'attention calls':<32} {'frames':>8} {'sound':>8}"
    )
    for mode, facts in summary["modes"].items():
        others = facts["other_step_seconds"]
        print(
            f"{mode:<10} {facts['first_step_seconds']:>6.2f} s "
            + (f"{others:>6.2f} s   " if others is not None else f"{'-':>8}   ")
            + f"{_calls_text(facts):<32} "
            + f"{facts['frames_mean_abs_difference']:>8.5f} "
            + f"{facts['audio_mean_abs_difference']:>8.5f}"
        )
    print(
        "Seconds are of one run. frames, sound: mean difference to dense, of values in 0..1, -1..1."
    )
    computed_by = {name for facts in summary["modes"].values() for name in facts["computed_by"]}
    for name in sorted(computed_by - {"diffusers' own attention"}):
        print(f"sage, sparse and veda computed by: {name}.")
    if summary["is_synthetic"]:
        print(SYNTHETIC_NOTE)
    print(f"Files: {out.resolve()}")


def _calls_text(facts: dict) -> str:
    """Such as "6 of 12 sparse, 45 % of their tiles"."""
    counts = Counter()
    for call in facts["calls"]:
        counts[call["kind"]] += call["count"]
    if not counts:
        return "diffusers' own"
    for kind in ("sparse", "veda"):
        if counts[kind]:
            kept = 100 * facts["kept_share_of_routed_calls"]
            return f"{counts[kind]} of {counts.total()} {kind}, {kept:.0f} % of tiles"
    return f"{counts['sage']} of {counts.total()} in INT8"
