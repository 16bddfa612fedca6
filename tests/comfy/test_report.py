"""The report: log, text under the saved video, and tag of the file say what really ran."""

import comfy_graphs as graphs
import pytest
from comfy_files import tags_of
from comfy_graphs import Graph, attention, dense_control, latent_graph, video_graph

SPARSE = attention("sparse", budget=1, layout="raster")


def saved(host, graph: Graph):
    """The result of a graph with one saver, and the lines under its video."""
    result = host.run(graph)
    assert result.status == "success", result.error
    texts = [output["text"] for output in result.outputs.values() if "text" in output]
    return result, texts[0][0].split("\n") if texts else []


@pytest.mark.parametrize("mode", ["sage", "sparse"])
def test_log_text_line_and_tag_agree(host, mode):
    result = host.run(video_graph(attention(mode, budget=20), canvas=graphs.MEDIUM))
    assert result.status == "success", result.error
    (text,) = result.shown("text")
    assert [text.split("\n")[0]] == result.timed_reports
    (tag,) = tags_of(result.video_file)["nox"]
    calls = dict.fromkeys(("sparse", "sage", "native", "declined"), 0)
    for call in tag["calls"]:
        calls[call["kind"]] += call["count"]
    assert sum(calls.values()) == 16
    assert tag["num_forwards"] == 4
    assert (tag["mode"], tag["precision"], tag["layout"]) == (mode, "accurate", "windows")
    assert f"computed by {tag['kernel']}" in text
    if mode == "sage":
        assert f"Nox sage, accurate: {calls['sage']} of 16 attention calls INT8" in text
        assert tag["kept_share"] is None
    else:
        kept = f"{100 * tag['kept_share']:.1f} % of tiles"
        assert f"{calls['sparse']} of 16 attention calls sparse ({kept})" in text
        assert f"{calls['sage']} dense (" in text
        assert tag["keep_ratio"] == 0.2
        assert calls["sparse"] == 9


def test_a_run_without_nox_is_not_said_to_be_one(host):
    nox = attention()
    assert host.run(video_graph(nox)).shown("text")
    for patches in [(), (nox, attention("dense"))]:
        result = host.run(video_graph(*patches))
        assert result.status == "success", result.error
        assert "text" not in {name for output in result.outputs.values() for name in output}
        assert "nox" not in tags_of(result.video_file)


def test_a_node_that_was_switched_to_dense_reports_nothing_old(host):
    assert saved(host, video_graph(attention()))[1]
    result, lines = saved(host, video_graph(attention("dense")))
    assert lines == []
    assert "nox" not in tags_of(result.video_file)


def test_another_graph_with_the_same_node_ids_changes_no_report(host):
    # ComfyUI keeps nodes of earlier graphs: the third run does not execute Nox H3 Attention again
    first, lines = saved(host, video_graph(SPARSE))
    assert lines == first.timed_reports
    second, lines = saved(host, video_graph(attention()))
    assert lines == second.timed_reports
    third, lines = saved(host, video_graph(SPARSE))
    assert lines == third.timed_reports
    assert third.report == first.report


def test_a_graph_that_comes_back_from_the_cache_shows_its_own_report(host):
    first_graph = video_graph(SPARSE)
    first, lines = saved(host, first_graph)
    assert saved(host, video_graph(attention()))[1] != lines
    (saver,) = [node for node in first_graph.values() if node["class_type"] == "NoxSaveVideo"]
    saver["inputs"]["crf"] = 31
    again, lines_again = saved(host, first_graph)
    assert again.reports == []  # everything but the saver came from the cache
    assert lines_again == lines == first.timed_reports


def test_a_node_that_another_replaced_reports_nothing_old(host):
    assert saved(host, video_graph(attention()))[1]
    result, lines = saved(host, video_graph(attention(), SPARSE))
    assert lines == result.timed_reports
    assert result.report.startswith("Nox sparse")


def test_two_samplers_of_one_model_report_their_own_runs(host):
    graph = Graph()
    model = graphs.add_model(graph, attention())
    vae = graph.add("VAELoader", vae_name=graphs.VIDEO_VAE)
    savers = {}
    for steps in (2, 3):
        latent = graph.add("EmptyMiniMaxH3LatentAV", **graphs.SMALL)
        positive = graphs.add_conditioning(graph)
        latent = graphs.add_sampler(graph, model, positive, latent, steps=steps)
        images = graph.add("VAEDecode", samples=latent, vae=vae)
        savers[graphs.add_saver(graph, images=images)[0]] = steps
    result = host.run(graph)
    assert result.status == "success", result.error
    for saver, steps in savers.items():
        (text,) = result.outputs[saver]["text"]
        assert text.startswith(f"Nox sage, accurate: {4 * steps} of {4 * steps} attention calls")


def test_a_saver_that_runs_again_alone_keeps_the_report(host):
    graph = video_graph(SPARSE)
    first, lines = saved(host, graph)
    (saver,) = [node for node in graph.values() if node["class_type"] == "NoxSaveVideo"]
    saver["inputs"]["crf"] = 30
    again, lines_again = saved(host, graph)
    assert again.reports == []  # nothing was sampled
    assert again.video_file != first.video_file
    assert lines_again == lines


def test_a_run_without_a_step_reports_nothing(host):
    result = host.run(latent_graph(attention(), dense_control(), denoise=0.0))
    assert result.status == "success", result.error
    assert result.reports == []


NO_RUN = (
    "Nox H3 Attention is upstream of this node, but no sampling run with it is known: either the "
    "sampler took no step, or its MODEL is not wired to the guider or sampler."
)


def test_a_sampler_that_was_rewired_past_nox_is_not_said_to_have_used_it(host):
    graph = video_graph(SPARSE)
    first, lines = saved(host, graph)
    assert lines == first.timed_reports
    (guider,) = [node for node in graph.values() if node["class_type"] == "BasicGuider"]
    (loader,) = [key for key, node in graph.items() if node["class_type"] == "UNETLoader"]
    guider["inputs"]["model"] = [loader, 0]  # the scheduler still stands behind Nox
    again, lines = saved(host, graph)
    assert again.reports == []
    assert lines == [NO_RUN]
    assert "nox" not in tags_of(again.video_file)


def test_a_run_of_no_step_does_not_show_the_report_of_the_one_before(host):
    graph = video_graph(SPARSE)
    assert saved(host, graph)[1] != [NO_RUN]
    (scheduler,) = [node for node in graph.values() if node["class_type"] == "BasicScheduler"]
    scheduler["inputs"]["denoise"] = 0.0
    assert saved(host, graph)[1] == [NO_RUN]


def test_a_cached_nox_node_is_announced_in_every_prompt(host):
    graph = video_graph(SPARSE)
    for seed in (11, 12):
        (noise,) = [node for node in graph.values() if node["class_type"] == "RandomNoise"]
        noise["inputs"]["noise_seed"] = seed
        result, _ = saved(host, graph)
        announced = [line for line in result.log if "computes on the PyTorch reference" in line]
        assert len(announced) == 1


def test_the_report_outlives_a_model_that_comfyui_let_go(forgetful_host):
    result, lines = saved(forgetful_host, video_graph(SPARSE))
    assert lines == result.timed_reports
    assert tags_of(result.video_file)["nox"][0]["mode"] == "sparse"
