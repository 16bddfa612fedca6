"""Newer core: what ComfyUI hands on after 0.33, and arguments that nobody knows yet."""

import pytest
from comfy_graphs import MEDIUM, attention, latent_graph

MIXED = attention("sparse", budget=20, layout="mixed.json")


def newer(**settings):
    return "TinyH3NewerCore", {"declined": False, "own_attention": False} | settings


def run(host, *patches):
    result = host.run(latent_graph(*patches, canvas=MEDIUM, steps=2))
    assert result.status == "success", result.error
    return result


@pytest.mark.parametrize("node", [attention(), MIXED], ids=["sage", "sparse"])
def test_a_newer_block_loop_gives_the_same_bits(host, node):
    wanted, result = run(host, node), run(host, node, newer())
    assert (result.digest, result.report) == (wanted.digest, wanted.report)


def test_what_nobody_knows_is_handed_on(host):
    result = run(host, attention(), newer())
    assert result.log.count("probe newer: to the model") == 2
    assert result.log.count("probe newer: block, attention False") == 8


def test_a_declined_call_hands_on_what_nobody_knows(host):
    result = run(host, attention(), newer(declined=True))
    assert "8 left to ComfyUI's own attention" in result.report
    assert "attention was called with a mask" in result.report
    assert result.digest == run(host).digest


def test_a_replaced_attention_is_left_alone_and_said(host):
    result = run(host, attention(), newer(own_attention=True))
    assert result.log.count("probe newer: block, attention True") == 8
    assert "the block did not call attention" in result.report
    assert result.digest == run(host).digest
