"""Nox Save Video in ComfyUI: files that play, reports that agree, and wrong input."""

import json
import re

import av
import pytest
from comfy_files import streams_of, tags_of
from comfy_graphs import Graph, add_saver, attention, video_graph
from comfy_prompts import shipped_prompt
from PIL import Image

from nox_kernels.video_format import find


@pytest.mark.parametrize(("name", "num_frames"), [("t2v", 22), ("i2v", 22), ("continue", 34)])
def test_a_shipped_workflow_runs_and_saves_picture_and_sound(host, name, num_frames):
    result = host.run(shipped_prompt(host, name))
    assert result.status == "success", result.error
    counts = streams_of(result.video_file)
    assert counts["video"] == num_frames
    assert counts["audio"] >= 0.95 * 32000 * num_frames / 24
    # 8 steps, told by the LoRA's name, of 4 blocks
    assert "32 of 32 attention calls INT8" in result.report


def test_the_workflow_comes_back_out_of_the_file(host):
    graph = video_graph(attention())
    result = host.run(graph)
    assert tags_of(result.video_file)["prompt"] == graph
    graph = video_graph(attention())
    (saver,) = [node for node in graph.values() if node["class_type"] == "NoxSaveVideo"]
    saver["inputs"]["save_metadata"] = False
    assert tags_of(host.run(graph).video_file) == {}


def image(graph: Graph, **values) -> list:
    defaults = {"width": 64, "height": 64, "batch_size": 3, "color": 0x336699}
    return graph.add("EmptyImage", **defaults | values)


def save(host, **sources):
    graph = Graph()
    inputs = {name: make(graph) for name, make in sources.items()}
    add_saver(graph, **inputs)
    return host.run(graph)


def video(graph: Graph) -> list:
    return graph.add("CreateVideo", images=image(graph), fps=24, bit_depth=8)


def test_nothing_to_save_is_refused_before_the_run(host):
    result = save(host)
    assert result.status == "rejected"
    assert "Nox Save Video has nothing to save; connect either images or a video." in result.error


def test_images_and_video_together_are_refused_before_the_run(host):
    result = save(host, images=image, video=video)
    assert result.status == "rejected"
    assert "has both images and a video connected; disconnect one" in result.error


def test_no_sound_gives_a_file_without_sound(host):
    result = save(host, images=image)
    assert result.status == "success", result.error
    assert streams_of(result.video_file) == {"video": 3}


def test_a_video_is_saved_with_the_sound_that_is_wired(host):
    result = save(host, video=video, audio=lambda graph: graph.add("TinyH3Audio", kind="tone"))
    assert result.status == "success", result.error
    assert streams_of(result.video_file).keys() == {"video", "audio"}


def test_invalid_sound_is_saved_as_silence_and_said(host):
    result = save(host, images=image, audio=lambda graph: graph.add("TinyH3Audio", kind="nan"))
    assert result.status == "success", result.error
    text = "2000 of 64000 sound samples are invalid (NaN or infinite); they were replaced by "
    assert text in "\n".join(result.shown("text"))
    assert any(text in line for line in result.log)
    assert streams_of(result.video_file)["audio"] >= 32000


def test_frames_of_odd_size_are_padded_and_said(host):
    odd = {"width": 1058, "height": 793}
    result = save(host, images=lambda graph: image(graph, **odd))
    assert result.status == "success", result.error
    (text,) = result.shown("text")
    assert "The frames are 1058x793" in text
    assert "the video is 1058x794" in text
    with av.open(str(result.video_file)) as file:
        frame = next(file.decode(video=0))
    assert (frame.width, frame.height) == (1058, 794)


def test_a_second_file_of_one_prefix_leaves_the_first_alone(host):
    first = save(host, images=image).video_file
    content = first.read_bytes()
    second = save(host, images=lambda graph: image(graph, color=0x112233)).video_file
    assert first.parent == second.parent == host.output / "nox"
    numbers = [int(re.search(r"_(\d{5})_\.mp4$", file.name)[1]) for file in (first, second)]
    assert numbers[1] > numbers[0]
    assert first.read_bytes() == content


