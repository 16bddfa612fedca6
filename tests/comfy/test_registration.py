"""Registration: what ComfyUI knows of the pack, and what importing it changes: nothing."""

import json
import subprocess
from pathlib import Path

import pytest

from nox_kernels.video_format import PRESETS, formats

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NODES = [
    "NoxLoadH3",
    "NoxLoadVedaPredictor",
    "NoxAttention",
    "NoxDenseControl",
    "NoxSaveVideo",
    "NoxReport",
    "NoxChunkMLP",
]

# name -> default, in the order of saved workflows, optional ones last; None for a socket
INPUTS = {
    "NoxLoadH3": {
        "unet_name": None,
        "weight_dtype": "default",
        "lora_name": "none",
        "lora_strength": 1.0,
    },
    "NoxLoadVedaPredictor": {"predictor_name": None},
    "NoxAttention": {
        "model": None,
        "mode": "sage",
        "budget": 15,
        "layout": "windows",
        "precision": "accurate",
        "veda_budget": 0,
        "on_unknown_geometry": "error",
        "route_references": False,
        "predictor": None,
    },
    "NoxDenseControl": {
        "model": None,
        "first_steps": -1,
        "last_steps": 0,
        "blocks": "0",
        "start_percent": 0.0,
        "end_percent": 1.0,
        "kernel": "sage",
    },
    "NoxSaveVideo": {
        "fps": 24.0,
        "filename_prefix": "video/Nox_H3",
        "format": None,
        "crf": 18,
        "save_metadata": True,
        "images": None,
        "video": None,
        "audio": None,
        "save_to": None,
        "encoder_preset": "medium",
        "dither": False,
        "first_frame_png": False,
    },
    "NoxReport": {"after": None},
    "NoxChunkMLP": {"model": None, "rows": 4096},
}
OUTPUTS = {
    "NoxLoadH3": (["MODEL", "INT"], ["MODEL", "steps"]),
    "NoxLoadVedaPredictor": (["NOX_VEDA_PREDICTOR"], ["predictor"]),
    "NoxAttention": (["MODEL"], ["MODEL"]),
    "NoxDenseControl": (["MODEL"], ["MODEL"]),
    "NoxSaveVideo": (["VIDEO", "IMAGE", "STRING"], ["video", "last_frame", "path"]),
    "NoxReport": (["COMFY_MATCHTYPE_V3", "STRING", "IMAGE"], ["after", "text", "picture"]),
    "NoxChunkMLP": (["MODEL"], ["MODEL"]),
}
DISPLAY_NAMES = {
    "NoxLoadH3": "Nox Load MiniMax-H3",
    "NoxLoadVedaPredictor": "Nox Load Veda Predictor",
    "NoxAttention": "Nox H3 Attention",
    "NoxDenseControl": "Nox Dense Steps and Blocks",
    "NoxSaveVideo": "Nox Save Video",
    "NoxReport": "Nox Report",
    "NoxChunkMLP": "Nox Chunk MLP",
}
OPTIONS = {
    ("NoxLoadH3", "weight_dtype"): ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],
    ("NoxAttention", "mode"): ["sage", "sparse", "veda", "dense"],
    ("NoxAttention", "on_unknown_geometry"): ["error", "sparse", "dense"],
    ("NoxAttention", "precision"): ["accurate", "faithful"],
    ("NoxDenseControl", "kernel"): ["sage", "native"],
    ("NoxSaveVideo", "format"): list(formats()),
    ("NoxSaveVideo", "save_to"): ["output", "temp"],
    ("NoxSaveVideo", "encoder_preset"): list(PRESETS),
}
RANGES = {
    ("NoxAttention", "budget"): (1, 100),
    ("NoxAttention", "veda_budget"): (0, 100),
    ("NoxDenseControl", "first_steps"): (-1, 50),
    ("NoxDenseControl", "last_steps"): (0, 50),
    ("NoxDenseControl", "start_percent"): (0.0, 1.0),
    ("NoxDenseControl", "end_percent"): (0.0, 1.0),
    ("NoxChunkMLP", "rows"): (256, 1 << 20),
}
ADVANCED = {
    ("NoxLoadH3", "weight_dtype"),
    ("NoxAttention", "layout"),
    ("NoxAttention", "precision"),
    ("NoxAttention", "veda_budget"),
    ("NoxAttention", "on_unknown_geometry"),
    ("NoxAttention", "route_references"),
    ("NoxSaveVideo", "save_metadata"),
    ("NoxSaveVideo", "encoder_preset"),
    ("NoxSaveVideo", "dither"),
    ("NoxSaveVideo", "first_frame_png"),
}


