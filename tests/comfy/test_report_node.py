"""Nox Report: its text and picture say what the run upstream of it did, and nothing else."""

import json
import re

import comfy_graphs as graphs
import numpy as np
import pytest
from comfy_files import tags_of
from comfy_graphs import attention, dense_control, latent_graph, probe, video_graph
from comfy_page import PageListener
from PIL import Image

SPARSE = attention("sparse", budget=1, layout="raster")
BLUE, ORANGE, GREY = (31, 111, 180), (242, 169, 59), (154, 154, 154)


def with_report(graph, kind="TinyH3SaveLatent", field="samples"):
    """The graph with Nox Report in front of what takes its result; returns its id too."""
    (taker,) = [node for node in graph.values() if node["class_type"] == kind]
    report = graph.add("NoxReport", after=taker["inputs"][field])
    taker["inputs"][field] = report
    return graph, report[0]


def picture_of(result, node) -> np.ndarray:
    (shown,) = result.outputs[node]["images"]
    folder = result.folder.parent / shown["type"] / shown["subfolder"]
    return np.asarray(Image.open(folder / shown["filename"]).convert("RGB"))


def columns_of(picture: np.ndarray, num_columns: int, num_rows: int) -> list[list[tuple]]:
    """The colour in the middle of each cell of the plot: the largest box that is not background."""
    is_plot = (picture != (24, 24, 24)).any(axis=2)
    rows = np.flatnonzero(is_plot.mean(axis=1) > 0.8)
    columns = np.flatnonzero(is_plot[rows].mean(axis=0) > 0.8)
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    return [
        [
            tuple(
                picture[
                    int(top + (row + 0.5) * (bottom - top) / num_rows),
                    int(left + (column + 0.5) * (right - left) / num_columns),
                ].tolist()
            )
            for row in range(num_rows)
        ]
        for column in range(num_columns)
    ]


def test_text_badge_tag_log_and_picture_agree(host):
    graph, node = with_report(video_graph(SPARSE, canvas=graphs.MEDIUM))
    with PageListener(host.port) as page:
        result = host.run(graph)
        texts = [
            text
            for id_, text in page.texts_of_one_prompt()
            if graph[id_]["class_type"] == "NoxAttention"
        ]
    assert result.status == "success", result.error
    (line,) = result.timed_reports
    text = result.outputs[node]["text"][0]
    assert text.split("\n")[0] == line
    saver = next(key for key, value in graph.items() if value["class_type"] == "NoxSaveVideo")
    assert result.outputs[saver]["text"][0] == line
    (tag,) = tags_of(result.video_file)["nox"]
    assert (tag["num_steps"], tag["dense_steps"]) == (4, [1])
    first, second = texts[-1].split("\n")
    assert first.replace(" %", "%") == f"sparse {100 * tag['kept_share']:.1f}%, 1/4 steps dense."
    assert "Dense steps: 1 of 4 (1)." in text
    assert f"{100 * tag['kept_share']:.1f} % of tile pairs in sparse calls" in text
    assert set(tag["ms_per_call"]) == {"sparse", "sage"}
    assert second.startswith("PyTorch ")
    for kind, word in (("sparse", "sparse"), ("sage", "dense")):
        assert f"{tag['ms_per_call'][kind]:.2g} ms per {word} call" in line
    (shown,) = re.findall(r"[\d.]+(?= s\b)", second)  # two digits of it
    assert float(shown) == pytest.approx(abs(tag["seconds_saved"]), rel=0.06, abs=2e-3)
    won = "saved" if tag["seconds_saved"] >= 0 else "lost"
    assert line.endswith(f"; {won} about {shown} s")
    expected = sum(
        call["count"] * (tag["host_ms_per_call"] - tag["ms_per_call"][call["kind"]])
        for call in tag["calls"]
    )
    assert abs(expected / 1000 - tag["seconds_saved"]) < 2e-3
    columns = columns_of(picture_of(result, node), 4, 4)
    assert columns == [[ORANGE] * 4] + [[ORANGE, BLUE, BLUE, BLUE]] * 3


def test_native_and_declined_calls_have_colours_and_lines_of_their_own(host):
    control = dense_control(first_steps=1, blocks="2", kernel="native")
    graph, node = with_report(
        latent_graph(probe(block=3, attention="one row less"), SPARSE, control, steps=2)
    )
    result = host.run(graph)
    assert result.status == "success", result.error
    text = result.outputs[node]["text"][0]
    assert "Calls: 4 native, in the first steps." in text
    assert "Calls: 1 native, in dense blocks." in text
    assert "Calls: 1 left to ComfyUI's own attention, attention was called with" in text
    native, mixed = columns_of(picture_of(result, node), 2, 4)
    assert native == [GREY] * 4
    assert mixed == [BLUE, BLUE, GREY, (255, 84, 112)]


