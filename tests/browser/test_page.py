"""The shipped workflows in ComfyUI's own page: nothing missing, nothing shifts, Run works."""

import json
from pathlib import Path

import pytest
from comfy_files import streams_of
from comfy_prompts import save_clip
from shipped_graphs import IMAGE, PROMPTS, TEXT, id_of, make_new, make_small, read

ROOT = Path(__file__).parents[2]
# one run samples 4 layers x 8 steps
NUM_CALLS = 32
MODES = ("sparse", "veda", "dense", "sage", "sparse")  # a way through every value
DEFAULTS = {
    "mode": "sage",
    "budget": 15,
    "layout": "windows",
    "precision": "accurate",
    "veda_budget": 0,
    "on_unknown_geometry": "error",
    "route_references": False,
}
BEFORE_VEDA = ["mode", "budget", "layout", "precision"]  # widgets of the node's first version


def wires(graph: dict) -> list:
    """Every wire by its ends, whatever its number."""
    return sorted(link[1:] for link in graph["links"])


def wires_at(graph: dict, node_id: int) -> int:
    return sum(node_id in (link[1], link[3]) for link in graph["links"])


def as_saved_before_veda(graph: dict, values: list, named: bool) -> dict:
    """The graph as the page saved it when Nox H3 Attention had four widgets and one socket."""
    (node,) = [node for node in graph["nodes"] if node["type"] == "NoxAttention"]
    node["inputs"] = [i for i in node["inputs"] if i["name"] in ["model", *BEFORE_VEDA]]
    node["size"] = [380, 130]
    node["widgets_values"] = values
    del node["widgets_values_named"]
    if named:  # older pages save values by position alone
        node["widgets_values_named"] = dict(zip(BEFORE_VEDA, values, strict=True))
    return graph


def add_predictor(page, graph: dict, file: str) -> int:
    """Nox Load Veda Predictor, wired to the graph's Nox H3 Attention; returns its id."""
    loader = page.add("NoxLoadVedaPredictor")
    page.set(loader, "predictor_name", file)
    page.connect(loader, "predictor", id_of(graph, "NoxAttention"), "predictor")
    return loader


@pytest.mark.parametrize("name", PROMPTS)
def test_a_workflow_opens_as_it_was_saved(page, name):
    saved = read(name)
    assert page.load(saved) == []
    now = page.graph()
    assert wires(now) == wires(saved)
    by_id = {node["id"]: node for node in now["nodes"]}
    assert by_id.keys() == {node["id"] for node in saved["nodes"]}
    for node in saved["nodes"]:
        assert by_id[node["id"]].get("widgets_values") == node.get("widgets_values"), node["type"]
        if node["type"].startswith("Nox"):
            assert page.widgets(node["id"]) == node["widgets_values_named"]
    prompt = ROOT / "tests" / "comfy" / "prompts" / f"{PROMPTS[name]}.json"
    assert page.prompt() == json.loads(prompt.read_text(encoding="utf-8"))


def test_budget_and_wires_survive_every_mode(page):
    graph = read(TEXT)
    page.load(graph)
    node = id_of(graph, "NoxAttention")
    page.set(node, "budget", 37)
    for mode in MODES:
        page.set(node, "mode", mode)
        values = {**DEFAULTS, "mode": mode, "budget": 37}
        assert page.widgets(node) == values
        assert wires(page.graph()) == wires(graph)
        inputs = page.prompt()[str(node)]["inputs"]
        assert inputs == {**values, "model": [str(id_of(graph, "NoxLoadH3")), 0]}


@pytest.mark.parametrize("named", [True, False], ids=["with names", "by position"])
def test_a_graph_saved_before_veda_opens_unshifted(page, named):
    values = ["sparse", 37, "raster", "faithful"]
    saved = as_saved_before_veda(read(TEXT), values, named)
    assert page.load(saved) == []
    node = id_of(saved, "NoxAttention")
    expected = DEFAULTS | dict(zip(BEFORE_VEDA, values, strict=True))
    assert page.widgets(node) == expected
    assert wires(page.graph()) == wires(saved)
    inputs = page.prompt()[str(node)]["inputs"]
    assert inputs == {**expected, "model": [str(id_of(saved, "NoxLoadH3")), 0]}


