"""What is said of mode veda: on the nodes, in the log, and in the tag of a saved file."""

import pytest
from comfy_files import tags_of
from comfy_graphs import (
    LARGE,
    MEDIUM,
    attention,
    latent_graph,
    task_graph,
    veda,
    video_graph,
)
from comfy_page import PageListener


def texts_of(host, graph) -> dict[str, list[str]]:
    """Every progress text of one run, by the class of its node."""
    with PageListener(host.port) as page:
        result = host.run(graph)
        texts = page.texts_of_one_prompt()
    assert result.status == "success", result.error
    by_class: dict[str, list[str]] = {}
    for node, text in texts:
        by_class.setdefault(graph[node]["class_type"], []).append(text)
    return by_class


def assert_it_fits(text: str) -> None:
    lines = text.split("\n")
    assert 1 <= len(lines) <= 2, text
    assert all(len(line) <= 30 for line in lines), text


@pytest.fixture(scope="module")
def texts(host):
    """The texts of a run whose predictor is read anew."""
    host.unload(forget_nodes=True)
    return texts_of(host, latent_graph(veda(), canvas=LARGE, steps=2))


def test_the_loader_says_what_the_predictor_keeps_and_knows(texts):
    (text,) = texts["NoxLoadVedaPredictor"]
    assert_it_fits(text)
    assert text.split("\n") == ["keeps 50 %, 4 plans.", "step 0"]


def test_nox_attention_says_that_the_plan_fits_before_and_what_ran_after(texts):
    fits, ran = texts["NoxAttention"][-2:]
    assert fits.startswith("large fits: ")
    assert fits.endswith(" % of tiles.\nbudget 50 %")
    assert ran.startswith("3 of 8 calls veda.\nThey compute ")


def test_every_text_has_at_most_two_lines_of_thirty_characters(texts):
    for text in texts["NoxAttention"]:
        assert_it_fits(text)


def test_a_budget_in_tiles_is_worded_as_one(host):
    host.unload(forget_nodes=True)
    texts = texts_of(host, latent_graph(veda("tiled_conditions.safetensors"), steps=2))
    assert texts["NoxLoadVedaPredictor"] == ["keeps 1.5 tiles, 4 plans.\nstep 0"]
    fits = texts["NoxAttention"][-2]
    assert fits.startswith("small fits: ")
    assert fits.endswith("\nbudget 1.5 tiles")


def test_the_names_of_released_plans_leave_room_for_the_rest(host):
    host.unload(forget_nodes=True)
    texts = texts_of(host, latent_graph(veda("only_large.safetensors"), canvas=LARGE, steps=2))
    assert texts["NoxLoadVedaPredictor"] == ["keeps 10 %, 1 plan.\nstep 0"]
    fits = texts["NoxAttention"][-2]
    assert_it_fits(fits)
    assert fits.startswith("16x9_t102 fits")
    assert "~" not in fits  # nothing was cut


def test_nox_attention_says_that_keyframes_are_outside_the_predictors_training(host):
    texts = texts_of(host, task_graph("keyframes", veda(), canvas=MEDIUM, steps=2))
    for text in texts["NoxAttention"]:
        assert_it_fits(text)
    first, second = texts["NoxAttention"][-2].split("\n")
    assert first.startswith("medium fits: ")
    assert second == "outside its training: see log"


@pytest.mark.parametrize("choice", ["sparse", "dense"])
def test_nox_attention_says_what_runs_in_place_of_veda(host, choice):
    node = veda("only_large.safetensors", on_unknown_geometry=choice, budget=1)
    graph = latent_graph(node, canvas=MEDIUM, steps=2)
    for text in texts_of(host, graph)["NoxAttention"]:
        assert_it_fits(text)
    assert text.startswith(
        {"sparse": "3 of 8 calls sparse.\n", "dense": "8 of 8 calls native."}[choice]
    )


def test_the_log_says_what_was_read_and_which_plan_fits(host):
    host.unload(forget_nodes=True)
    result = host.run(latent_graph(veda(), canvas=MEDIUM, steps=2))
    read = (
        "Nox: Veda predictor tiny.safetensors keeps 50 % and knows 4 canvases and lengths (source "
        "random weights, step 0)."
    )
    (fits,) = [line for line in result.log if "fits this clip" in line]
    assert result.log.index(read) < result.log.index(fits) < result.log.index(result.report)
    assert fits.startswith("Nox: Veda plan medium fits this clip; a budget of 50 %, all told ")


@pytest.mark.parametrize("budget", [0, 20])
def test_log_text_line_and_tag_agree(host, budget):
    graph = video_graph(veda(veda_budget=budget), canvas=MEDIUM, steps=3)
    result = host.run(graph)
    assert result.status == "success", result.error
    assert result.shown("text") == [result.report]
    (tag,) = tags_of(result.video_file)["nox"]
    assert (tag["mode"], tag["precision"], tag["num_forwards"]) == ("veda", "accurate", 3)
    assert tag["veda"] == {
        "predictor": "tiny.safetensors",
        "plan": "medium",
        "budget": f"{budget or 50} %",
        "provenance": "source random weights, step 0",
    }
    calls = {(call["kind"], call["reason"]): call["count"] for call in tag["calls"]}
    assert calls == {("sage", "first steps"): 4, ("sage", "dense block"): 2, ("veda", "veda"): 6}
    assert f"6 of 12 attention calls veda ({100 * tag['kept_share']:.1f} % of tiles)" in (
        result.report
    )


def test_the_tag_of_a_run_without_a_plan_names_none(host):
    node = veda("only_large.safetensors", on_unknown_geometry="sparse", budget=1)
    result = host.run(video_graph(node, steps=2))
    assert result.status == "success", result.error
    (tag,) = tags_of(result.video_file)["nox"]
    assert (tag["mode"], tag["veda"]) == ("veda", None)
    assert {call["kind"] for call in tag["calls"]} == {"sparse", "sage"}


def test_another_mode_says_nothing_of_the_predictor_that_is_wired(host):
    result = host.run(video_graph(attention(predictor="tiny.safetensors"), steps=2))
    assert result.status == "success", result.error
    (tag,) = tags_of(result.video_file)["nox"]
    assert tag["veda"] is None
    assert "tiny.safetensors" not in "\n".join(result.log)


def test_a_graph_that_comes_back_from_the_cache_shows_the_report_of_its_predictor(host):
    graph = video_graph(veda(), canvas=MEDIUM, steps=2)
    first = host.run(graph)
    host.run(video_graph(veda("other_weights.safetensors"), canvas=MEDIUM, steps=2))
    (saver,) = [node for node in graph.values() if node["class_type"] == "NoxSaveVideo"]
    saver["inputs"]["crf"] = 31
    again = host.run(graph)
    assert again.reports == []  # everything but the saver came from the cache
    assert again.shown("text") == [first.report]
