"""The shipped workflows: complete, consistent, and equal to the API prompts of the host tests."""

import ast
import itertools
import json
import math
import operator
import re
from pathlib import Path
from urllib.parse import urlparse

import pytest

from nox_kernels.sequence import canvas, snap_num_frames

ROOT = Path(__file__).parents[2]
TEXT = "Nox H3 Text to Video and Audio"
IMAGE = "Nox H3 Image to Video and Audio"
CONTINUE = "Nox H3 Continue a Clip"
PROMPTS = {TEXT: "t2v", IMAGE: "i2v", CONTINUE: "continue"}
# how many frames of its start a graph takes from an older clip, which it does not save again
TAKEN = {TEXT: 0, IMAGE: 0, CONTINUE: 22}
ONLY_NEW = ("Only what is new", "Only what is new (sound)")
PREFIX = {TEXT: "video/Nox_H3", IMAGE: "video/Nox_H3", CONTINUE: "video/Nox_H3_continued"}
GROUPS = ["Models", "Prompt and size", "Speed", "Sampling", "Save"]
CORE_NODES = {
    "BasicGuider",
    "BasicScheduler",
    "CLIPLoader",
    "ComfyMathExpression",
    "GetImageSize",
    "GetVideoComponents",
    "ImageFromBatch",
    "KSamplerSelect",
    "LoadImage",
    "LoadVideo",
    "MarkdownNote",
    "MiniMaxH3AddGuide",
    "MiniMaxH3ImageToVideo",
    "PrimitiveFloat",
    "PrimitiveInt",
    "RandomNoise",
    "SamplerCustomAdvanced",
    "TrimAudioDuration",
    "VAEDecode",
    "VAEDecodeAudio",
    "VAELoader",
}
# In the order of each node's schema: a saved graph holds its values by position.
NOX_WIDGETS = {
    "NoxLoadH3": ["unet_name", "weight_dtype", "lora_name", "lora_strength"],
    "NoxAttention": [
        "mode",
        "budget",
        "layout",
        "precision",
        "veda_budget",
        "on_unknown_geometry",
        "route_references",
    ],
    "NoxSaveVideo": [
        "fps",
        "filename_prefix",
        "format",
        "crf",
        "save_metadata",
        "save_to",
        "encoder_preset",
        "dither",
        "first_frame_png",
    ],
}
FILES = {
    "diffusion_models": "minimax_h3_fl2va_pruned_int8_convrot.safetensors",
    "loras": "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors",
    "text_encoders": "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",
    "vae": "minimax_h3_video_vae_int8_convrot.safetensors",
    "audio vae": "minimax_h3_audio_vae_fp32.safetensors",
}


class Workflow:
    """A workflow as ComfyUI's page saves it."""

    def __init__(self, name: str):
        self.name = name
        self.path = ROOT / "workflows" / f"{name}.json"
        self.graph = json.loads(self.path.read_text(encoding="utf-8"))
        self.nodes = {node["id"]: node for node in self.graph["nodes"]}

    def all_of(self, kind: str) -> list[dict]:
        return [node for node in self.nodes.values() if node["type"] == kind]

    def only(self, kind: str) -> dict:
        (node,) = self.all_of(kind)
        return node

    def titled(self, title: str) -> dict:
        (node,) = [node for node in self.nodes.values() if node.get("title") == title]
        return node

    def source(self, node: dict, input_name: str) -> tuple[str, str]:
        """(type, output name) of the node wired to an input."""
        (link_id,) = [i["link"] for i in node["inputs"] if i["name"] == input_name]
        (link,) = [link for link in self.graph["links"] if link[0] == link_id]
        origin = self.nodes[link[1]]
        return origin["type"], origin["outputs"][link[2]]["name"]

    def wired(self, node: dict, input_name: str) -> dict:
        """The node wired to an input."""
        (link_id,) = [i["link"] for i in node["inputs"] if i["name"] == input_name]
        (origin,) = [link[1] for link in self.graph["links"] if link[0] == link_id]
        return self.nodes[origin]

    def prompt(self) -> dict:
        file = ROOT / "tests" / "comfy" / "prompts" / f"{PROMPTS[self.name]}.json"
        return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(params=list(PROMPTS))
def workflow(request) -> Workflow:
    return Workflow(request.param)