@pytest.fixture(scope="module")
def info(host):
    """/object_info of our nodes."""
    return {name: node for name, node in host.get_json("/object_info").items() if "Nox" in name}


def inputs_of(node: dict) -> dict[str, list]:
    """Name -> [type, settings], in the order of the node."""
    named = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
    order = [
        name for part in ("required", "optional") for name in node["input_order"].get(part, [])
    ]
    return {name: named[name] for name in order}


def options_of(entry: list) -> list | None:
    settings = entry[1] if len(entry) > 1 else {}
    return entry[0] if isinstance(entry[0], list) else settings.get("options")


def test_exactly_these_nodes_are_registered(info):
    assert sorted(info) == sorted(NODES)
    assert {name: node["display_name"] for name, node in info.items()} == DISPLAY_NAMES


@pytest.mark.parametrize("name", NODES)
def test_inputs_keep_their_names_order_and_defaults(info, name):
    defaults = {
        key: (entry[1] if len(entry) > 1 else {}).get("default")
        for key, entry in inputs_of(info[name]).items()
    }
    assert list(defaults.items()) == list(INPUTS[name].items())


@pytest.mark.parametrize("name", NODES)
def test_outputs_keep_their_types_names_and_order(info, name):
    assert (info[name]["output"], info[name]["output_name"]) == OUTPUTS[name]


def test_what_saves_or_shows_is_an_output_node(info):
    shown = [name for name in NODES if info[name]["output_node"]]
    assert shown == ["NoxSaveVideo", "NoxReport"]


@pytest.mark.parametrize(("name", "field"), OPTIONS)
def test_choices_keep_their_names_and_order(info, name, field):
    assert options_of(inputs_of(info[name])[field]) == OPTIONS[name, field]


@pytest.mark.parametrize(("name", "field"), RANGES)
def test_numbers_keep_their_ranges(info, name, field):
    settings = inputs_of(info[name])[field][1]
    assert (settings["min"], settings["max"]) == RANGES[name, field]


def test_only_what_few_people_need_is_advanced(info):
    found = {
        (name, key)
        for name, node in info.items()
        for key, entry in inputs_of(node).items()
        if len(entry) > 1 and entry[1].get("advanced")
    }
    assert found == ADVANCED


def test_every_input_explains_itself(info):
    silent = [
        (name, key)
        for name, node in info.items()
        for key, entry in inputs_of(node).items()
        if not (len(entry) > 1 and entry[1].get("tooltip"))
    ]
    assert silent == []


def test_layouts_are_the_shipped_ones_and_then_the_users_files(info):
    options = options_of(inputs_of(info["NoxAttention"])["layout"])
    assert options[:3] == ["windows", "raster", "bands-v0"]
    assert "mixed.json" in options[3:]
    assert "readme.txt" not in options


def test_predictors_are_the_users_safetensors_files(info):
    options = options_of(inputs_of(info["NoxLoadVedaPredictor"])["predictor_name"])
    assert "tiny.safetensors" in options
    assert "readme.txt" not in options


def test_the_first_lora_is_none(info):
    options = options_of(inputs_of(info["NoxLoadH3"])["lora_name"])
    assert options[0] == "none"
    assert "tiny_h3_lora.safetensors" in options


@pytest.mark.parametrize("name", NODES)
def test_every_node_has_a_help_page(host, name):
    page = host.get(f"/extensions/nox-h3/docs/{name}.md").decode()
    assert page == (ROOT / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_every_workflow_is_a_template_with_a_thumbnail(host):
    files = sorted((ROOT / "workflows").glob("*.json"))
    assert files
    listed = host.get_json("/api/workflow_templates")["nox-h3"]
    assert sorted(listed) == [file.stem for file in files]
    for file in files:
        path = f"/api/workflow_templates/nox-h3/{file.stem.replace(' ', '%20')}"
        assert host.get_json(f"{path}.json") == json.loads(file.read_text(encoding="utf-8"))
        assert host.get(f"{path}.jpg")[:2] == b"\xff\xd8"


def test_layout_tables_and_predictors_have_folders_of_their_own(host):
    folders = [folder["name"] for folder in host.get_json("/api/experiment/models")]
    assert {"nox_layouts", "veda_predictors"} <= set(folders)


def test_importing_the_pack_changes_nothing(comfyui, venv_python, host_environment):
    command = [venv_python, HERE / "host" / "import_check.py", comfyui, ROOT]
    done = subprocess.run(command, env=host_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == NODES
    assert found["num_watched"] > 500
    assert found["changed"] == []
