"""What is said of mode veda: on the nodes, in the log, and in the tag of a saved file."""

import re

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


def texts_of(host, graph, status="success") -> dict[str, list[str]]:
    """Every progress text of one run, by the class of its node; each must fit on its node."""
    with PageListener(host.port) as page:
        result = host.run(graph)
        texts = page.texts_of_one_prompt()
    assert result.status == status, result.error
    by_class: dict[str, list[str]] = {}
    for node, text in texts:
        if not text.startswith("Step "):  # where a run stands, if it takes long enough
            by_class.setdefault(graph[node]["class_type"], []).append(text)
        lines = text.split("\n")
        assert 1 <= len(lines) <= 2, text
        assert all(0 < len(line) <= 30 for line in lines), text
        assert "~" not in text  # nothing was cut
    return by_class


def test_the_loader_says_what_the_predictor_keeps_and_knows_and_where_it_comes_from(host):
    for file, keeps, num_plans in (
        ("tiny.safetensors", "50 %", 4),
        ("only_large.safetensors", "10 %", 1),
        ("tiled_conditions.safetensors", "1.5 tiles", 4),
    ):
        host.unload(forget_nodes=True)
        (text,) = texts_of(host, latent_graph(veda(file), canvas=LARGE, steps=1))[
            "NoxLoadVedaPredictor"
        ]
        first, second = text.split("\n")
        assert keeps in first
        assert f" {num_plans} " in first
        assert second == "step 0"


@pytest.mark.parametrize(
    ("file", "plan", "budget"),
    [
        ("tiny.safetensors", "large", "50 %"),
        ("only_large.safetensors", "16x9_t102", "10 %"),
        ("tiled_conditions.safetensors", "large", "1.5 tiles"),
    ],
)
def test_nox_attention_says_that_the_plan_fits_before_and_what_ran_after(host, file, plan, budget):
    graph = latent_graph(veda(file), canvas=LARGE, steps=2)
    fits, ran = texts_of(host, graph)["NoxAttention"][-2:]
    assert fits.startswith(f"{plan} fits")
    assert budget in fits
    (share,) = re.findall(r"\d+\.\d %", ran)
    assert share in fits
    assert ran.replace(" %", "%").startswith(f"veda {share}, 1/2 steps dense.\n".replace(" %", "%"))


def test_what_released_predictors_call_their_plans_and_budgets_fits_on_the_nodes(host):
    host.unload(forget_nodes=True)
    graph = latent_graph(veda("long_words.safetensors"), canvas=LARGE, steps=1)
    texts = texts_of(host, graph)
    assert "32 tiles" in texts["NoxLoadVedaPredictor"][0]
    assert any("16x9_t102" in text and "32 tiles" in text for text in texts["NoxAttention"])


def test_nox_attention_says_that_keyframes_are_outside_the_predictors_training(host):
    graph = task_graph("keyframes", veda(), canvas=MEDIUM, steps=2)
    first, second = texts_of(host, graph)["NoxAttention"][-2].split("\n")
    assert first.startswith("medium fits")
    assert "train" in second


def test_nox_attention_says_that_a_canvas_is_unknown(host):
    graph = latent_graph(veda("only_large.safetensors"), canvas=MEDIUM, steps=2)
    text = texts_of(host, graph, "error")["NoxAttention"][-1]
    assert text.startswith("Veda does not know this size.")


@pytest.mark.parametrize(
    ("choice", "badge"),
    [("sparse", "sparse "), ("dense", "native: 8 of 8 calls.")],
)
def test_nox_attention_says_what_runs_in_place_of_veda(host, choice, badge):
    node = veda("only_large.safetensors", on_unknown_geometry=choice, budget=1)
    before, after = texts_of(host, latent_graph(node, canvas=MEDIUM, steps=2))["NoxAttention"][-2:]
    assert before.startswith("Veda does not know this size.")
    assert after.startswith(badge)


def test_the_log_says_what_was_read_and_which_plan_fits(host):
    host.unload(forget_nodes=True)
    result = host.run(latent_graph(veda(), canvas=MEDIUM, steps=2))
    (read,) = [line for line in result.log if line.startswith("Nox: Veda predictor ")]
    (fits,) = [line for line in result.log if "fits this clip" in line]
    assert result.log.index(read) < result.log.index(fits) < result.log.index(*result.timed_reports)
    assert read.startswith("Nox: Veda predictor tiny.safetensors keeps 50 % and knows 4 ")
    assert read.endswith(" (source random weights, step 0).")
    assert fits.startswith("Nox: Veda plan medium fits this clip; a budget of 50 %, all told ")
    (share,) = re.findall(r"\(([\d.]+ %) of tiles\)", result.report)
    assert f" {share} of tile pairs" in fits


@pytest.mark.parametrize("budget", [0, 20])
def test_log_text_line_and_tag_agree(host, budget):
    graph = video_graph(veda(veda_budget=budget), canvas=MEDIUM, steps=3)
    result = host.run(graph)
    assert result.status == "success", result.error
    assert result.shown("text") == result.timed_reports
    (tag,) = tags_of(result.video_file)["nox"]
    assert (tag["mode"], tag["precision"], tag["num_forwards"]) == ("veda", "accurate", 3)
    facts = {
        "predictor": "tiny.safetensors",
        "plan": "medium",
        "budget": f"{budget or 50} %",
        "provenance": "source random weights, step 0",
    }
    assert facts.items() <= tag["veda"].items()
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
    assert again.shown("text") == first.timed_reports