def test_only_these_workflows_and_their_thumbnails_are_shipped():
    files = {path.name for path in (ROOT / "workflows").iterdir()}
    assert files == {f"{name}{suffix}" for name in PROMPTS for suffix in (".json", ".jpg")}


def test_only_core_and_nox_nodes_without_subgraphs(workflow):
    kinds = {node["type"] for node in workflow.nodes.values()}
    assert kinds <= CORE_NODES | set(NOX_WIDGETS)
    assert set(NOX_WIDGETS) <= kinds
    assert not workflow.graph.get("definitions", {}).get("subgraphs")


def test_five_titled_groups_from_left_to_right(workflow):
    groups = workflow.graph["groups"]
    assert [group["title"] for group in groups] == GROUPS
    for left, right in itertools.pairwise(groups):
        x, _, width, _ = left["bounding"]
        assert x + width <= right["bounding"][0]


def test_every_node_but_the_first_note_lies_in_one_group(workflow):
    for node in workflow.nodes.values():
        (x, y), (width, height) = node["pos"], node["size"]
        homes = [
            group["title"]
            for group in workflow.graph["groups"]
            if group["bounding"][0] <= x
            and group["bounding"][1] <= y
            and x + width <= group["bounding"][0] + group["bounding"][2]
            and y + height <= group["bounding"][1] + group["bounding"][3]
        ]
        assert len(homes) == (node.get("title") != "Start here"), node["type"]


