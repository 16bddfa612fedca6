"""Mode veda: what runs, what its bits equal, and that each canvas gets its own plan."""

import re

import comfy_graphs as graphs
import numpy as np
import pytest
from comfy_files import streams_of
from comfy_graphs import (
    LARGE,
    MEDIUM,
    SMALL,
    Graph,
    attention,
    dense_control,
    latent_graph,
    probe,
    veda,
)
from comfy_prompts import shipped_prompt

from nox_kernels.layout_table import preset_table
from nox_kernels.plan import make_plan
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import t2va_sequence
from nox_kernels.veda.bundle import read_bundle
from nox_kernels.veda.predictor import VedaPredictor

PRECISIONS = ("accurate", "faithful")


def run(host, *patches, **settings):
    """The result of a text to latent graph, by default of two steps on the medium canvas."""
    result = host.run(latent_graph(*patches, **{"canvas": MEDIUM, "steps": 2} | settings))
    assert result.status == "success", result.error
    return result


def kept_percent(result) -> float:
    """The share of tile pairs in a result's report."""
    return float(re.search(r"\(([\d.]+) % of tiles\)", result.report)[1])


@pytest.fixture(scope="module")
def unpatched(host):
    """The render without Nox."""
    return run(host)


@pytest.fixture(scope="module")
def own_budget(host):
    """The render of mode veda with the predictor's own budget."""
    return run(host, veda())


# ---- what runs -----------------------------------------------------------------------------------


# of 8 steps the first alone stays dense, where mode sparse keeps two; and block 0 of each
@pytest.mark.parametrize(
    ("name", "steps", "routed", "dense"),
    [
        ("MEDIUM", 8, "21 of 32", "11 dense (4 in the first steps, 7 in dense blocks)"),
        ("LARGE", 2, "3 of 8", "5 dense (4 in the first steps, 1 in dense blocks)"),
    ],
)
def test_the_report_names_predictor_budget_and_plan_and_counts_the_calls(
    host, name, steps, routed, dense
):
    result = run(host, veda(), canvas=graphs.CANVASES[name], steps=steps)
    assert result.report.startswith(
        f"Nox veda 50 %, tiny.safetensors, plan {name.lower()}, accurate: "
        f"{routed} attention calls veda ("
    )
    assert f" % of tiles); {dense}; computed by " in result.report


@pytest.mark.parametrize(("budget", "percent"), [(0, 50), (20, 20)])
@pytest.mark.parametrize("name", ["MEDIUM", "LARGE"])
def test_the_kept_share_is_that_of_the_predictors_rule_and_not_the_budget(
    host, name, budget, percent
):
    canvas = graphs.CANVASES[name]
    result = run(host, veda(veda_budget=budget), canvas=canvas)
    bundle = read_bundle(host.base / "models" / "veda_predictors" / "tiny.safetensors")
    plan = make_plan(
        AttentionRequest(mode="veda", veda_keep_ratio=budget / 100),
        DenseRequest(),
        t2va_sequence(canvas["width"], canvas["height"], canvas["length"], num_text=16),
        preset_table("uniform", 4, 4),
        Schedule.resolve((1.0, 0.0), DenseRequest(), lambda percent: 1.0 - percent),
        num_layers=4,
        num_heads=4,
        device="cpu",
        predictor=VedaPredictor.from_bundle(bundle),
    )
    # block 0 is dense, so it has no part in the mean
    shares = [layer.kept_share for layer in plan.routed_layers[1:]]
    assert kept_percent(result) == pytest.approx(100 * sum(shares) / len(shares), abs=0.051)
    assert kept_percent(result) > percent + 1


@pytest.mark.parametrize(
    ("control", "text"),
    [
        ({"first_steps": 0, "blocks": ""}, "12 of 12 attention calls veda"),
        ({"first_steps": 0}, "9 of 12 attention calls veda"),
        ({"first_steps": 2, "blocks": ""}, "4 of 12 attention calls veda"),
        ({"last_steps": 1, "blocks": ""}, "8 dense (4 in the first steps, 4 in the last steps)"),
        ({"blocks": "0-2"}, "10 dense (4 in the first steps, 6 in dense blocks)"),
        ({"kernel": "native"}, "6 native (4 in the first steps, 2 in dense blocks)"),
    ],
)
def test_dense_steps_and_blocks_apply_before_and_after_nox_attention(host, control, text):
    node = dense_control(**control)
    after = run(host, veda(), node, canvas=SMALL, steps=3)
    before = run(host, node, veda(), canvas=SMALL, steps=3)
    assert text in after.report
    assert (before.digest, before.report) == (after.digest, after.report)


