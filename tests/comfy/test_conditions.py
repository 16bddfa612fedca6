"""Keyframes and references under routes: kept whole, or routed where a user or a file says so."""

import re

import comfy_graphs as graphs
import pytest
from comfy_graphs import LARGE, MEDIUM, SMALL, attention, latent_graph, task_graph, veda

OUTSIDE = (
    "Nox: This Veda predictor was trained on text to video; with keyframes or references it is "
    "outside its training. They are kept whole."
)
TILED, WHOLE = "tiled_conditions.safetensors", "whole_conditions.safetensors"
MANY = "Visual references are "
# 7 x 10 x 16 = 1120 rows: from 1024 on a reference may be routed
BIG_CLIP = (512, 320)


def run(host, graph):
    result = host.run(graph)
    assert result.status == "success", result.error
    return result


def kept_percent(result) -> float:
    return float(re.search(r"\(([\d.]+) % of tiles\)", result.report)[1])


def warnings_of(result) -> list[str]:
    return [line for line in result.log if line == OUTSIDE or MANY in line]


@pytest.mark.parametrize("name", ["MEDIUM", "LARGE"])
def test_a_predictor_that_tiles_conditions_runs_without_any(host, name):
    canvas = graphs.CANVASES[name]
    result = run(host, latent_graph(veda(TILED), canvas=canvas, steps=2))
    assert f"Nox veda 1.5 tiles, {TILED}, plan {name.lower()}" in result.report
    whole = run(host, latent_graph(veda(WHOLE), canvas=canvas, steps=2))
    assert result.digest == whole.digest
    assert kept_percent(result) == kept_percent(whole)


@pytest.mark.parametrize("task", ["keyframes", "references"])
def test_a_predictor_that_tiles_conditions_routes_them(host, task):
    tiled = run(host, task_graph(task, veda(TILED), canvas=LARGE, steps=2))
    whole = run(host, task_graph(task, veda(WHOLE), canvas=LARGE, steps=2))
    assert kept_percent(tiled) < kept_percent(whole)
    assert tiled.digest != whole.digest
    assert warnings_of(tiled) == []
    assert warnings_of(whole) == [OUTSIDE]
    assert "3 of 8 attention calls veda" in tiled.report
    assert "3 of 8 attention calls veda" in whole.report


def test_a_whole_budget_routes_no_condition_either(host):
    graph = task_graph("keyframes", veda(TILED, veda_budget=100), canvas=MEDIUM, steps=2)
    sage = run(host, task_graph("keyframes", attention(), canvas=MEDIUM, steps=2))
    assert run(host, graph).digest == sage.digest


def test_text_to_video_is_within_a_predictors_training(host):
    assert warnings_of(run(host, latent_graph(veda(), steps=2))) == []


def test_large_references_are_said_to_cost_until_they_are_routed(host):
    def references(**values):
        node = attention("sparse", budget=10, **values)
        return run(host, task_graph("references", node, canvas=SMALL, clip=BIG_CLIP, steps=2))

    kept, routed = references(), references(route_references=True)
    (warning,) = warnings_of(kept)
    assert warning.endswith("To route the large ones too, turn on route_references.")
    assert warnings_of(routed) == []
    assert kept_percent(routed) < kept_percent(kept) - 10
    assert routed.digest != kept.digest


def test_routing_references_changes_nothing_without_a_large_one(host):
    def references(**values):
        node = attention("sparse", budget=1, layout="raster", **values)
        return run(host, task_graph("references", node, steps=2))

    kept, routed = references(), references(route_references=True)
    assert (routed.digest, routed.report) == (kept.digest, kept.report)