def test_no_nodes_overlap(workflow):
    title_height = 30
    boxes = [
        (x, y - title_height, x + width, y + height)
        for node in workflow.nodes.values()
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    ]
    for number, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[number + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart


def test_links_agree_with_both_of_their_ends(workflow):
    links = {link[0]: link for link in workflow.graph["links"]}
    assert len(links) == len(workflow.graph["links"])
    for link_id, origin, origin_slot, target, target_slot, kind in links.values():
        output = workflow.nodes[origin]["outputs"][origin_slot]
        assert link_id in output["links"]
        wired = workflow.nodes[target]["inputs"][target_slot]
        assert wired["link"] == link_id
        assert output["type"] == kind
        assert kind in wired["type"].split(",")
    seen_by_inputs = [i["link"] for n in workflow.nodes.values() for i in n.get("inputs", ())]
    assert sorted(link for link in seen_by_inputs if link is not None) == sorted(links)
    seen_by_outputs = [
        link
        for node in workflow.nodes.values()
        for output in node.get("outputs", ())
        for link in output["links"] or ()
    ]
    assert sorted(seen_by_outputs) == sorted(links)


def test_ids_stay_below_the_counters(workflow):
    assert max(workflow.nodes) <= workflow.graph["last_node_id"]
    assert max(link[0] for link in workflow.graph["links"]) <= workflow.graph["last_link_id"]


@pytest.mark.parametrize("kind", NOX_WIDGETS)
def test_nox_nodes_hold_their_values_in_schema_order(workflow, kind):
    node = workflow.only(kind)
    widgets = [i["name"] for i in node["inputs"] if "widget" in i]
    assert widgets == NOX_WIDGETS[kind]
    assert len(node["widgets_values"]) == len(widgets)
    named = dict(zip(widgets, node["widgets_values"], strict=True))
    assert node["widgets_values_named"] == named
    # sockets first, so that no widget can shift
    first_widget = [("widget" in i) for i in node["inputs"]].index(True)
    assert all("widget" in i for i in node["inputs"][first_widget:])


def test_values_by_position_and_by_name_agree(workflow):
    for node in workflow.nodes.values():
        if "widgets_values" in node:
            named = list(node["widgets_values_named"].values())
            assert node["widgets_values"] == named, node["type"]


def test_defaults(workflow):
    values = {kind: workflow.only(kind)["widgets_values"] for kind in NOX_WIDGETS}
    files = [FILES["diffusion_models"], "default", FILES["loras"], 1]
    assert values["NoxLoadH3"] == files
    assert values["NoxAttention"] == ["sage", 15, "windows", "accurate", 0, "error", False]
    prefix = PREFIX[workflow.name]
    saved = [24, prefix, "mp4 (H.264 + AAC)", 18, True, "output", "medium", False, False]
    assert values["NoxSaveVideo"] == saved
    assert workflow.only("CLIPLoader")["widgets_values"] == [
        FILES["text_encoders"],
        "minimax",
        "default",
    ]
    assert workflow.only("RandomNoise")["widgets_values"][1] == "fixed"
    assert workflow.only("KSamplerSelect")["widgets_values"][0] in ("euler", "res_multistep")
    assert workflow.only("BasicScheduler")["widgets_values"][0] == "simple"
    assert workflow.titled("Duration (seconds)")["widgets_values"] == [5]


def test_scheduler_and_guider_take_the_patched_model_and_the_steps_of_the_lora(workflow):
    patched = ("NoxAttention", "MODEL")
    assert workflow.source(workflow.only("NoxAttention"), "model") == ("NoxLoadH3", "MODEL")
    assert workflow.source(workflow.only("BasicScheduler"), "model") == patched
    assert workflow.source(workflow.only("BasicGuider"), "model") == patched
    assert workflow.source(workflow.only("BasicScheduler"), "steps") == ("NoxLoadH3", "steps")


def test_picture_and_sound_reach_the_saver(workflow):
    pictures = sounds = workflow.only("NoxSaveVideo")
    if TAKEN[workflow.name]:
        pictures, sounds = (workflow.titled(title) for title in ONLY_NEW)
        assert workflow.source(pictures, "image") == ("VAEDecode", "IMAGE")
        assert workflow.source(sounds, "audio") == ("VAEDecodeAudio", "AUDIO")
    else:
        assert workflow.source(pictures, "images") == ("VAEDecode", "IMAGE")
        assert workflow.source(sounds, "audio") == ("VAEDecodeAudio", "AUDIO")
    for kind, file in (("VAEDecode", FILES["vae"]), ("VAEDecodeAudio", FILES["audio vae"])):
        (link_id,) = [i["link"] for i in workflow.only(kind)["inputs"] if i["name"] == "vae"]
        (link,) = [link for link in workflow.graph["links"] if link[0] == link_id]
        assert workflow.nodes[link[1]]["widgets_values"] == [file]


def test_every_model_file_has_its_download(workflow):
    found = set()
    for node in workflow.nodes.values():
        for model in node.get("properties", {}).get("models", ()):
            address = urlparse(model["url"])
            assert address.scheme == "https"
            assert address.path.endswith("/" + model["name"])
            assert model["name"] in node["widgets_values"]
            found.add((model["directory"], model["name"]))
    assert found == {(folder.removeprefix("audio "), name) for folder, name in FILES.items()}


def test_nodes_name_their_pack(workflow):
    for node in workflow.nodes.values():
        if node["type"] == "MarkdownNote":
            continue
        properties = node["properties"]
        nox = node["type"] in NOX_WIDGETS
        assert properties["cnr_id"] == ("nox-h3" if nox else "comfy-core")
        assert properties["ver"] == ("0.1.0" if nox else "0.33.0")
        assert properties["Node name for S&R"] == node["type"]


def test_a_note_says_what_to_download(workflow):
    text = workflow.titled("Start here")["widgets_values"][0]
    for name in (*FILES.values(), "taeh3.safetensors"):
        assert re.search(rf"\[{re.escape(name)}\]\(https://[^)]+/{re.escape(name)}\)", text), name
    assert "ComfyUI 0.33" in text
    assert "If audio crackles, first try sampler euler and mode dense" in text
    modes = workflow.titled("Which mode?")["widgets_values"][0]
    assert "unproven" in modes
    assert "GPU kernels for H100, H200 and GH200 only" in modes


def test_no_path_of_a_machine(workflow):
    text = workflow.path.read_text(encoding="utf-8")
    assert text.isascii()
    assert not re.search(r"/(home|root|Users|work|tmp)/|[A-Z]:\\\\", text)


def test_thumbnail_is_a_small_jpeg(workflow):
    data = workflow.path.with_suffix(".jpg").read_bytes()
    assert data.startswith(b"\xff\xd8\xff")
    assert data.endswith(b"\xff\xd9")
    assert len(data) < 60_000


def test_api_prompt_is_the_same_graph(workflow):
    prompt = workflow.prompt()
    drawn = {str(n["id"]): n for n in workflow.nodes.values() if n["type"] != "MarkdownNote"}
    assert {key: node["class_type"] for key, node in prompt.items()} == {
        key: node["type"] for key, node in drawn.items()
    }
    links = {link[0]: [str(link[1]), link[2]] for link in workflow.graph["links"]}
    for key, node in prompt.items():
        expected = dict(drawn[key].get("widgets_values_named", {}))
        for wired in drawn[key]["inputs"]:
            if wired["link"] is not None:
                expected[wired["name"]] = links[wired["link"]]
        # what only the page uses
        for name in ("fixed", "control_after_generate", "upload"):
            expected.pop(name, None)
        assert node["inputs"] == expected, node["class_type"]


# ---- the sizes that the graphs compute -----------------------------------------------------------

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_FUNCTIONS = {"max": max, "min": min, "round": round, "sqrt": math.sqrt}


def compute(expression: str, **names):
    """What ComfyUI's Math Expression gives for the few operations used here."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Call):
            return _FUNCTIONS[node.func.id](*map(value, node.args))
        return names[node.id] if isinstance(node, ast.Name) else node.value

    return int(value(ast.parse(expression, mode="eval").body))


@pytest.mark.parametrize("seconds", [0.1, 1, 4, 5, 5.0001, 7.5, 10, 15, 20])
def test_duration_becomes_a_legal_number_of_frames(workflow, seconds):
    h3 = workflow.only("MiniMaxH3ImageToVideo")
    (expression,) = workflow.wired(h3, "length")["widgets_values"]
    num_frames = compute(expression, a=seconds)
    assert num_frames == snap_num_frames(max(5, round(seconds * 24) + TAKEN[workflow.name]))
    assert workflow.source(h3, "length") == (
        "ComfyMathExpression",
        "INT",
    )


def picture_canvas(width: int, height: int, short_edge: int) -> tuple[int, int]:
    workflow = Workflow(IMAGE)
    sides = ("Width of H3's canvas", "Height of H3's canvas")
    return tuple(
        compute(workflow.titled(side)["widgets_values"][0], a=width, b=height, c=short_edge)
        for side in sides
    )


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ((1920, 1080), (1344, 768)),
        ((1080, 1920), (768, 1344)),
        ((768, 768), (768, 768)),
        ((4000, 3000), (1024, 768)),
        ((3000, 4000), (768, 1024)),
        ((2100, 900), (1536, 672)),
        ((1500, 1000), (1152, 768)),
        ((1000, 800), (960, 768)),
        ((4000, 1000), (2016, 512)),
        ((1000, 4000), (512, 2016)),
    ],
)
def test_canvas_follows_the_picture(picture, expected):
    assert picture_canvas(*picture, short_edge=768) == expected


def test_canvas_is_the_official_one_for_any_picture():
    for width in range(256, 4097, 113):
        for height in range(256, 4097, 127):
            assert picture_canvas(width, height, short_edge=768) == canvas(width, height)


def test_short_edge_scales_the_canvas():
    assert picture_canvas(1920, 1080, short_edge=512) == (896, 512)
    assert picture_canvas(768, 768, short_edge=512) == (512, 512)


# ---- the clip that goes on -----------------------------------------------------------------------


def clip_canvas(width: int, height: int, short_edge: int) -> tuple[int, int]:
    workflow = Workflow(CONTINUE)
    return tuple(
        compute(workflow.titled(side)["widgets_values"][0], a=width, b=height, c=short_edge)
        for side in ("Width", "Height")
    )


def test_a_clip_that_goes_on_keeps_its_size():
    assert clip_canvas(1344, 768, 768) == (1344, 768)
    assert clip_canvas(512, 896, 768) == (512, 896)
    assert clip_canvas(1920, 1080, 768) == (1376, 768)
    assert clip_canvas(20, 20, 768) == (32, 32)


def test_the_last_frames_and_their_sound_guide_the_first_and_are_not_saved_again():
    workflow = Workflow(CONTINUE)
    guide = workflow.only("MiniMaxH3AddGuide")
    pictures, sound = workflow.wired(guide, "image"), workflow.wired(guide, "audio")
    assert guide["widgets_values"] == [0]
    assert pictures["widgets_values"] == [-22, 22]
    assert sound["widgets_values"] == [-0.92, 0.92]  # seconds, in the widget's steps of 0.01
    assert workflow.source(pictures, "image") == ("GetVideoComponents", "images")
    assert workflow.source(sound, "audio") == ("GetVideoComponents", "audio")
    assert workflow.source(workflow.only("BasicGuider"), "conditioning")[0] == "MiniMaxH3AddGuide"
    new_pictures, new_sound = (workflow.titled(title) for title in ONLY_NEW)
    assert new_pictures["widgets_values"][0] == 22
    assert new_sound["widgets_values"][0] == 0.92
