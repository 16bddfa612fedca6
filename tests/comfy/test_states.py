"""States: nothing of a run is left in the next one, however it ended."""

import itertools

import comfy_graphs as graphs
import pytest
from comfy_graphs import MEDIUM, Graph, attention, dense_control, latent_graph, probe, veda

SPARSE = attention("sparse", budget=1, layout="raster")
WATCH = ("TinyH3StateWatch", {"block": 2})
MODES = {"sage": attention(), "sparse": SPARSE, "veda": veda()}
_runs = itertools.count(1)


def run(host, *patches, **settings):
    result = host.run(latent_graph(*patches, **settings))
    assert result.status == "success", result.error
    return result


def alive(host) -> list[str]:
    """Nox's objects of a run that something still refers to."""
    graph = Graph()
    graph.add("TinyH3Leftovers", run=next(_runs))
    return host.run(graph).shown("alive")


@pytest.mark.parametrize("mode", MODES)
def test_two_prompts_of_different_lengths_and_then_the_first_again(host, mode):
    first, other, again = (
        run(host, MODES[mode], canvas=MEDIUM, tokens=tokens) for tokens in (16, 93, 16)
    )
    assert again.digest == first.digest != other.digest
    assert again.report == first.report


@pytest.mark.parametrize("mode", MODES)
def test_the_run_after_an_exception_is_clean(host, mode):
    wanted = run(host, MODES[mode], canvas=MEDIUM)
    failing = probe(label="failing", block=3, fail_at=2)
    result = host.run(latent_graph(MODES[mode], failing, canvas=MEDIUM))
    assert result.error == "probe failing fails on purpose"
    assert alive(host) == ["none"]
    again = run(host, MODES[mode], canvas=MEDIUM)
    assert (again.digest, again.report) == (wanted.digest, wanted.report)


@pytest.mark.parametrize("mode", MODES)
def test_the_run_after_an_interrupt_is_clean(host, mode):
    wanted = run(host, MODES[mode], canvas=MEDIUM)
    slow = probe(label="slow", wait_s=0.4)
    result = host.run(
        latent_graph(MODES[mode], slow, canvas=MEDIUM, steps=8),
        interrupt_after="probe slow: call 3",
    )
    assert result.status == "interrupted"
    assert result.calls_of("slow") < 8
    assert alive(host) == ["none"]
    again = run(host, MODES[mode], canvas=MEDIUM)
    assert (again.digest, again.report) == (wanted.digest, wanted.report)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_run_outlives_it(host, mode):
    run(host, MODES[mode], canvas=MEDIUM)
    assert alive(host) == ["none"]
    host.unload(forget_nodes=True)
    assert alive(host) == ["none"]


@pytest.mark.parametrize("mode", [None, *MODES])
def test_blocks_and_comfyuis_code_stay_as_they_are(host, mode):
    result = run(host, *([MODES[mode]] if mode else []), WATCH, canvas=MEDIUM)
    seen = {line for line in result.log if line.startswith("probe watch: changed")}
    whens = ("in a step", "after a step", "after the run")
    assert seen == {f"probe watch: changed {when}: nothing" for when in whens}


def test_the_watch_sees_a_patched_module(host):
    chunked = ("NoxChunkMLP", {"rows": 256})
    hidden = run(host, ("TinyH3HookBlocks", {}), WATCH)
    assert any("_forward_pre_hooks" in line for line in hidden.log), hidden.log
    assert run(host, chunked, WATCH).digest == run(host).digest


def test_many_lengths_in_one_run_are_not_all_remembered(host):
    num_prompts = 20
    graph = Graph()
    model = graphs.add_model(graph, SPARSE, dense_control(first_steps=0), WATCH)
    parts = [graphs.add_conditioning(graph, tokens=16 + n) for n in range(num_prompts)]
    positive = parts[0]
    for part in parts[1:]:
        positive = graph.add("ConditioningCombine", conditioning_1=positive, conditioning_2=part)
    latent = graph.add("EmptyMiniMaxH3LatentAV", **graphs.SMALL)
    latent = graphs.add_sampler(graph, model, positive, latent, steps=2)
    graph.add("TinyH3SaveLatent", samples=latent)
    result = host.run(graph)
    assert result.status == "success", result.error
    ends = [line for line in result.log if line.endswith(" plans")]
    counts = [int(line.removeprefix("probe watch: ").removesuffix(" plans")) for line in ends]
    assert len(counts) == 2 * num_prompts
    assert max(counts) == 16
    assert f"{2 * 3 * num_prompts} of {2 * 4 * num_prompts} attention calls sparse" in result.report
