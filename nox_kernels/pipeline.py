"""Pipeline: diffusers' H3, synthetic or from a folder of weights, and one clip rendered with it."""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import NoxError
from .hosts.diffusers import Observer, nox_attention
from .request import AttentionRequest
from .sequence import token_grid
from .veda.bundle import read_bundle, write_bundle
from .veda.predictor import VedaPredictor
from .veda.synthetic import random_bundle, random_plan

ENCODER_PACKAGES = ("torchvision",)  # Qwen3-VL's processor imports it, even for text


@dataclass(frozen=True)
class Job:
    """One clip to render; `num_steps` counts evaluations of the model."""

    prompt: str
    width: int
    height: int
    num_frames: int
    num_steps: int
    seed: int


@dataclass(frozen=True, eq=False)
class Model:
    """A pipeline without its text encoder, and what the text encoder said."""

    pipeline: Any
    prompt_embeds: Tensor  # [1, R, text_dim]
    text_token_tags: Tensor  # [R] int64
    name: str
    is_synthetic: bool
    predictor: VedaPredictor | None  # of mode veda

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return self.pipeline.transformer.device

    @property
    def dtype(self) -> torch.dtype:
        """That the transformer computes in."""
        return self.prompt_embeds.dtype


@dataclass(eq=False)
class Clip:
    """One mode's result."""

    frames: Tensor  # [F, H, W, 3] in 0..1
    waveform: Tensor  # [C, L] float32
    sample_rate: int  # Hz
    step_seconds: list[float]
    facts: dict = field(default_factory=dict)  # for the summary


def check_packages(names: tuple[str, ...], install: str = "'nox-h3[demo]'") -> None:
    """Refuse to start without these packages.

    Raises:
        NoxError: Some do not import; names them, and what to give to pip.
    """
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError):  # the latter from one built for another torch
            missing.append(name)
    if missing:
        raise NoxError(
            f"The demo needs {', '.join(missing)}, which does not import; run: "
            f"pip install {install}"
        )


def _pipeline(transformer, vae, audio_vae, scheduler, audio_scheduler):
    """diffusers' text-to-video-and-audio pipeline, without its text encoder."""
    from diffusers import MiniMaxH3Blocks

    blocks = MiniMaxH3Blocks().get_workflow("t2va")
    blocks.sub_blocks.pop("text_encoder")
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        transformer=transformer,
        vae=vae,
        audio_vae=audio_vae,
        scheduler=scheduler,
        audio_scheduler=audio_scheduler,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_synthetic(job: Job) -> Model:
    """The tiny model with random weights."""
    from diffusers import MiniMaxH3Scheduler

    from .tiny_h3 import make_tiny_h3, prompt_embeds

    tiny = make_tiny_h3()
    pipeline = _pipeline(
        tiny.transformer,
        tiny.vae,
        tiny.audio_vae,
        MiniMaxH3Scheduler(shift=12.0),
        MiniMaxH3Scheduler(shift=3.0),
    )
    embeds = prompt_embeds(job.prompt, tiny.seed)
    return Model(
        pipeline,
        embeds,
        _text_tags(pipeline, embeds),
        "tiny synthetic H3",
        is_synthetic=True,
        predictor=_synthetic_predictor(tiny.transformer.config, job),
    )


