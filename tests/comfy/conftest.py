"""A real ComfyUI for the tests: finds one, starts it, stops it.

ComfyUI runs as a process of its own and is driven over HTTP; nothing of it is imported here. So our
`nodes` package cannot shadow ComfyUI's module of that name, and our modules are never loaded twice
in one process.

Environment:
    COMFYUI_DIR   ComfyUI's folder; else ~/comfy/ComfyUI
    COMFYUI_VENV  its virtual environment; else .venv or venv in that folder
    COMFYUI_PEERS other packs, for the tests beside them; else that ComfyUI's custom_nodes
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# the tests import these two by name; importlib mode puts no test folder on the path
sys.path.insert(0, str(HERE / "support"))

import comfy_graphs as graphs  # noqa: E402
from comfy_host import Host  # noqa: E402

from nox_kernels.veda.budget import Budget  # noqa: E402
from nox_kernels.veda.bundle import write_bundle  # noqa: E402
from nox_kernels.veda.synthetic import random_bundle, random_plan  # noqa: E402

FOLDER = "nox-h3"
PEERS = (
    "ComfyUI-KJNodes",
    "H3-Optimizations",
    "ComfyUI-Spectrum-MiniMax-H3",
)  # that Nox is tested beside, where installed


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.comfy)


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """ComfyUI's folder; without one the tests are skipped."""
    folder = Path(_environment().get("COMFYUI_DIR") or "~/comfy/ComfyUI").expanduser()
    if not (folder / "main.py").is_file():
        pytest.skip(f"no ComfyUI in {folder}; set COMFYUI_DIR to its folder")
    return folder


@pytest.fixture(scope="session")
def venv_python(comfyui: Path) -> Path:
    """The Python that runs ComfyUI; without one the tests are skipped."""
    chosen = _environment().get("COMFYUI_VENV")
    folders = [Path(chosen).expanduser()] if chosen else [comfyui / ".venv", comfyui / "venv"]
    for folder in folders:
        for python in (folder / "bin" / "python", folder / "Scripts" / "python.exe"):
            if python.is_file():
                return python
    looked = " or ".join(map(str, folders))
    pytest.skip(f"no virtual environment for ComfyUI in {looked}; set COMFYUI_VENV to its folder")


