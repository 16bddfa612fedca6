"""Step gates: which evaluations of the model are dense, for every way to walk down the sigmas."""

import comfy_graphs as graphs
import pytest
from comfy_files import tags_of
from comfy_graphs import Graph, attention, dense_control, probe

# Blocks 1 to 3 are sparse where the step is; block 0 is dense everywhere, by default.
SPARSE = attention("sparse", budget=1, layout="raster")
STEPS = 4
# sampler -> the step of each evaluation in four steps, told by their sigmas
EVERY = [0, 1, 2, 3]
TWICE_FROM_1 = [0, 1, 1, 2, 2, 3, 3]
TWICE_UP_TO_3 = [0, 0, 1, 1, 2, 2, 3]
SAMPLERS = {
    "euler": EVERY,
    "res_multistep": EVERY,
    "er_sde": EVERY,
    "dpmpp_2m": EVERY,
    "lcm": EVERY,
    "heun": TWICE_FROM_1,
    "dpmpp_2s_ancestral": TWICE_UP_TO_3,
    "dpm_2": TWICE_UP_TO_3,
}
# the same of two runs of two steps: only the second ends at sigma 0, without a second evaluation
HALVES = {
    "heun": ([0, 1, 1, 1], [0, 1, 1]),
    "dpmpp_2s_ancestral": ([0, 0, 1, 1], [0, 0, 1]),
    "dpm_2": ([0, 0, 1, 1], [0, 0, 1]),
}


def graph_of(sampler, how) -> Graph:
    """Four steps on the small canvas; "split" at the second, "half" of eight, "cfg" of two prompts."""
    graph = Graph()
    model = graphs.add_model(graph, SPARSE, probe(label="all", block=2))
    positive = graphs.add_conditioning(graph)
    negative = graphs.add_conditioning(graph, "blurred", 23) if how == "cfg" else None
    latent = graph.add("EmptyMiniMaxH3LatentAV", **graphs.SMALL)
    settings = {"negative": negative, "steps": STEPS, "sampler": sampler}
    settings["denoise"] = 0.5 if how == "half" else 1.0
    latent = graphs.add_sampler(graph, model, positive, latent, **settings)
    if how == "split":
        first = graph[latent[0]]["inputs"]
        high = graph.add("SplitSigmas", sigmas=first["sigmas"], step=2)
        first["sigmas"] = high
        low = {
            "noise": graph.add("DisableNoise"),
            "sigmas": graphs.second(high),
            "latent_image": latent,
        }
        latent = graph.add("SamplerCustomAdvanced", **first | low)
    graph.add("TinyH3SaveLatent", samples=latent)
    return graph


def evaluations(result) -> list[tuple[int, bool]]:
    """(Step, whether it was dense) of each evaluation, told by what block 2 ran."""
    start = "probe all: step "
    found = [line.removeprefix(start).split() for line in result.log if line.startswith(start)]
    return [(int(step), kind == "sage") for step, _, kind in found]


def wanted(sampler, how) -> list[tuple[int, bool]]:
    """By the rule: dense above the sigma of 20 % of the schedule, which is the first of four steps.

    A second stage begins below it, and so does a run of half the noise.
    """
    steps = SAMPLERS[sampler]
    if how == "half":
        return [(step, False) for step in steps]
    if how == "split":
        first, second = HALVES.get(sampler, ([0, 1], [0, 1]))
        return [(step, step == 0) for step in first] + [(step, False) for step in second]
    return [(step, step == 0) for step in steps for _ in range(2 if how == "cfg" else 1)]


@pytest.mark.parametrize("how", ["plain", "split", "half", "cfg"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_evaluations_of_the_first_step_are_dense_and_no_others(host, sampler, how):
    result = host.run(graph_of(sampler, how))
    assert result.status == "success", result.error
    assert evaluations(result) == wanted(sampler, how)


@pytest.mark.parametrize("start_percent", [0.0, 0.4])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_cache_that_skips_steps_moves_no_gate(host, is_first, start_percent):
    cache = {"reuse_threshold": 3.0, "start_percent": start_percent, "end_percent": 1.0}
    cache = ("EasyCache", cache | {"verbose": False})
    patches = (cache, SPARSE) if is_first else (SPARSE, cache)
    patches += (dense_control(first_steps=3, last_steps=1), probe(label="all", block=2))
    result = host.run(graphs.video_graph(*patches, steps=8))
    assert result.status == "success", result.error
    ran = evaluations(result)
    steps = [step for step, _ in ran]
    assert 2 <= len(steps) < 8  # it did skip some
    assert ran == [(step, step < 3 or step == 7) for step in steps]
    (tag,) = tags_of(result.video_file)["nox"]
    assert tag["num_forwards"] == len(ran)  # what the cache answered is no evaluation
