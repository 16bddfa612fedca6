"""Memory: what Nox lets go of, and Nox Chunk MLP."""

import math

import comfy_graphs as graphs
import pytest
from comfy_graphs import Graph, attention, latent_graph, probe

CHUNK = ("NoxChunkMLP", {"rows": 256})


def mlp_probe(label):
    return "TinyH3MLPProbe", {"label": label, "block": 1}


def rows_of(result, label) -> list[int]:
    """Rows of each call of a probed MLP."""
    start, end = f"probe {label}: mlp of ", " rows"
    lines = [line for line in result.log if line.startswith(start)]
    return [int(line.removeprefix(start).removesuffix(end)) for line in lines]


@pytest.mark.parametrize("mode", ["sage", "sparse"])
@pytest.mark.parametrize("layout", ["windows", "mixed.json"])  # one head group, several
def test_q_k_and_v_are_let_go_before_attention(host, mode, layout):
    watched = probe(label="watch", attention="watched")
    result = host.run(latent_graph(watched, attention(mode, layout=layout), canvas=graphs.MEDIUM))
    assert result.status == "success", result.error
    lines = {line for line in result.log if line.startswith("probe watch: held")}
    assert lines == {"probe watch: held in attention: nothing"}


@pytest.mark.parametrize("max_rows", [256, 512, 4096])
@pytest.mark.parametrize("canvas", [graphs.SMALL, graphs.MEDIUM, graphs.LARGE])
def test_chunks_are_even_and_change_no_bit(host, canvas, max_rows):
    chunk = ("NoxChunkMLP", {"rows": max_rows})
    plain = host.run(latent_graph(mlp_probe("plain"), canvas=canvas))
    chunked = host.run(latent_graph(mlp_probe("inner"), chunk, mlp_probe("outer"), canvas=canvas))
    assert chunked.status == "success", chunked.error
    assert chunked.digest == plain.digest
    whole, inner = rows_of(plain, "plain"), rows_of(chunked, "inner")
    assert rows_of(chunked, "outer") == whole
    assert len(inner) == sum(math.ceil(rows / max_rows) for rows in whole)
    assert sum(inner) == sum(whole)
    assert max(inner) <= max_rows
    assert max(inner) - min(inner) <= 1


@pytest.mark.parametrize("mode", ["sage", "sparse", "veda"])
@pytest.mark.parametrize("is_first", [True, False])
def test_chunks_go_with_every_mode_in_any_order(host, mode, is_first):
    node = graphs.veda() if mode == "veda" else attention(mode)
    nodes = (CHUNK, node) if is_first else (node, CHUNK)
    whole = host.run(latent_graph(node, canvas=graphs.MEDIUM))
    chunked = host.run(latent_graph(*nodes, canvas=graphs.MEDIUM))
    assert chunked.status == "success", chunked.error
    assert (chunked.digest, chunked.report) == (whole.digest, whole.report)


@pytest.mark.parametrize("quant", ["fp8", "int8_convrot"])
def test_chunks_change_no_bit_of_a_quantised_model(host, quant):
    unet = f"tiny_h3_dit_{quant}.safetensors"
    lora = ("LoraLoaderModelOnly", {"lora_name": graphs.LORA, "strength_model": 0.5})
    for nodes in ((), (lora,)):
        whole = host.run(latent_graph(*nodes, canvas=graphs.MEDIUM, unet=unet))
        probed = (*nodes, mlp_probe("inner"), CHUNK)
        chunked = host.run(latent_graph(*probed, canvas=graphs.MEDIUM, unet=unet))
        assert chunked.digest == whole.digest
        assert max(rows_of(chunked, "inner")) <= 256


def test_a_model_whose_scales_span_all_rows_is_left_whole(host):
    unet = "tiny_h3_dit_nvfp4.safetensors"
    whole = host.run(latent_graph(canvas=graphs.MEDIUM, unet=unet))
    probed = (mlp_probe("inner"), CHUNK)
    chunked = host.run(latent_graph(*probed, canvas=graphs.MEDIUM, unet=unet))
    assert chunked.digest == whole.digest
    assert min(rows_of(chunked, "inner")) > 256
    (line,) = [line for line in chunked.log if "Chunk MLP" in line]
    assert line.startswith("Nox Chunk MLP leaves 4 blocks whole: this nvfp4 file has no input ")


def test_the_model_that_comes_in_stays_as_it_is(host):
    """Both samplers use one loaded model: the second one must not see the first one's chunks."""
    graph = Graph()
    model = graphs.add_model(graph, mlp_probe("shared"))
    chunked = graph.add("NoxChunkMLP", model=model, rows=256)
    latent = graph.add("EmptyMiniMaxH3LatentAV", **graphs.MEDIUM)
    for number, patched in enumerate((chunked, model)):
        conditioning = graphs.add_conditioning(graph, tokens=16 + number)
        sampled = graphs.add_sampler(graph, patched, conditioning, latent)
        graph.add("TinyH3SaveLatent", samples=sampled)
    result = host.run(graph)
    assert result.status == "success", result.error
    rows = rows_of(result, "shared")
    num_whole = sum(num > 256 for num in rows)
    assert sum(num <= 256 for num in rows) == 3 * num_whole > 0
