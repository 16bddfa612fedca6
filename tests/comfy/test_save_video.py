"""Nox Save Video in ComfyUI: files that play, reports that agree, and wrong input."""

import re

import av
import pytest
from comfy_files import streams_of, tags_of
from comfy_graphs import Graph, add_saver, attention, video_graph
from comfy_prompts import shipped_prompt


@pytest.mark.parametrize("name", ["t2v", "i2v"])
def test_a_shipped_workflow_runs_and_saves_picture_and_sound(host, name):
    result = host.run(shipped_prompt(host, name))
    assert result.status == "success", result.error
    counts = streams_of(result.video_file)
    assert counts["video"] == 22
    assert counts["audio"] >= 0.95 * 32000 * 22 / 24
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