def test_values_and_wires_survive_every_mode_with_a_predictor(page):
    graph = read(TEXT)
    page.load(graph)
    node = id_of(graph, "NoxAttention")
    loader = add_predictor(page, graph, "tiny.safetensors")
    values = {"budget": 37, "veda_budget": 12, "on_unknown_geometry": "sparse"}
    for name, value in values.items():
        page.set(node, name, value)
    before = page.graph()
    assert wires_at(before, loader) == 1
    for mode in MODES:
        page.set(node, "mode", mode)
        assert page.widgets(node) == {**DEFAULTS, **values, "mode": mode}
        assert wires(page.graph()) == wires(before)
        prompt = page.prompt()
        assert prompt[str(node)]["inputs"]["predictor"] == [str(loader), 0]
        assert prompt[str(loader)]["inputs"] == {"predictor_name": "tiny.safetensors"}
    # and the whole once more from its file
    page.load(page.graph())
    assert page.widgets(node) == {**DEFAULTS, **values, "mode": "sparse"}
    assert page.widgets(loader) == {"predictor_name": "tiny.safetensors"}
    assert wires(page.graph()) == wires(before)
    assert page.prompt() == prompt


def test_budget_and_wires_survive_every_mode_when_promoted_from_a_subgraph(page):
    graph = read(TEXT)
    page.load(graph)
    node = id_of(graph, "NoxAttention")
    loader = add_predictor(page, graph, "tiny.safetensors")
    outer = page.enclose(node, ["mode", "budget"])
    assert page.widgets(outer) == {"mode": "sage", "budget": 15}
    before = page.graph()
    assert wires_at(before, outer) == 4  # from both loaders, to the scheduler and the guider
    page.set(outer, "budget", 37)
    for mode in MODES:
        page.set(outer, "mode", mode)
        assert page.widgets(outer) == {"mode": mode, "budget": 37}
        assert wires(page.graph()) == wires(before)
        inputs = page.prompt()[f"{outer}:{node}"]["inputs"]
        assert (inputs["mode"], inputs["budget"]) == (mode, 37)
        assert inputs["predictor"] == [str(loader), 0]
    # and the whole once more from its file
    page.load(page.graph())
    assert page.widgets(outer) == {"mode": "sparse", "budget": 37}
    assert wires(page.graph()) == wires(before)
    inputs = page.prompt()[f"{outer}:{node}"]["inputs"]
    assert (inputs["mode"], inputs["budget"]) == ("sparse", 37)


@pytest.mark.parametrize("name", PROMPTS)
def test_run_saves_a_clip_and_says_what_ran(page, host, name):
    save_clip(host.base / "input" / "clip.mp4")
    graph = read(name)
    page.load(graph)
    make_small(page, graph)
    node, saver = id_of(graph, "NoxAttention"), id_of(graph, "NoxSaveVideo")
    page.set(node, "mode", "sparse")
    page.set(node, "budget", 20)
    make_new(page, graph)
    before = page.widgets(saver)
    result = page.run()
    assert result["status"] == "success", result["error"]
    shown = result["outputs"][str(saver)]
    assert shown["images"][0]["filename"].endswith(".mp4")
    (line,) = shown["text"]
    assert line.startswith("Nox sparse 20 %, windows, accurate: ")
    assert f"of {NUM_CALLS} attention calls sparse" in line
    assert page.player(saver) == shown["images"][0]["filename"]
    assert page.badge(node).startswith("sparse ")
    # what the page adds after a run has no place among the saved values
    assert page.widgets(saver) == before
    assert page.widgets(node) == {**DEFAULTS, "mode": "sparse", "budget": 20}


