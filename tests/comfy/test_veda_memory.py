"""Veda in memory: ComfyUI reads, loads and unloads the predictor, and only where it is needed."""

import shutil

import pytest
from comfy_graphs import MEDIUM, attention, latent_graph, veda, video_graph

MODEL, PREDICTOR = "MiniMaxH3", "VedaPredictor"
BROKEN = "truncated.safetensors"


def run(host, *patches):
    result = host.run(latent_graph(*patches, canvas=MEDIUM, steps=2))
    assert result.status == "success", result.error
    return result


def was_read(result) -> bool:
    return any(line.startswith("Nox: Veda predictor ") for line in result.log)


@pytest.mark.parametrize("forget_nodes", [False, True], ids=["models", "models and nodes"])
def test_a_predictor_is_unloaded_and_comes_back_with_the_model(host, forget_nodes):
    first = run(host, veda())
    host.unload(forget_nodes=forget_nodes)
    second = run(host, veda())
    assert sorted(second.loads) == [MODEL, PREDICTOR]
    assert was_read(second) == forget_nodes
    assert (second.digest, second.report) == (first.digest, first.report)


def test_a_predictor_in_use_stays_loaded(host):
    run(host, veda())
    second = run(host, veda())
    assert PREDICTOR not in second.loads
    assert not was_read(second)


@pytest.mark.parametrize("mode", ["sage", "sparse", "dense"])
def test_after_a_switch_of_the_mode_the_predictor_is_loaded_no_more(host, mode):
    run(host, veda())
    host.unload(forget_nodes=False)
    result = run(host, attention(mode, predictor="tiny.safetensors"))
    assert result.loads == [MODEL]
    assert result.digest == run(host, attention(mode)).digest


@pytest.mark.parametrize("patches", [(), (veda(), attention())], ids=["no Nox", "sage comes last"])
def test_a_run_without_veda_loads_no_predictor(host, patches):
    run(host, veda())
    host.unload(forget_nodes=False)
    assert run(host, *patches).loads == [MODEL]


@pytest.mark.parametrize("mode", ["sage", "sparse", "dense"])
def test_another_mode_does_not_read_the_predictor_that_is_wired(host, mode):
    result = run(host, attention(mode, predictor=BROKEN))
    assert not was_read(result)
    assert result.digest == run(host, attention(mode)).digest


def test_mode_veda_reads_the_predictor_that_was_wired_all_along(host):
    host.unload(forget_nodes=True)
    assert not was_read(run(host, attention(predictor="tiny.safetensors")))
    result = run(host, veda())
    assert was_read(result)
    assert "3 of 8 attention calls veda" in result.report


def test_a_file_that_was_replaced_under_its_name_is_another_predictor(host):
    folder = host.base / "models" / "veda_predictors"
    tiny, other = (folder / f"{name}.safetensors" for name in ("tiny", "other_weights"))
    file = folder / "replaced.safetensors"
    shutil.copy(tiny, file)
    first = run(host, veda(file.name))
    assert first.digest == run(host, veda()).digest
    shutil.copy(other, file)
    second = run(host, veda(file.name))
    assert was_read(second)
    assert second.digest == run(host, veda(other.name)).digest != first.digest


def test_a_name_that_comes_by_wire_is_not_read_again(host):
    # one graph, queued twice: ComfyUI must find everything in its cache
    graph = latent_graph(veda(), canvas=MEDIUM, steps=2)
    loader = next(node for node in graph.values() if node["class_type"] == "NoxLoadVedaPredictor")
    name = loader["inputs"]["predictor_name"]
    switch = graph.add("ComfySwitchNode", switch=True, on_false=name, on_true=name)
    loader["inputs"]["predictor_name"] = switch
    first, second = host.run(graph), host.run(graph)
    assert was_read(first)
    assert first.status == second.status == "success"
    assert (second.loads, second.log) == ([], [])


def test_a_host_that_keeps_nothing_still_renders_and_reports(forgetful_host):
    result = forgetful_host.run(video_graph(veda(), canvas=MEDIUM, steps=2))
    assert result.status == "success", result.error
    assert "plan medium" in result.report
    assert result.shown("text") == result.timed_reports