# Kinds of file, where they go, and what is refused before the run


def sound(graph: Graph) -> list:
    return graph.add("TinyH3Audio", kind="tone")


@pytest.mark.parametrize(
    ("kind", "codecs"),
    [
        ("mp4 (H.265 + AAC)", ("hevc", "aac")),
        ("mkv (FFV1 + FLAC)", ("ffv1", "flac")),
        ("mov (ProRes 422 HQ + PCM)", ("prores", "pcm_s24le")),
    ],
)
def test_each_kind_of_file_is_saved_with_picture_and_sound(host, kind, codecs):
    result, path = save_to_path(host, images=image, audio=sound, format=kind)
    assert result.status == "success", result.error
    with av.open(str(path)) as file:
        assert tuple(stream.codec_context.name for stream in file.streams) == codecs
    assert streams_of(path).keys() == {"video", "audio"}
    # a browser plays no mkv and no ProRes: the node shows the first frame
    (shown,) = (file for output in result.outputs.values() for file in output.get("images", ()))
    assert shown["filename"].endswith(".mp4" if path.suffix == ".mp4" else ".png")


def save_to_path(host, **sources):
    """The run and the file that it added, below output or temp."""
    before = files_in(host)
    graph = Graph()
    inputs = {name: make(graph) if callable(make) else make for name, make in sources.items()}
    add_saver(graph, **inputs)
    result = host.run(graph)
    new = [path for path in sorted(files_in(host) - before) if path.suffix != ".png"]
    return result, new[0] if new else None