def test_what_comes_in_goes_out_unchanged(host):
    plain = latent_graph(SPARSE, steps=2)
    graph, _ = with_report(latent_graph(SPARSE, steps=2))
    assert host.run(graph).digest == host.run(plain).digest


def test_it_stands_behind_the_decoder_as_well(host):
    graph, node = with_report(video_graph(SPARSE, steps=2), "NoxSaveVideo", "images")
    result = host.run(graph)
    assert result.status == "success", result.error
    assert result.outputs[node]["text"][0].split("\n")[0] == result.timed_reports[0]


def test_two_samplers_in_one_graph_have_reports_of_their_own(host):
    graph = graphs.Graph()
    model = graphs.add_model(graph, attention())
    nodes = {}
    for steps in (2, 3):
        latent = graph.add("EmptyMiniMaxH3LatentAV", **graphs.SMALL)
        positive = graphs.add_conditioning(graph)
        latent = graphs.add_sampler(graph, model, positive, latent, steps=steps)
        nodes[graph.add("NoxReport", after=latent)[0]] = steps
    result = host.run(graph)
    assert result.status == "success", result.error
    for node, steps in nodes.items():
        text = result.outputs[node]["text"][0]
        assert f"{4 * steps} of {4 * steps} attention calls" in text
        assert f"Steps: {steps}. Evaluations of the model: {steps}." in text


def test_one_behind_the_other_both_runs_are_told(host):
    graph, node = with_report(latent_graph(SPARSE, steps=2))
    first = graph[node]["inputs"]["after"]
    (saver,) = [value for value in graph.values() if value["class_type"] == "TinyH3SaveLatent"]
    model = next([key, 0] for key, value in graph.items() if value["class_type"] == "NoxAttention")
    second = graphs.add_sampler(graph, model, graphs.add_conditioning(graph), first, steps=3)
    graph[node]["inputs"]["after"] = second
    saver["inputs"]["samples"] = [node, 0]
    result = host.run(graph)
    assert result.status == "success", result.error
    lines = [
        line for line in result.outputs[node]["text"][0].split("\n") if line.startswith("Nox ")
    ]
    assert lines == result.timed_reports
    assert len(lines) == 2


def test_the_same_report_is_the_same_picture(host):
    graph, node = with_report(latent_graph(SPARSE, steps=2))
    first = host.run(graph)
    taker = graph.add("PreviewImage", images=[node, 2])
    again = host.run(graph)
    assert again.reports == []  # from the cache
    (shown,) = again.outputs[taker[0]]["images"]
    folder = again.folder.parent / shown["type"] / shown["subfolder"]
    picture = np.asarray(Image.open(folder / shown["filename"]).convert("RGB"))
    assert (picture == picture_of(first, node)).all()
    assert picture.shape[1] >= 250


def test_without_nox_it_says_so(host):
    graph, node = with_report(latent_graph(steps=1))
    result = host.run(graph)
    assert result.status == "success", result.error
    (text,) = result.outputs[node]["text"]
    assert text.startswith("No sampling run with Nox H3 Attention is known")


def test_the_node_tells_where_a_long_run_stands(host):
    graph = latent_graph(SPARSE, probe(wait_s=0.6), steps=3)
    with PageListener(host.port) as page:
        result = host.run(graph)
        texts = [text for _, text in page.texts_of_one_prompt() if text.startswith("Step ")]
    assert result.status == "success", result.error
    assert [text.split("\n")[0] for text in texts] == ["Step 2 of 3.", "Step 3 of 3."]
    assert "sage " in texts[0]
    assert "sparse " in texts[1]
    assert all(len(line) <= 30 for text in texts for line in text.split("\n"))


def test_the_badge_is_an_event_of_its_own_as_well(host):
    graph = latent_graph(SPARSE, steps=2)
    (nox,) = [key for key, node in graph.items() if node["class_type"] == "NoxAttention"]
    with PageListener(host.port) as page:
        host.run(graph)
        texts = page.texts_of_one_prompt()
    assert page.events["nox.badge"][-1] == {"node": nox, "text": texts[-1][1]}


def test_a_tag_holds_numbers_that_json_knows(host):
    result = host.run(video_graph(SPARSE, steps=2))
    (tag,) = tags_of(result.video_file)["nox"]
    assert json.loads(json.dumps(tag, allow_nan=False)) == tag
