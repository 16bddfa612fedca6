"""The matrix: every mode beside every other kind of node, in every order; who computes, to the bit."""

import itertools

import comfy_graphs as graphs
import pytest
from comfy_graphs import attention, latent_graph, probe, veda

MODES = {
    "sage": attention(),
    "sparse": attention("sparse", budget=20, layout="mixed.json"),
    "veda": veda(),
    "dense": attention("dense"),
}
BACKEND = ("ModelAttentionBackend", {"attention": "pytorch attention"})
LORA = ("LoraLoaderModelOnly", {"lora_name": graphs.LORA, "strength_model": 0.5})
CACHE = {"reuse_threshold": 0.0, "start_percent": 0.4, "end_percent": 1.0, "verbose": False}
# Each changes the clip without Nox as much as with it, or not at all; Nox computes in any case.
OTHERS = {
    "backend": BACKEND,
    "LoRA": LORA,
    "shift": graphs.sigma_shift(),
    "cache": ("EasyCache", CACHE),
    "lazy cache": ("LazyCache", CACHE),
    "chunks": ("NoxChunkMLP", {"rows": 256}),
    # as a control tower: it attends in between with the options of the block, and must stay dense
    "control": probe(label="control", foreign_calls=True),
}
# What the clip is without anything else on the model, by what the others change of it.
CHANGES = ("LoRA", "shift")
PEERS = {
    "KJNodes chunks": ("MiniMaxChunkFeedForward", {"chunks": 3, "seq_threshold": 256}),
    "KJNodes low VRAM": ("MiniMaxLowVRAMAttention", {"head_chunks": 3}),
    "H3-Optimizations": (
        "H3MemoryOptimization",
        {"fused_qkv": "off", "mlp_memory": "off", "chunk_rows": 4096},
    ),
}


def run(host, *patches):
    result = host.run(latent_graph(*patches, canvas=graphs.MEDIUM, steps=2))
    assert result.status == "success", result.error
    return result


@pytest.fixture(scope="module")
def wanted(host):
    """The same mode with the one node that changes the clip, in one order."""
    known = {}

    def render(mode, name):
        key = (mode, name if name in CHANGES else None)
        if key not in known:
            others = [OTHERS[name]] if name in CHANGES else []
            known[key] = run(host, *others, *([] if mode == "dense" else [MODES[mode]]))
        return known[key]

    return render


def check(result, reference, mode):
    """The same bits, and the log names the winner."""
    assert result.digest == reference.digest
    assert result.reports == reference.reports
    if mode == "dense":
        assert result.reports == []
    else:
        assert f"Nox {mode}" in result.report
        assert "left to ComfyUI" not in result.report


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("mode", MODES)
def test_one_other_node(host, wanted, mode, name, is_first):
    pair = (OTHERS[name], MODES[mode])
    check(run(host, *(pair if is_first else pair[::-1])), wanted(mode, name), mode)


@pytest.mark.parametrize("mode", MODES)
def test_all_of_them_at_once_around_nox(host, mode):
    names = ("backend", "LoRA", "cache", "chunks", "control")
    others = [OTHERS[name] for name in names]
    alone = run(host, LORA, *([] if mode == "dense" else [MODES[mode]]))
    for place in range(len(others) + 1):
        check(run(host, *others[:place], MODES[mode], *others[place:]), alone, mode)


@pytest.mark.parametrize("mode", MODES)
def test_live_preview(host, preview_host, mode):
    shown = run(preview_host, MODES[mode])
    assert "TAEHV" in shown.loads
    check(shown, run(host, MODES[mode]), mode)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_pack_that_saves_memory(peer_host, mode, name, is_first):
    if PEERS[name][0] not in peer_host.get_json("/object_info"):
        pytest.skip(f"{name} is not installed")
    reference = run(peer_host, MODES[mode])
    pair = (PEERS[name], MODES[mode])
    check(run(peer_host, *(pair if is_first else pair[::-1])), reference, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_that_forecasts_steps(peer_host, mode):
    info = peer_host.get_json("/object_info").get("SpectrumApplyMiniMaxH3")
    if info is None:
        pytest.skip("Spectrum is not installed")
    inputs = info["input"]["required"]
    settings = {name: value[1]["default"] for name, value in inputs.items() if name != "model"}
    spectrum = ("SpectrumApplyMiniMaxH3", settings)

    def render(*patches):
        counter = probe(label="count", block=2)
        graph = latent_graph(*patches, counter, canvas=graphs.MEDIUM, steps=8)
        result = peer_host.run(graph)
        assert result.status == "success", result.error
        return result

    alone, before, after = (
        render(spectrum),
        render(spectrum, MODES[mode]),
        render(MODES[mode], spectrum),
    )
    assert before.digest == after.digest
    check(before, after, mode)
    # it forecasts as many steps as without Nox, and Nox counts only what ran
    num_ran = alone.calls_of("count")
    assert 0 < num_ran < 8
    assert before.calls_of("count") == after.calls_of("count") == num_ran
    if mode != "dense":
        assert f"of {4 * num_ran} attention calls" in before.report


def test_both_packs_that_cut_the_mlp_into_chunks(peer_host):
    if "MiniMaxChunkFeedForward" not in peer_host.get_json("/object_info"):
        pytest.skip("KJNodes is not installed")
    reference = run(peer_host, MODES["sage"])
    for nodes in itertools.permutations([OTHERS["chunks"], PEERS["KJNodes chunks"]]):
        check(run(peer_host, *nodes, MODES["sage"]), reference, "sage")