def test_two_conditions_of_two_lengths_keep_the_same_steps_dense(host):
    result = run(host, veda(), negative="blurred", steps=3)
    assert "12 of 24 attention calls veda" in result.report
    assert "12 dense (8 in the first steps, 4 in dense blocks)" in result.report
    plain = run(host, attention(), negative="blurred", steps=3)
    assert result.digest != plain.digest


def test_an_int8_checkpoint_is_routed_too(host):
    result = run(host, veda(), unet="tiny_h3_dit_int8_convrot.safetensors")
    assert "3 of 8 attention calls veda" in result.report


def test_the_shipped_image_workflow_renders_a_file_that_plays(host):
    prompt = shipped_prompt(host, "i2v")
    predictor = prompt.add("NoxLoadVedaPredictor", predictor_name="tiny.safetensors")
    (node,) = [node for node in prompt.values() if node["class_type"] == "NoxAttention"]
    node["inputs"] |= {"mode": "veda", "predictor": predictor}
    result = host.run(prompt)
    assert result.status == "success", result.error
    counts = streams_of(result.video_file)
    assert counts["video"] == 22
    assert counts["audio"] >= 0.95 * 32000 * 22 / 24
    assert "plan shipped" in result.report
    assert "21 of 32 attention calls veda" in result.report


# ---- equal bits, other bits ----------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_whole_budget_equals_sage(host, precision):
    result = run(host, veda(veda_budget=100, precision=precision))
    assert result.digest == run(host, attention(precision=precision)).digest
    assert "0 of 8 attention calls veda; 8 dense (8 with every tile kept)" in result.report


def test_budget_0_is_the_predictors_own(host, own_budget):
    named = run(host, veda(veda_budget=50))
    assert named.digest == own_budget.digest
    assert named.report == own_budget.report


def test_another_budget_gives_other_bits_and_keeps_another_share(host, own_budget):
    result = run(host, veda(veda_budget=75))
    assert "Nox veda 75 %, tiny.safetensors" in result.report
    assert kept_percent(result) > kept_percent(own_budget)
    assert result.digest != own_budget.digest


def test_the_weights_of_the_predictor_choose_the_tiles(host, own_budget):
    result = run(host, veda("other_weights.safetensors"))
    assert kept_percent(result) == kept_percent(own_budget)
    assert result.digest != own_budget.digest


def test_veda_is_none_of_the_other_modes(host, own_budget, unpatched):
    sage, sparse = run(host, attention()), run(host, attention("sparse", budget=50))
    assert len({r.digest for r in (own_budget, unpatched, sage, sparse)}) == 4
    for stream, other in zip(own_budget.latent, unpatched.latent, strict=True):
        difference = np.linalg.norm(stream - other) / np.linalg.norm(other)
        assert 0.02 < difference < 0.6, difference


@pytest.mark.parametrize("predictor", ["tiny.safetensors", "whole_conditions.safetensors"])
def test_two_runs_of_one_seed_are_equal_to_the_bit(host, predictor):
    first, second = run(host, veda(predictor)), run(host, veda(predictor))
    assert first.digest == second.digest
    assert first.report == second.report  # there is one of each: both really ran
    assert run(host, veda(predictor), seed=2).digest != first.digest


def test_a_veda_run_leaves_the_model_as_it_was(host, own_budget, unpatched):
    assert run(host, veda()).digest == own_budget.digest
    assert run(host).digest == unpatched.digest


@pytest.mark.parametrize("block", [1, 3])  # heads of two tile shapes; in block 3 a slice parts one
def test_head_slices_give_the_bits_of_whole_calls(host, own_budget, block):
    result = run(host, probe(attention="head slices", block=block), veda())
    assert result.digest == own_budget.digest
    assert result.report == own_budget.report


def test_foreign_attention_inside_a_block_is_left_alone(host, own_budget):
    # the probe raises where a foreign call is not what the host's own attention gives
    result = run(host, probe(foreign_calls=True), veda())
    assert result.digest == own_budget.digest
    assert result.report == own_budget.report


