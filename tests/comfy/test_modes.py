"""The modes: which are equal to the bit, which differ, and by how much."""

import numpy as np
import pytest
from comfy_graphs import LARGE, MEDIUM, attention, latent_graph, probe

LAYOUTS = ("windows", "raster", "mixed.json")
PRECISIONS = ("accurate", "faithful")


def relative_difference(latent, other) -> list[float]:
    """Of each stream: norm of the difference over the norm."""
    return [
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(latent, other, strict=True)
    ]


@pytest.fixture(scope="module")
def unpatched(host):
    """The render without Nox."""
    return host.run(latent_graph(canvas=MEDIUM, steps=2))


@pytest.fixture(scope="module")
def sage(host):
    """The render of mode sage, by precision."""
    return {
        precision: host.run(latent_graph(attention(precision=precision), canvas=MEDIUM, steps=2))
        for precision in PRECISIONS
    }


def test_mode_dense_is_the_graph_without_nox(host, unpatched):
    result = host.run(latent_graph(attention("dense"), canvas=MEDIUM, steps=2))
    assert result.digest == unpatched.digest
    assert result.log == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sage_computes_every_call_and_stays_close_to_dense(sage, unpatched, precision):
    result = sage[precision]
    assert f"Nox sage, {precision}: 8 of 8 attention calls INT8;" in result.report
    difference = relative_difference(result.latent, unpatched.latent)
    # measured (video, audio): accurate 0.0127, 0.0110; faithful 0.0176, 0.0165
    assert all(0.001 < value < 0.03 for value in difference), difference


def test_the_two_precisions_are_different_arithmetic(sage):
    assert sage["accurate"].digest != sage["faithful"].digest


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_at_100_percent_equals_sage(host, sage, layout, precision):
    node = attention("sparse", budget=100, layout=layout, precision=precision)
    result = host.run(latent_graph(node, canvas=MEDIUM, steps=2))
    assert result.digest == sage[precision].digest
    assert "0 of 8 attention calls sparse; 8 dense (8 with every tile kept)" in result.report


def test_sparse_at_20_percent_skips_tiles_and_each_layout_skips_others(host):
    dense = host.run(latent_graph(canvas=LARGE, steps=2))
    digests = {
        "dense": dense.digest,
        "sage": host.run(latent_graph(attention(), canvas=LARGE, steps=2)).digest,
    }
    for layout in LAYOUTS:
        node = attention("sparse", budget=20, layout=layout)
        result = host.run(latent_graph(node, canvas=LARGE, steps=2))
        digests[layout] = result.digest
        # step 0 is dense, and so is block 0 in step 1
        assert (
            f"Nox sparse 20 %, {layout}, accurate: 3 of 8 attention calls sparse" in result.report
        )
        assert "5 dense (4 in the first steps, 1 in dense blocks)" in result.report
        kept = float(result.report.split(" % of tiles")[0].rsplit("(", 1)[1])
        assert 20 < kept < 70
        difference = relative_difference(result.latent, dense.latent)
        # measured in every layout: video 0.22, audio 0.074
        assert all(0.02 < value < 0.4 for value in difference), difference
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("mode", ["sage", "sparse"])
def test_two_runs_of_one_seed_are_equal_to_the_bit(host, mode):
    node = attention(mode, budget=20, layout="mixed.json")
    first, second = (host.run(latent_graph(node, canvas=MEDIUM, steps=2)) for _ in range(2))
    assert first.digest == second.digest
    assert first.report == second.report  # there is one of each: both really ran
    assert host.run(latent_graph(node, canvas=MEDIUM, steps=2, seed=2)).digest != first.digest


def test_a_nox_run_leaves_the_model_as_it_was(host, unpatched):
    assert host.run(latent_graph(attention(), canvas=MEDIUM, steps=2)).digest != unpatched.digest
    assert host.run(latent_graph(canvas=MEDIUM, steps=2)).digest == unpatched.digest


def test_an_interrupted_run_leaves_the_model_as_it_was(host, unpatched):
    patches = (attention("sparse", budget=20), probe(label="slow", wait_s=0.3))
    result = host.run(
        latent_graph(*patches, canvas=MEDIUM, steps=8), interrupt_after="probe slow: call 2"
    )
    assert result.status == "interrupted"
    assert "probe slow: call 8" not in result.log
    assert host.run(latent_graph(canvas=MEDIUM, steps=2)).digest == unpatched.digest


def test_a_run_that_raised_leaves_the_model_as_it_was(host, unpatched):
    patches = (probe(label="failing", fail_at=2), attention("sparse", budget=20))
    result = host.run(latent_graph(*patches, canvas=MEDIUM, steps=2))
    assert (result.status, result.error) == ("error", "probe failing fails on purpose")
    assert host.run(latent_graph(canvas=MEDIUM, steps=2)).digest == unpatched.digest


def test_an_int8_checkpoint_runs_every_call_in_sage(host):
    result = host.run(latent_graph(attention(), unet="tiny_h3_dit_int8_convrot.safetensors"))
    assert result.status == "success", result.error
    assert "16 of 16 attention calls INT8" in result.report