def files_in(host) -> set:
    folders = (host.output, host.output.parent / "temp")
    return {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_temp_keeps_the_output_folder_clean(host):
    result, path = save_to_path(host, images=image, save_to="temp")
    assert result.status == "success", result.error
    assert path.parent == host.output.parent / "temp" / "nox"
    (shown,) = (file for output in result.outputs.values() for file in output.get("images", ()))
    assert (shown["type"], shown["subfolder"], shown["filename"]) == ("temp", "nox", path.name)


def test_the_first_frame_lies_beside_the_video_with_the_workflow_inside(host):
    graph = Graph()
    add_saver(graph, images=image(graph, width=33, height=65), first_frame_png=True)
    result = host.run(graph)
    assert result.status == "success", result.error
    picture = Image.open(result.video_file.with_suffix(".png"))
    assert picture.size == (33, 65)
    assert picture.getpixel((0, 0)) == (0x33, 0x66, 0x99)
    assert json.loads(picture.text["prompt"]) == graph
    leftovers = [path.name for path in result.video_file.parent.iterdir() if ".part" in path.name]
    assert leftovers == []


def test_an_encoder_that_this_machine_lacks_is_refused_before_the_run(host):
    lacking = find("mp4 (H.264 NVENC + AAC)")
    if lacking.why_no_picture(crf=18, preset="medium") is None:
        pytest.skip("this machine has it")
    result = save(host, images=image, format=lambda graph: lacking.name)
    assert result.status == "rejected"
    assert "the encoder h264_nvenc does not open" in result.error
    assert "Choose another format." in result.error


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("format", "gif", "There is no video format 'gif'"),
        ("crf", 52, "crf must be between 0 (best) and 51"),
        ("encoder_preset", "warp", "encoder preset 'warp' is none of"),
        ("save_to", "desk", "save_to"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_run(host, name, value, words):
    result = save(host, images=image, **{name: lambda graph: value})
    assert result.status == "rejected"
    assert words in result.error


def test_not_a_number_in_a_graph_becomes_null_in_the_tags(host):
    graph = Graph()
    # a colour of its own: ComfyUI would answer a graph that it knows from its cache
    add_saver(graph, images=image(graph, color=0x010203))
    graph["1"]["_meta"] = {"title": "x", "score": float("nan"), "list": [float("inf"), 1.5]}
    result = host.run(graph)
    assert result.status == "success", result.error
    meta = tags_of(result.video_file)["prompt"]["1"]["_meta"]
    assert (meta["score"], meta["list"]) == (None, [None, 1.5])


def test_a_folder_that_turns_out_to_be_a_file_costs_no_clip(host):
    graph = Graph()
    # known only when the token is filled in: before the run there is nothing to see
    link = image(graph, color=0x445566)
    add_saver(graph, images=link, filename_prefix="nox_%EmptyImage.color%/test")
    blocker = host.output / f"nox_{0x445566}"
    blocker.write_text("a file where the folder should be")
    result = host.run(graph)
    assert result.status == "success", result.error
    assert result.video_file.parent == host.output / "video"
    (text,) = result.shown("text")
    assert "The video was saved under video/Nox_H3 in the output folder instead: " in text
    assert f"{blocker} because it is a file; move it away." in text
    assert blocker.read_text() == "a file where the folder should be"


def test_a_save_that_fails_keeps_the_images_for_the_next_run(host):
    graph = Graph()
    half = image(graph, color=0x223344, width=8200)
    sides = {"direction": "right", "match_image_size": True, "spacing_width": 0}
    link = graph.add("ImageStitch", image1=half, image2=half, spacing_color="white", **sides)
    saver = add_saver(graph, images=link)
    result = host.run(graph)
    assert result.status == "error"
    assert "cannot hold 16400x64 pixels" in result.error  # which nobody knew before the run
    graph[saver[0]]["inputs"]["format"] = "mkv (FFV1 + FLAC)"
    again = host.run(graph)
    assert again.status == "success", again.error
    assert link[0] in again.cached


# What other nodes and other pages may put there, and a prefix.
ODD_GRAPHS = [
    *(
        ({"extra_pnginfo": {"workflow": workflow}}, "nox/%EmptyImage.color%")
        for workflow in (
            "x",
            {"nodes": [], "definitions": {"subgraphs": None}},
            {"nodes": [None]},
            {"nodes": [{"id": 1, "type": ["x"]}]},
            {"nodes": [{"id": 1, "type": "x", "properties": ["a"]}]},
        )
    ),
    *(({"extra_pnginfo": extra}, "nox/plain") for extra in (["x"], "x", {"雪": 1})),
]


@pytest.mark.parametrize("kind", ["mp4 (H.264 + AAC)", "mkv (FFV1 + FLAC)"])
@pytest.mark.parametrize("case_idx", range(len(ODD_GRAPHS)))
def test_an_odd_graph_costs_no_clip(host, kind, case_idx):
    extra, prefix = ODD_GRAPHS[case_idx]
    graph = Graph()
    # a colour of its own: ComfyUI would answer a prompt that it knows from its cache
    link = image(graph, color=0x100000 + case_idx)
    add_saver(graph, images=link, filename_prefix=prefix, format=kind, first_frame_png=True)
    before = files_in(host)
    result = host.run(graph, extra_data=extra)
    assert result.status == "success", result.error
    assert any(path.suffix in (".mp4", ".mkv") for path in files_in(host) - before)


@pytest.mark.parametrize("kind", ["text", "unnamed", "bool"])
def test_sound_that_is_none_costs_no_clip(host, kind):
    result = save(host, images=image, audio=lambda graph: graph.add("TinyH3Audio", kind=kind))
    assert result.status == "success", result.error
    assert streams_of(result.video_file) == {"video": 3}
    assert "The video was saved without sound" in "\n".join(result.shown("text"))


def test_wired_settings_that_cannot_be_are_replaced_and_said(host):
    graph = Graph()
    wires = {
        "fps": graph.add("PrimitiveFloat", value=0.0),
        "crf": graph.add("PrimitiveInt", value=99),
        "filename_prefix": graph.add("PrimitiveString", value="../x"),
    }
    add_saver(graph, images=image(graph), **wires)
    result = host.run(graph)
    assert result.status == "success", result.error
    (text,) = result.shown("text")
    for sentence in ("saved at 24 fps instead: ", "with crf 18 instead: ", "under video/Nox_H3 in"):
        assert sentence in text


def test_grey_frames_are_saved(host):
    result = save(host, images=lambda graph: graph.add("TinyH3Grey"))
    assert result.status == "success", result.error
    assert streams_of(result.video_file) == {"video": 3}


def test_a_folder_that_cannot_be_is_refused_before_the_run(host):
    blocker = host.output / "nox_blocked"
    blocker.write_text("a file where the folder should be")
    result = save(host, images=image, filename_prefix=lambda graph: "nox_blocked/a/test")
    blocker.unlink()
    assert result.status == "rejected"
    assert "nox_blocked because it is a file; move it away" in result.error


def test_a_rate_that_the_format_cannot_hold_is_refused_before_the_run(host):
    kind = "mp4 (AV1 10-bit + AAC)"
    result = save(host, images=image, fps=lambda graph: 300.0, format=lambda graph: kind)
    assert result.status == "rejected"
    assert "cannot hold 300 frames a second" in result.error


@pytest.mark.parametrize("fps", [0.0, 1e9])
def test_a_rate_that_no_file_holds_is_refused_before_the_run(host, fps):
    result = save(host, images=image, fps=lambda graph: fps)
    assert result.status == "rejected"
    assert "The frame rate must be between" in result.error


def test_a_prefix_that_its_tokens_spoil_falls_back_and_says_so(host):
    graph = Graph()
    link = image(graph, color=0x0A0B0C)
    graph.add("PrimitiveString", value="")
    add_saver(graph, images=link, filename_prefix="%PrimitiveString.value%")
    result = host.run(graph)
    assert result.status == "success", result.error
    assert result.video_file.parent == host.output / "video"
    assert "The video was saved under video/Nox_H3 in the out" in "\n".join(result.shown("text"))


def test_the_outputs_are_the_file_its_last_frame_and_its_path(host):
    graph = Graph()
    first = image(graph, batch_size=2, color=0xFF0000)
    last = image(graph, batch_size=1, color=0x00FF00)
    joined = graph.add("ImageBatch", image1=first, image2=last)
    saver = add_saver(graph, images=joined)
    path = graph.add("PreviewAny", source=[saver[0], 2])
    graph.add("SaveImage", images=[saver[0], 1], filename_prefix="nox/last")
    result = host.run(graph)
    assert result.status == "success", result.error
    assert result.outputs[path[0]]["text"] == [str(result.video_file)]
    (picture,) = (
        host.output / file["subfolder"] / file["filename"]
        for output in result.outputs.values()
        for file in output.get("images", ())
        if file["filename"].startswith("last")
    )
    assert Image.open(picture).getpixel((5, 5)) == (0, 255, 0)


def test_disable_metadata_keeps_everything_out_of_both_files(discreet_host):
    graph = Graph()
    add_saver(graph, images=image(graph), first_frame_png=True)
    result = discreet_host.run(graph)
    assert result.status == "success", result.error
    assert tags_of(result.video_file) == {}
    assert Image.open(result.video_file.with_suffix(".png")).text == {}


def test_a_prompt_from_before_the_newer_inputs_runs_as_it_was(host):
    graph = Graph()
    old = {"fps": 24.0, "filename_prefix": "nox/old", "format": "mp4 (H.264 + AAC)", "crf": 18}
    graph.add("NoxSaveVideo", images=image(graph, color=0x778899), save_metadata=True, **old)
    result = host.run(graph)
    assert result.status == "success", result.error
    assert streams_of(result.video_file) == {"video": 3}
