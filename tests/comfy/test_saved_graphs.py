"""Saved graphs: what users saved with an earlier version runs with this one.

`fixtures/VERSION` holds what VERSION saved. Nothing there is ever edited; a release adds its own.
"""

import json
from pathlib import Path

import pytest
from comfy_files import streams_of, tags_of
from comfy_graphs import Graph
from comfy_prompts import small_prompt

FIXTURES = Path(__file__).parent / "fixtures"
PROMPTS = sorted(FIXTURES.glob("*/prompts/*.json"))
GRAPHS = sorted(FIXTURES.glob("*/graphs/*.json"))
SEED = 20261207  # no other test's: what ComfyUI has cached does not sample
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def name_of(file: Path) -> str:
    return f"{file.parent.parent.name}-{file.stem}"


def read(file: Path):
    return json.loads(file.read_text(encoding="utf-8"))


def test_every_version_has_some_of_each():
    versions = {folder.name for folder in FIXTURES.iterdir()}
    assert "0.1.0" in versions
    for files in (PROMPTS, GRAPHS):
        assert {file.parent.parent.name for file in files} == versions


@pytest.mark.parametrize(
    "file", [file for file in PROMPTS if file.stem != "every_node"], ids=name_of
)
def test_a_saved_prompt_of_a_shipped_workflow_runs(host, file):
    prompt = small_prompt(host, file)
    (noise,) = [node for node in prompt.values() if node["class_type"] == "RandomNoise"]
    noise["inputs"]["noise_seed"] = SEED
    result = host.run(prompt)
    assert result.status == "success", result.error
    num_frames = 34 if file.stem == "continue" else 22
    assert streams_of(result.video_file)["video"] == num_frames
    assert "32 of 32 attention calls INT8" in result.report


@pytest.mark.parametrize(
    "file", [file for file in PROMPTS if file.stem == "every_node"], ids=name_of
)
def test_a_saved_prompt_of_every_node_asks_for_the_same(host, file):
    prompt = Graph(read(file))
    (conditioning,) = [n for n in prompt.values() if n["class_type"] == "TinyH3Conditioning"]
    conditioning["inputs"]["run"] = 1 << 30  # no other test's: it must sample
    result = host.run(prompt)
    assert result.status == "success", result.error
    assert result.report == (
        "Nox veda 40 %, tiny.safetensors, plan medium, faithful: 2 of 16 attention calls veda "
        "(60.0 % of tiles); 14 native (4 in the first steps, 6 in dense blocks, 4 in the last "
        "steps); computed by PyTorch reference on the CPU (right, but slow)"
    )
    tag = tags_of(result.video_file)["nox"]
    assert streams_of(result.video_file)["video"] == 22
    assert tag


@pytest.mark.parametrize("file", GRAPHS, ids=name_of)
def test_a_saved_graphs_widgets_are_those_of_the_nodes(host, file):
    """The page puts saved values into widgets by their place."""
    info = host.get_json("/object_info")
    nodes = [node for node in read(file)["nodes"] if node["type"].startswith("Nox")]
    assert nodes
    for node in nodes:
        known = info[node["type"]]
        named = {**known["input"].get("required", {}), **known["input"].get("optional", {})}
        assert {slot["name"] for slot in node["inputs"]} <= named.keys()
        assert [slot["type"] for slot in node["outputs"]] == known["output"]
        entries = [entry for entry in named.values() if _is_widget(entry)]
        values = node["widgets_values"]
        assert len(values) <= len(entries)  # later ones are new, and have a default
        for value, entry in zip(values, entries, strict=False):
            kind = entry[0]
            if isinstance(kind, list) or kind == "COMBO":
                options = kind if isinstance(kind, list) else entry[1]["options"]
                assert value in options or str(value).endswith(".safetensors")
            else:
                wanted = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}[kind]
                assert isinstance(value, wanted)


def _is_widget(entry: list) -> bool:
    return isinstance(entry[0], list) or entry[0] in WIDGETS