def test_the_last_of_two_nox_attention_nodes_wins(host, own_budget, unpatched):
    assert run(host, attention("sparse"), veda()).digest == own_budget.digest
    assert run(host, veda("only_large.safetensors"), veda()).digest == own_budget.digest
    assert run(host, veda(), attention()).digest == run(host, attention()).digest
    assert run(host, veda(), attention("dense")).digest == unpatched.digest


# ---- canvases ------------------------------------------------------------------------------------


def test_one_patched_model_follows_the_plan_of_each_canvas(host):
    graph = Graph()
    model = graphs.add_model(graph, veda())
    for canvas in (MEDIUM, LARGE):
        latent = graph.add("EmptyMiniMaxH3LatentAV", **canvas)
        positive = graphs.add_conditioning(graph)
        latent = graphs.add_sampler(graph, model, positive, latent, steps=2)
        graph.add("TinyH3SaveLatent", samples=latent)
    result = host.run(graph)
    assert result.status == "success", result.error
    alone = [run(host, veda(), canvas=canvas) for canvas in (MEDIUM, LARGE)]
    assert sorted(result.reports) == sorted(single.report for single in alone)
    assert [re.search("plan (.*?),", line)[1] for line in sorted(result.reports)] == [
        "large",
        "medium",
    ]
    assert result.digests == [single.digest for single in alone]


@pytest.mark.parametrize(
    ("predictor", "canvas", "nearest", "known"),
    [
        (
            "only_large.safetensors",
            MEDIUM,
            "Veda has no plan for 256x256, 22 frames. Nearest: 320x256, 39 frames.",
            "320x256 with 39",
        ),
        (
            "tiny.safetensors",
            MEDIUM | {"length": 39},
            "Veda has no plan for 256x256, 39 frames. Nearest: 256x256, 22 frames.",
            "256x128 with 22; 160x128 with 22; 320x256 with 39; 256x256 with 22",
        ),
    ],
)
def test_a_canvas_without_a_plan_is_refused_before_the_model_is_loaded(
    host, predictor, canvas, nearest, known
):
    host.unload(forget_nodes=False)
    graph = latent_graph(veda(predictor), probe(label="never"), canvas=canvas)
    result = host.run(graph)
    assert result.status == "error"
    assert result.error == (
        f"{nearest} Or use mode sparse. {predictor} knows (width x height with frames): {known}."
    )
    assert result.loads == []
    assert result.calls_of("never") == 0
    assert result.reports == []
    # what would have been loaded
    assert "MiniMaxH3" in run(host, canvas=canvas).loads


# eight steps: the two modes differ in how many of the first stay dense
@pytest.mark.parametrize("steps", [2, 8])
def test_a_canvas_without_a_plan_may_run_as_mode_sparse(host, steps):
    node = veda("only_large.safetensors", on_unknown_geometry="sparse", budget=20)
    result = run(host, node, canvas=SMALL, steps=steps)
    sparse = run(host, attention("sparse", budget=20), canvas=SMALL, steps=steps)
    assert result.digest == sparse.digest
    prefix = "Nox sparse 20 %, windows, accurate: "
    assert sparse.report.startswith(prefix)
    assert result.report == (
        "Nox veda without a plan, so sparse 20 %, windows, accurate: "
        + sparse.report.removeprefix(prefix)
    )
    warned = [line for line in result.log if "Veda has no plan for 256x128, 22 frames;" in line]
    assert len(warned) == 1
    assert warned[0].endswith("mode sparse runs instead, as on_unknown_geometry says.")


def test_a_canvas_without_a_plan_may_run_as_mode_dense(host, unpatched):
    result = run(host, veda("only_large.safetensors", on_unknown_geometry="dense"))
    assert result.digest == unpatched.digest
    assert result.report.startswith(
        "Nox veda without a plan, so dense, accurate: 8 of 8 attention calls native"
    )
    warned = [line for line in result.log if "Veda has no plan for 256x256, 22 frames;" in line]
    assert len(warned) == 1
    assert warned[0].endswith("mode dense runs instead, as on_unknown_geometry says.")


@pytest.mark.parametrize("choice", ["sparse", "dense"])
def test_the_choice_for_unknown_canvases_changes_nothing_where_there_is_a_plan(
    host, own_budget, choice
):
    result = run(host, veda(on_unknown_geometry=choice))
    assert result.digest == own_budget.digest
    assert result.report == own_budget.report