@pytest.fixture(scope="session")
def host_environment() -> dict[str, str]:
    """Of the processes that run ComfyUI's code."""
    return {
        **_environment(),
        "OMP_NUM_THREADS": "1",  # with more on a busy machine, waiting costs 20 times the work
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture(scope="session")
def host(comfyui, venv_python, host_environment, tmp_path_factory):
    """A running ComfyUI with Nox, the tiny models, and the test-only nodes."""
    base = _make_base(tmp_path_factory)
    (base / "models").mkdir()
    _make_models(base / "models", venv_python, host_environment)
    running = Host(comfyui, venv_python, base, host_environment)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


@pytest.fixture
def forgetful_host(host, comfyui, venv_python, host_environment, tmp_path_factory):
    """Another one, which drops what a node gave as soon as it was used."""
    base = _make_base_beside(host, tmp_path_factory)
    yield from _running(Host(comfyui, venv_python, base, host_environment, ("--cache-none",)))


@pytest.fixture
def discreet_host(host, comfyui, venv_python, host_environment, tmp_path_factory):
    """Another one, which was told to keep graphs out of files."""
    base = _make_base_beside(host, tmp_path_factory)
    yield from _running(Host(comfyui, venv_python, base, host_environment, ("--disable-metadata",)))


@pytest.fixture(scope="session")
def preview_host(host, comfyui, venv_python, host_environment, tmp_path_factory):
    """Another one, which shows every step, decoded by taeh3."""
    base = _make_base_beside(host, tmp_path_factory)
    decoders = host.base / "models" / "vae_approx"
    decoders.mkdir(exist_ok=True)
    shutil.copy(host.base / "models" / "vae" / graphs.TAEH3, decoders / "taeh3.safetensors")
    options = ("--preview-method", "taesd")
    yield from _running(Host(comfyui, venv_python, base, host_environment, options))


def _running(started: Host):
    try:
        started.wait_until_up()
        yield started
    finally:
        started.stop()


def _make_base_beside(host: Host, tmp_path_factory) -> Path:
    base = _make_base(tmp_path_factory)
    (base / "models").symlink_to(host.base / "models", target_is_directory=True)
    return base


@pytest.fixture(scope="session")
def peer_host(host, comfyui, venv_python, host_environment, tmp_path_factory):
    """Another one, with the packs of PEERS that are installed; without one the tests are skipped."""
    chosen = _environment().get("COMFYUI_PEERS")
    folder = Path(chosen).expanduser() if chosen else comfyui / "custom_nodes"
    found = [name for name in PEERS if (folder / name).is_dir()]
    if not found:
        pytest.skip(f"none of {', '.join(PEERS)} in {folder}; set COMFYUI_PEERS to their folder")
    base = _make_base(tmp_path_factory)
    (base / "models").symlink_to(host.base / "models", target_is_directory=True)
    for name in found:
        (base / "custom_nodes" / name).symlink_to(folder / name, target_is_directory=True)
    running = Host(comfyui, venv_python, base, host_environment)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


def _make_base(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("comfy")
    for name in ("input", "output", "temp", "user", "custom_nodes"):
        (base / name).mkdir()
    (base / "custom_nodes" / FOLDER).symlink_to(ROOT, target_is_directory=True)
    (base / "custom_nodes" / "tiny_h3_host").symlink_to(HERE / "host" / "tiny_h3_host")
    return base


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Show the end of ComfyUI's log under a failure."""
    report = yield
    running = getattr(item, "funcargs", {}).get("host")
    if report.failed and running is not None:
        report.sections.append(("ComfyUI's log", running.log_tail()))
    return report


def _environment() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251 - where ComfyUI is on this machine


def _make_models(models: Path, python: Path, environment: dict[str, str]) -> None:
    script = HERE / "host" / "make_tiny_h3.py"
    dit = ("--only", "dit")
    quantised = [(*dit, "--quant", quant) for quant in graphs.QUANTS]
    for options in ((), *quantised, (*dit, "--time", "embedder")):
        command = [python, script, models, *options]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    unets, loras = models / "diffusion_models", models / "loras"
    # the same model under the names of the released files
    shutil.copy(unets / graphs.UNET, unets / "minimax_h3_ref2va_tiny.safetensors")
    shutil.copy(unets / graphs.UNET, unets / "minimax_h3_fl2va_tiny.safetensors")
    for steps in (4, 8):
        shutil.copy(loras / graphs.LORA, loras / f"tiny_turbo_{steps}step_v1.safetensors")
    for name, (down, up) in graphs.LORA_KEYS.items():
        endings = {".lora_A.weight": down, ".lora_B.weight": up}
        _copy_renamed(loras / graphs.LORA, loras / f"{name}.safetensors", endings)
    # what a later ComfyUI reads, or none
    tensors = load_file(unets / graphs.UNET)
    gate = {"blocks.1.attn.to_gate_compress.weight": torch.zeros(4, 256)}
    save_file(tensors | gate, unets / "newer.safetensors")
    stored = (unets / "tiny_h3_dit_int8_convrot.safetensors").read_bytes()
    newer = stored.replace(b"int8_tensorwise", b"int3_tensorwise")
    (unets / "newer_format.safetensors").write_bytes(newer)
    tensors.pop("blocks.3.attn.out_proj.weight")
    save_file(tensors, unets / "incomplete.safetensors")
    other = {f"other_{name}": part for name, part in load_file(loras / graphs.LORA).items()}
    save_file(other, loras / "of_another_model.safetensors")
    # what a user puts into the wrong folder, or half of
    whole = (unets / graphs.UNET).read_bytes()
    (unets / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (unets / "truncated_header.safetensors").write_bytes(whole[:100])
    (unets / "empty.safetensors").write_bytes(b"")
    (unets / "page.safetensors").write_text("<!DOCTYPE html><title>404</title>" * 9)
    shutil.copy(models / "vae" / graphs.VIDEO_VAE, unets / "a_video_vae.safetensors")
    shutil.copy(models / "vae" / graphs.AUDIO_VAE, unets / "an_audio_vae.safetensors")
    shutil.copy(models / "vae" / graphs.TAEH3, unets / "a_preview_vae.safetensors")
    shutil.copy(models / "text_encoders" / graphs.CLIP, unets / "a_text_encoder.safetensors")
    shutil.copy(loras / graphs.LORA, unets / "a_lora.safetensors")
    shutil.copy(unets / graphs.UNET, loras / "not_a_lora.safetensors")
    _make_layouts(models / "nox_layouts")
    _make_predictors(models / "veda_predictors")
    predictors = models / "veda_predictors"
    shutil.copy(loras / graphs.LORA, predictors / "a_lora.safetensors")
    shutil.copy(unets / graphs.UNET, predictors / "a_model.safetensors")
    for name in ("page.safetensors", "empty.safetensors"):
        shutil.copy(unets / name, predictors / name)


def _copy_renamed(source: Path, target: Path, endings: dict[str, str]) -> None:
    """Copy a safetensors file with other endings of its tensors' names."""
    data = source.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    for old, new in endings.items():
        header = header.replace(f'{old}"', f'{new}"')
    target.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + size :])


def _make_layouts(folder: Path) -> None:
    folder.mkdir()
    # every head of every layer differs from its neighbours
    mixed = [[(layer + head) % 4 for head in range(4)] for layer in range(4)]
    table = {
        "format": "nox-layout-table-v1",
        "model": "minimax-h3",
        "num_layers": 4,
        "num_heads": 4,
        "tile": {"query": 128, "key": 64},
        "order": "complete-first:t,h,w",
        "candidates": ["raster", "4x8x4", "8x4x4", "2x8x8"],
        "tables": {"landscape": mixed, "portrait": None},
        "budget": 0.15,
        "calibration": {},
    }
    real_size = {"landscape": [[0] * 56] * 50, "portrait": None}
    files = {
        "mixed.json": table,
        "real_size.json": table | {"num_layers": 50, "num_heads": 56, "tables": real_size},
        "odd_candidate.json": table | {"candidates": ["3x3x3"] * 4},
        "other_version.json": table | {"format": "nox-layout-table-v9"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "broken.json").write_text("{")
    (folder / "readme.txt").write_text("not a table")


def _make_predictors(folder: Path) -> None:
    folder.mkdir()
    every = {canvas: canvas.lower() for canvas in graphs.CANVASES}  # plans by their canvas
    one = {"LARGE": "16x9_t102"}  # a name of the released predictors
    # On canvases this small 10 %, as released, would keep each tile's own alone, whatever the
    # scores. Half is 2 of 4 tiles on the medium canvas.
    tiny = {"target_budget": Budget("ratio", 0.5)}
    extended = {
        "target_budget": Budget("tiles", 1.5),
        "second_order_rank": 4,
        "count_term": True,
    }
    tiled = {"tile_conditions": True, "condition_budget": Budget("tiles", 1.0)}
    for name, num_layers, names, settings in (
        ("tiny", 4, every, tiny),
        ("other_weights", 4, every, tiny | {"seed": 1}),
        ("only_large", 4, one, {"dtype": "bfloat16"}),
        ("long_words", 4, one, {"target_budget": Budget("tiles", 32.0)}),  # a released budget
        ("other_model", 2, one, {}),
        ("whole_conditions", 4, every, extended),
        ("tiled_conditions", 4, every, extended | tiled),
    ):
        sizes = {"num_layers": num_layers, "num_heads": 4}
        shapes = ("4x8x4", "8x4x4", "2x8x8")
        plans = [
            random_plan(plan, graphs.grid_of(graphs.CANVASES[canvas]), shapes, **sizes)
            for canvas, plan in names.items()
        ]
        bundle = random_bundle(tuple(plans), **sizes, **settings)
        write_bundle(folder / f"{name}.safetensors", bundle)
    whole = (folder / "tiny.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "readme.txt").write_text("not a predictor")