def _synthetic_predictor(config, job: Job) -> VedaPredictor:
    """A predictor with random weights that knows the job's clip, by way of its file."""
    sizes = {"num_layers": config.num_layers, "num_heads": config.num_attention_heads}
    grid = token_grid(job.width, job.height, job.num_frames)
    bundle = random_bundle((random_plan("synthetic", grid, ("4x8x4", "8x4x4"), **sizes),), **sizes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / bundle.info.name
        write_bundle(path, bundle)
        return VedaPredictor.from_bundle(read_bundle(path))


def _load_predictor(path: str, job: Job) -> VedaPredictor:
    """A trained predictor; refused at once where it does not know the job's clip."""
    bundle = read_bundle(path)
    bundle.info.check_grid(token_grid(job.width, job.height, job.num_frames))
    return VedaPredictor.from_bundle(bundle)


def _text_tags(pipeline, embeds: Tensor) -> Tensor:
    return torch.full((embeds.shape[1],), pipeline.text_tag, dtype=torch.int64)


def load_model(folder: str, job: Job, predictor_path: str | None) -> Model:
    """Load weights from a folder in diffusers' layout; nothing is downloaded.

    Args:
        folder: The weights.
        job: What will be rendered.
        predictor_path: File of a Veda predictor; None leaves mode veda out.
    """
    import diffusers

    from .tiny_h3 import prompt_embeds, saved_seed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tiny_seed = saved_seed(folder)
    subfolders = _subfolders(folder)
    needed = ["transformer", "vae", "audio_vae", "scheduler", "audio_scheduler"]
    if tiny_seed is None:
        needed += ["text_encoder", "tokenizer", "processor"]
    missing = [name for name in needed if not (Path(folder) / subfolders[name]).is_dir()]
    if missing:
        raise NoxError(
            f"--model {folder} lacks {', '.join(missing)}; it must hold MiniMax-H3 in diffusers' "
            f"layout."
        )
    predictor = None if predictor_path is None else _load_predictor(predictor_path, job)
    encoded = None
    if tiny_seed is None:
        check_packages(ENCODER_PACKAGES, install="torchvision")
        # first, while nothing else is in memory
        encoded = _encode_prompt(folder, subfolders, job.prompt, device, dtype)

    def load(name: str, class_name: str, **kwargs):
        return _from_folder(getattr(diffusers, class_name), folder, subfolders[name], **kwargs)

    pipeline = _pipeline(
        load("transformer", "MiniMaxH3Transformer3DModel", torch_dtype=dtype),
        load("vae", "AutoencoderKLMiniMaxH3", torch_dtype=dtype),
        load("audio_vae", "AutoencoderKLMiniMaxH3Audio", torch_dtype=dtype),
        load("scheduler", "MiniMaxH3Scheduler"),
        load("audio_scheduler", "MiniMaxH3Scheduler"),
    )
    pipeline.to(device)
    if encoded is None:
        assert tiny_seed is not None
        embeds = prompt_embeds(job.prompt, tiny_seed).to(device, dtype)
        encoded = embeds, _text_tags(pipeline, embeds)
    return Model(
        pipeline,
        *encoded,
        str(folder),
        is_synthetic=tiny_seed is not None,
        predictor=None if predictor is None else predictor.to(device),
    )


def _subfolders(folder: str) -> dict[str, str]:
    """Folder of each component: as the model's index says, else the component's own name."""
    names = ("transformer", "vae", "audio_vae", "scheduler", "audio_scheduler")
    folders = {name: name for name in (*names, "text_encoder", "tokenizer", "processor")}
    try:
        index = json.loads((Path(folder) / "modular_model_index.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return folders
    except (OSError, ValueError) as error:
        raise NoxError(f"--model {folder}: modular_model_index.json is not readable.") from error
    for name in folders:
        entry = index.get(name)
        if isinstance(entry, list) and entry and isinstance(entry[-1], dict):
            folders[name] = entry[-1].get("subfolder") or name
    return folders


def _from_folder(component_class, folder: str, subfolder: str, **kwargs):
    try:
        return component_class.from_pretrained(
            folder, subfolder=subfolder, local_files_only=True, **kwargs
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise NoxError(f"--model {folder}: {subfolder} does not load: {reason}") from error


def _encode_prompt(
    folder: str, subfolders: dict[str, str], prompt: str, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run the text encoder once for all modes, then drop it: it is as large as the transformer."""
    import transformers
    from diffusers import MiniMaxH3Blocks

    encoder = MiniMaxH3Blocks().get_workflow("t2va").sub_blocks["text_encoder"].init_pipeline()
    encoder.update_components(
        text_encoder=_from_folder(
            transformers.Qwen3VLForConditionalGeneration,
            folder,
            subfolders["text_encoder"],
            dtype=dtype,
        ),
        tokenizer=_from_folder(transformers.Qwen2TokenizerFast, folder, subfolders["tokenizer"]),
        processor=_from_folder(transformers.Qwen3VLProcessor, folder, subfolders["processor"]),
    )
    encoder.to(device)
    state = encoder(prompt=prompt)
    embeds, tags = state.get("prompt_embeds"), state.get("text_token_tags")
    encoder.unload_components(["text_encoder"])
    return embeds, tags


def render(
    model: Model,
    job: Job,
    request: AttentionRequest,
    observe: Observer | None,
    on_step: Callable[[], object],
) -> Clip:
    """Render a clip with the attention that a request asks for.

    Args:
        model: What renders.
        job: What to render.
        request: How attention is computed.
        observe: Sees what Nox's calls are given; see `hosts.diffusers`.
        on_step: Called after each evaluation of the model.
    """
    pipeline = model.pipeline
    with (
        nox_attention(
            pipeline.transformer,
            request,
            predictor=model.predictor,
            scheduler=pipeline.scheduler,
            observe=observe,
        ) as run,
        _timed_steps(pipeline.transformer, on_step) as step_seconds,
    ):
        state = pipeline(
            prompt_embeds=model.prompt_embeds,
            text_token_tags=model.text_token_tags,
            height=job.height,
            width=job.width,
            num_frames=job.num_frames,
            num_inference_steps=job.num_steps + 1,  # diffusers counts the final 0 as a step
            generator=torch.Generator().manual_seed(job.seed),
            output_type="pt",
        )
    kernels = sorted(map(str, run.kernels))
    facts = {
        "mode": request.mode,
        "keep_ratio": request.keep_ratio if request.mode == "sparse" else None,
        "computed_by": kernels or ["diffusers' own attention"],
        "kept_share_of_routed_calls": run.log.kept_share,
        "kept_share_of_all_calls": run.log.kept_share_of_all_calls,
        "calls": [
            {"kind": kind, "reason": reason, "count": count}
            for (kind, reason), count in sorted(run.calls.items())
        ],
        "step_seconds": step_seconds,
        "first_step_seconds": step_seconds[0],
        "other_step_seconds": statistics.median(step_seconds[1:]) if step_seconds[1:] else None,
    }
    return Clip(
        frames=state.get("videos")[0].float().permute(0, 2, 3, 1).cpu(),
        waveform=state.get("audio")[0].float().cpu(),
        sample_rate=int(state.get("sampling_rate")),
        step_seconds=step_seconds,
        facts=facts,
    )


@contextmanager
def _timed_steps(
    transformer: torch.nn.Module, on_step: Callable[[], object]
) -> Iterator[list[float]]:
    """Seconds of each forward of the transformer, which is all of a step that counts."""
    seconds: list[float] = []
    started = [0.0]

    def now() -> float:
        if transformer.device.type == "cuda":
            torch.cuda.synchronize(transformer.device)
        return time.perf_counter()

    def before(module, args):
        started[0] = now()

    def after(module, args, output):
        seconds.append(now() - started[0])
        on_step()

    handles = [
        transformer.register_forward_pre_hook(before),
        transformer.register_forward_hook(after),
    ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()
