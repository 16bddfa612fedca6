"""Keyframes and references under routes: kept whole, or routed where a user or a file says so."""

import re

import comfy_graphs as graphs
import pytest
from comfy_graphs import LARGE, MEDIUM, attention, latent_graph, task_graph, veda

OUTSIDE = "outside its training"
TILED, WHOLE = "tiled_conditions.safetensors", "whole_conditions.safetensors"
MANY = "Nox: Visual references are "


def run(host, graph):
    result = host.run(graph)
    assert result.status == "success", result.error
    return result


def kept_percent(result) -> float:
    return float(re.search(r"\(([\d.]+) % of tiles\)", result.report)[1])


def warnings_of(result) -> list[str]:
    return [line for line in result.log if OUTSIDE in line or line.startswith(MANY)]


@pytest.mark.parametrize("name", ["MEDIUM", "LARGE"])
def test_a_predictor_that_tiles_conditions_runs_without_any(host, name):
    canvas = graphs.CANVASES[name]
    result = run(host, latent_graph(veda(TILED), canvas=canvas, steps=2))
    assert f"Nox veda 1.5 tiles, {TILED}, plan {name.lower()}, " in result.report
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
    (warning,) = warnings_of(whole)
    assert OUTSIDE in warning
    assert "kept whole" in warning
    assert "Nox veda 1.5 tiles, conditions 1 tile, " in tiled.report
    assert "3 of 8 attention calls veda" in tiled.report
    assert "3 of 8 attention calls veda" in whole.report


def test_a_whole_budget_routes_no_condition_either(host):
    graph = task_graph("keyframes", veda(TILED, veda_budget=100), canvas=MEDIUM, steps=2)
    sage = run(host, task_graph("keyframes", attention(), canvas=MEDIUM, steps=2))
    assert run(host, graph).digest == sage.digest


def test_only_conditions_are_outside_a_predictors_training(host):
    assert warnings_of(run(host, latent_graph(veda(), steps=2))) == []
    (warning,) = warnings_of(run(host, task_graph("keyframes", veda(), steps=2)))
    assert OUTSIDE in warning


def references(host, side: int, **values):
    """The sparse render with a reference picture of so many tokens a side."""
    node = attention("sparse", budget=10, layout="raster", **values)
    return run(host, latent_graph(node, reference=side, steps=2))


def test_large_references_are_said_to_cost_until_they_are_routed(host):
    # 32 x 32 tokens are the fewest that may be routed; the video has 224
    kept, routed = references(host, 32), references(host, 32, route_references=True)
    assert warnings_of(kept) == [
        "Nox: Visual references are kept whole, 457 % as many rows as the video. To save time, "
        "turn on route_references."
    ]
    assert warnings_of(routed) == []
    # Of 11 query tiles and 22 KV tiles: 2 of video, 8 of text and picture, 1 with sound.
    assert kept_percent(kept) == round(100 * (2 * 21 + 8 * 19 + 22) / (11 * 22), 1)
    # 15 KV tiles hold nothing but the picture; beside its own a query tile keeps 2 of them
    assert kept_percent(routed) == round(100 * (2 * 8 + 7 + 7 * 8 + 22) / (11 * 22), 1)
    assert routed.digest != kept.digest


def test_a_reference_below_the_limit_stays_whole(host):
    kept, routed = references(host, 31), references(host, 31, route_references=True)
    assert (routed.digest, routed.report) == (kept.digest, kept.report)
    for result in (kept, routed):
        (warning,) = warnings_of(result)
        assert warning.endswith("To save time, give fewer or smaller ones.")


def test_few_references_are_not_worth_a_warning(host):
    # 49 and 64 of 224 rows; the limit is a quarter
    assert warnings_of(references(host, 7)) == []
    assert len(warnings_of(references(host, 8))) == 1


def test_routing_references_is_of_mode_sparse_alone(host):
    plain, routed = (
        run(host, latent_graph(veda(route_references=on), reference=32, steps=2))
        for on in (False, True)
    )
    assert (routed.digest, routed.report) == (plain.digest, plain.report)