def test_veda_names_the_canvases_it_knows_and_runs_on_one(page):
    graph = read(TEXT)
    page.load(graph)
    make_small(page, graph)
    node, h3 = id_of(graph, "NoxAttention"), id_of(graph, "MiniMaxH3ImageToVideo")
    loader = add_predictor(page, graph, "tiny.safetensors")
    page.set(node, "mode", "veda")
    make_new(page, graph)
    result = page.run()
    assert result["status"] == "error"
    assert result["error"].startswith("Veda has no plan for 256x192, 22 frames.")
    assert "; 256x256 with 22" in result["error"]
    page.set(h3, "height", 256)  # as it says
    result = page.run()
    assert result["status"] == "success", result["error"]
    (line,) = result["outputs"][str(id_of(graph, "NoxSaveVideo"))]["text"]
    assert line.startswith("Nox veda ")
    assert "tiny.safetensors" in line
    assert f"of {NUM_CALLS} attention calls veda" in line
    assert page.badge(node).startswith("veda ")
    assert page.widgets(node) == {**DEFAULTS, "mode": "veda"}
    assert page.widgets(loader) == {"predictor_name": "tiny.safetensors"}


@pytest.mark.parametrize(
    "kind", ["mp4 (H.264 + AAC)", "mp4 (H.265 + AAC)", "mov (ProRes 422 HQ + PCM)"]
)
def test_dropping_the_saved_file_brings_the_graph_back(page, host, kind):
    graph = read(TEXT)
    page.load(graph)
    make_small(page, graph)
    make_new(page, graph)
    saver = id_of(graph, "NoxSaveVideo")
    chosen = {"format": kind, "crf": 21, "encoder_preset": "veryfast", "dither": True}
    for name, value in chosen.items():
        page.set(saver, name, value)
    ran = page.graph()
    before = set(host.output.rglob("*"))
    result = page.run()
    assert result["status"] == "success", result["error"]
    (file,) = (path for path in set(host.output.rglob("*")) - before if path.is_file())
    assert streams_of(file).keys() == {"video", "audio"}
    folder = file.parent.relative_to(host.output).as_posix()
    saved = {"filename": file.name, "subfolder": folder, "type": "output"}
    page.load(read(IMAGE))
    assert wires(page.graph()) != wires(ran)
    page.drop(saved)
    now = page.graph()
    assert wires(now) == wires(ran)
    values, expected = (
        {node["id"]: node.get("widgets_values") for node in graph["nodes"]} for graph in (now, ran)
    )
    assert values == expected
    assert page.widgets(saver).items() >= chosen.items()


def test_a_saver_from_before_the_newer_widgets_opens_unshifted(page):
    graph = read(TEXT)
    saver = id_of(graph, "NoxSaveVideo")
    (node,) = (node for node in graph["nodes"] if node["id"] == saver)
    node["inputs"] = node["inputs"][:8]  # three sockets and five widgets
    node["widgets_values"] = [12, "video/old", "mp4 (H.264 + AAC)", 30, False]
    del node["widgets_values_named"]
    page.load(graph)
    assert page.widgets(saver) == {
        "fps": 12,
        "filename_prefix": "video/old",
        "format": "mp4 (H.264 + AAC)",
        "crf": 30,
        "save_metadata": False,
        "save_to": "output",
        "encoder_preset": "medium",
        "dither": False,
        "first_frame_png": False,
    }


def test_run_reports_from_inside_a_subgraph(page):
    graph = read(TEXT)
    page.load(graph)
    make_small(page, graph)
    outer = page.enclose(id_of(graph, "NoxAttention"), ["mode", "budget"])
    page.set(outer, "mode", "sparse")
    page.set(outer, "budget", 40)
    make_new(page, graph)
    result = page.run()
    assert result["status"] == "success", result["error"]
    (line,) = result["outputs"][str(id_of(graph, "NoxSaveVideo"))]["text"]
    assert line.startswith("Nox sparse 40 %, windows, accurate: ")
