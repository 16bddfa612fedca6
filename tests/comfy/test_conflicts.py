"""Conflicts: packs that Nox cannot stand beside are refused by name, before the first step."""

import pytest
from comfy_graphs import attention, latent_graph, probe

OWNERS = {
    "attention of its own": "Another node (its code: tiny_h3_host.peers)",
    "H3-Optimizations": "H3 Memory Optimization",
    "KJNodes sage": "MiniMax H3 Mem Eff Sage Attention Patch (KJNodes)",
}
SPARSIFIERS = {
    "core": "Model Sparse Attention",
    "newer core": "Model Sparse Attention",
    "sol": "Patch Sol-Attn",
}


def orders(other):
    """The other node before Nox, and behind it."""
    return [(other, attention("sparse")), (attention("sparse"), other)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", OWNERS)
def test_who_owns_attention_forward_is_refused(host, kind, is_first):
    patches = orders(("TinyH3OwnForward", {"kind": kind}))[0 if is_first else 1]
    result = host.run(latent_graph(*patches, probe(label="never")))
    assert result.status == "error"
    assert result.error == (
        f"{OWNERS[kind]} owns attention.forward on this model; Nox would never run. Remove it."
    )
    assert result.calls_of("never") == 0


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", SPARSIFIERS)
def test_a_second_sparsifier_is_refused(host, kind, is_first):
    patches = orders(("TinyH3OtherSparse", {"kind": kind}))[0 if is_first else 1]
    result = host.run(latent_graph(*patches, probe(label="never")))
    assert result.status == "error"
    assert result.error == (
        f"{SPARSIFIERS[kind]} is on this model too, and only one node can decide which tiles are "
        f"skipped. Remove it, or bypass Nox H3 Attention."
    )
    assert result.calls_of("never") == 0


@pytest.mark.parametrize(
    "other",
    [
        *[("TinyH3OwnForward", {"kind": kind}) for kind in OWNERS],
        *[("TinyH3OtherSparse", {"kind": kind}) for kind in SPARSIFIERS],
    ],
)
def test_without_nox_they_are_none_of_our_business(host, other):
    plain = host.run(latent_graph())
    for patches in [(other, attention("dense")), (attention("dense"), other)]:
        assert host.run(latent_graph(*patches)).digest == plain.digest


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", ["memory only", "says so"])
def test_a_forward_that_still_calls_comfyuis_attention_is_chained(host, kind, is_first):
    patches = orders(("TinyH3OwnForward", {"kind": kind}))[0 if is_first else 1]
    result = host.run(latent_graph(*patches))
    assert result.status == "success", result.error
    assert "declined" not in result.report
    assert "left to ComfyUI" not in result.report
