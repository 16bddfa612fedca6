"""Composition: Nox beside other nodes that patch H3, and H3's other tasks."""

import comfy_graphs as graphs
import numpy as np
import pytest
from comfy_graphs import (
    MEDIUM,
    Graph,
    attention,
    dense_control,
    latent_graph,
    probe,
    task_graph,
)

MIXED = attention("sparse", budget=20, layout="mixed.json")
SPARSE = attention("sparse", budget=1, layout="raster")  # skips a tile even on the small canvas


def run(host, *patches, **settings):
    result = host.run(latent_graph(*patches, **settings))
    assert result.status == "success", result.error
    return result


@pytest.fixture(scope="module")
def mixed(host):
    """The sparse render of a layout table without two equal neighbours, medium canvas."""
    return run(host, MIXED, canvas=MEDIUM, steps=2)


@pytest.fixture(scope="module")
def sage(host):
    """The render of mode sage, small canvas."""
    return run(host, attention())


def test_head_slices_give_the_bits_of_whole_calls(host, mixed):
    result = run(host, probe(attention="head slices"), MIXED, canvas=MEDIUM, steps=2)
    assert result.digest == mixed.digest
    assert result.report == mixed.report


def test_foreign_attention_inside_a_block_is_left_alone(host, mixed):
    # the probe raises where a foreign call is not what the host's own attention gives
    result = run(host, probe(foreign_calls=True), MIXED, canvas=MEDIUM, steps=2)
    assert result.digest == mixed.digest
    assert result.report == mixed.report


@pytest.mark.parametrize("how", ["head slices", "one row less", "two batches"])
def test_the_probe_itself_changes_what_it_should(host, how):
    changed = run(host, probe(attention=how)).digest != run(host).digest
    assert changed == (how == "one row less")


def test_block_patches_before_and_after_nox_are_called(host, sage):
    patches = (probe(label="before"), attention(), probe(label="after"))
    result = run(host, *patches)
    for label in ("before", "after"):
        assert result.calls_of(label) == 4
    assert result.digest == sage.digest


def test_a_node_that_drops_our_block_patches_is_refused_before_the_first_step(host):
    patches = (attention(), ("TinyH3ReplaceBlocks", {}), probe(label="never"))
    result = host.run(latent_graph(*patches))
    assert result.status == "error"
    assert result.error.startswith("Another node replaced block 0 of this model after Nox H3 ")
    assert "tiny_h3_host" in result.error  # whose code it is
    assert "Move that node before Nox H3 Attention" in result.error
    assert "\n" not in result.error
    assert result.calls_of("never") == 0
    assert result.reports == []


def test_a_node_that_drops_one_block_patch_is_refused_too(host):
    patches = (probe(label="under"), attention(), ("TinyH3ReplaceBlocks", {"first_block": 2}))
    result = host.run(latent_graph(*patches))
    assert result.error.startswith("Another node replaced block 2 of this model")


def test_the_same_node_before_nox_is_chained(host, sage):
    assert run(host, ("TinyH3ReplaceBlocks", {}), attention()).digest == sage.digest


def test_the_last_of_two_nox_attention_nodes_wins(host, sage):
    assert run(host, SPARSE, attention()).digest == sage.digest
    assert run(host, attention(), SPARSE).digest == run(host, SPARSE).digest != sage.digest
    assert run(host, SPARSE, attention("dense")).digest == run(host).digest


def test_a_patch_between_two_nox_attention_nodes_survives(host, sage):
    result = run(host, attention("sparse"), probe(label="between"), attention())
    assert result.calls_of("between") == 4
    assert result.digest == sage.digest


def test_cores_attention_backend_before_or_after_changes_nothing(host, sage):
    backend = ("ModelAttentionBackend", {"attention": "pytorch attention"})
    for patches in [(backend, attention()), (attention(), backend)]:
        result = run(host, *patches)
        assert result.digest == sage.digest
        assert "16 of 16 attention calls INT8" in result.report
    native = dense_control(first_steps=50, kernel="native")
    assert run(host, attention(), native, backend).digest == run(host).digest


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("one row less", "attention was called with 313 rows, the packed sequence has 314"),
        ("two batches", "attention was called with batch 2, Nox takes 1"),
    ],
)
def test_attention_that_does_not_fit_is_left_to_comfyui_and_said_once(host, how, reason):
    result = run(host, probe(attention=how), attention())
    assert f"Nox: ComfyUI's own attention runs instead: {reason}." in result.log
    assert sum("runs instead" in line for line in result.log) == 1
    wanted = f"12 of 16 attention calls INT8; 4 left to ComfyUI's own attention (4 {reason})"
    assert wanted in result.report


def test_one_patched_model_renders_two_canvases_in_one_graph(host):
    canvases = [graphs.SMALL, {"width": 128, "height": 256, "length": 22}]
    graph = Graph()
    model = graphs.add_model(graph, SPARSE)
    for canvas in canvases:
        latent = graph.add("EmptyMiniMaxH3LatentAV", **canvas)
        positive = graphs.add_conditioning(graph)
        latent = graphs.add_sampler(graph, model, positive, latent)
        graph.add("TinyH3SaveLatent", samples=latent)
    result = host.run(graph)
    assert result.status == "success", result.error
    alone = [run(host, SPARSE, canvas=canvas).digest for canvas in canvases]
    assert result.digests == alone


def test_a_masked_latent_runs_every_call(host):
    graph = latent_graph(attention())
    (sampler,) = [n for n in graph.values() if n["class_type"] == "SamplerCustomAdvanced"]
    mask = graph.add("SolidMask", value=0.5, width=128, height=128)
    latent = sampler["inputs"]["latent_image"]
    sampler["inputs"]["latent_image"] = graph.add("SetLatentNoiseMask", samples=latent, mask=mask)
    result = host.run(graph)
    assert result.status == "success", result.error
    assert "16 of 16 attention calls INT8" in result.report


@pytest.mark.parametrize("task", ["keyframes", "references"])
def test_keyframes_and_references_run_in_every_mode(host, task):
    dense = host.run(task_graph(task))
    assert dense.digest == host.run(task_graph(task, attention("dense"))).digest
    sage = host.run(task_graph(task, attention()))
    assert "16 of 16 attention calls INT8" in sage.report
    for stream, other in zip(sage.latent, dense.latent, strict=True):
        difference = np.linalg.norm(stream - other) / np.linalg.norm(other)
        assert 1e-4 < difference < 0.03
    sparse = host.run(task_graph(task, SPARSE, dense_control(blocks="")))
    assert "12 of 16 attention calls sparse" in sparse.report
    assert len({dense.digest, sage.digest, sparse.digest}) == 3
