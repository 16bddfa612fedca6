"""Wrong input: what the user reads, one clear sentence each."""

import comfy_graphs as graphs
import pytest
from comfy_graphs import Graph, attention, dense_control, latent_graph, probe, veda


def load_graph(unet=graphs.UNET, lora="none", strength=1.0, task=None) -> Graph:
    """Nox Load MiniMax-H3, and what its `steps` output says."""
    graph = Graph()
    values = {"weight_dtype": "default", "lora_name": lora, "lora_strength": strength}
    model = graph.add("NoxLoadH3", unet_name=unet, **values)
    graph.add("PreviewAny", source=graphs.second(model))
    if task:  # unconnected, as a beginner's graph may hold it; its class alone counts
        graph.add(task)
    return graph


def error_of(host, graph) -> str:
    result = host.run(graph)
    assert result.status == "error", (result.status, result.error)
    assert "\n" not in result.error
    return result.error


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("page.safetensors", "page.safetensors is not a safetensors file. Download it again."),
        ("empty.safetensors", "empty.safetensors is not a safetensors file. Download it again."),
        (
            "a_video_vae.safetensors",
            "a_video_vae.safetensors is a video VAE, but a MiniMax-H3 model is needed here. "
            "Choose another file.",
        ),
        (
            "an_audio_vae.safetensors",
            "an_audio_vae.safetensors is an audio VAE, but a MiniMax-H3 model is needed here. "
            "Choose another file.",
        ),
        (
            "a_preview_vae.safetensors",
            "a_preview_vae.safetensors is a preview VAE, but a MiniMax-H3 model is needed here. "
            "Choose another file.",
        ),
        (
            "a_text_encoder.safetensors",
            "a_text_encoder.safetensors is a text encoder, but a MiniMax-H3 model is needed here. "
            "Choose another file.",
        ),
        (
            "a_lora.safetensors",
            "a_lora.safetensors is a LoRA, but a MiniMax-H3 model is needed here. "
            "Choose another file.",
        ),
    ],
)
def test_a_file_that_is_no_h3_model_is_named(host, file, text):
    assert error_of(host, load_graph(file)) == text


@pytest.mark.parametrize("file", ["truncated.safetensors", "truncated_header.safetensors"])
def test_a_truncated_model_is_told_by_its_size(host, file):
    size = (host.base / "models" / "diffusion_models" / file).stat().st_size
    text = error_of(host, load_graph(file))
    assert text.startswith(f"{file} is truncated: it has {size:,} bytes, its header asks for ")
    assert text.endswith(" or more. Download it again.")


def test_a_model_that_lacks_weights_is_refused(host):
    assert error_of(host, load_graph("incomplete.safetensors")) == (
        "incomplete.safetensors is incomplete: it lacks 1 of MiniMax-H3's tensors, such as "
        "blocks.3.attn.out_proj.weight. Download it again, or choose another file."
    )


def test_a_storage_that_this_comfyui_cannot_read_is_named(host):
    text = error_of(host, load_graph("newer_format.safetensors"))
    assert text.startswith("newer_format.safetensors is stored as int3_tensorwise, which ComfyUI ")
    assert " cannot read; it reads float8_e4m3fn, " in text
    assert text.endswith(". Update ComfyUI, or choose a file of one of these.")


def test_parts_that_this_comfyui_does_not_know_are_named(host):
    result = host.run(load_graph("newer.safetensors"))
    assert result.status == "success"
    (line,) = [line for line in result.log if "newer.safetensors" in line]
    assert line.startswith("Nox: newer.safetensors has parts that ComfyUI ")
    assert " does not know (to_gate_compress): it was made for a newer ComfyUI. " in line


def test_a_lora_of_another_model_is_refused(host):
    assert error_of(host, load_graph(lora="of_another_model.safetensors")) == (
        f"of_another_model.safetensors changes nothing in {graphs.UNET}: none of its tensors "
        f"belongs to MiniMax-H3. Choose a LoRA made for MiniMax-H3, or none."
    )


def test_a_file_that_is_no_lora_is_named(host):
    assert error_of(host, load_graph(lora="not_a_lora.safetensors")) == (
        "not_a_lora.safetensors is a MiniMax-H3 model, but a LoRA is needed here. "
        "Choose another file."
    )


@pytest.mark.parametrize(
    ("file", "class_type", "text"),
    [
        (
            "minimax_h3_ref2va_tiny.safetensors",
            "MiniMaxH3ImageToVideo",
            "minimax_h3_ref2va_tiny.safetensors is the reference-to-video model, but this graph ",
        ),
        (
            "minimax_h3_fl2va_tiny.safetensors",
            "MiniMaxH3ReferenceToVideo",
            "minimax_h3_fl2va_tiny.safetensors is the text- and keyframe-to-video model, but ",
        ),
    ],
)
def test_the_model_of_the_other_task_is_refused(host, file, class_type, text):
    assert error_of(host, load_graph(file, task=class_type)).startswith(text)
    other = {"MiniMaxH3ImageToVideo", "MiniMaxH3ReferenceToVideo"} - {class_type}
    assert host.run(load_graph(file, task=other.pop())).status == "success"


def test_the_model_of_the_other_task_is_refused_though_its_loader_is_cached(host):
    file = "minimax_h3_ref2va_tiny.safetensors"
    graph = load_graph(file)
    assert host.run(graph).status == "success"
    latent = graph.add("EmptyMiniMaxH3LatentAV", **graphs.SMALL)
    latent = graphs.add_sampler(graph, ["1", 0], graphs.add_conditioning(graph), latent)
    graph.add("TinyH3SaveLatent", samples=latent)
    assert error_of(host, graph).startswith(f"{file} is the reference-to-video model, but this")


@pytest.mark.parametrize(
    ("lora", "strength", "steps"),
    [
        ("none", 1.0, "20"),
        (graphs.LORA, 1.0, "20"),
        ("tiny_turbo_4step_v1.safetensors", 1.0, "4"),
        ("tiny_turbo_8step_v1.safetensors", 1.0, "8"),
        ("tiny_turbo_8step_v1.safetensors", 0.0, "20"),
    ],
)
def test_the_loader_reads_the_steps_from_the_loras_name(host, lora, strength, steps):
    result = host.run(load_graph(lora=lora, strength=strength))
    assert result.shown("text") == [steps]


@pytest.mark.parametrize("stored", ["", *(f"_{quant}" for quant in graphs.QUANTS), "_embedder"])
def test_the_loader_gives_what_cores_loaders_give(host, stored):
    unet = f"tiny_h3_dit{stored}.safetensors"
    core = latent_graph(
        ("LoraLoaderModelOnly", {"lora_name": graphs.LORA, "strength_model": 0.5}),
        attention("sparse"),
        unet=unet,
    )
    nox = Graph(core)
    (lora,) = [node for node, value in nox.items() if value["class_type"] == "LoraLoaderModelOnly"]
    values = {"weight_dtype": "default", "lora_name": graphs.LORA, "lora_strength": 0.5}
    nox[lora] = {"class_type": "NoxLoadH3", "inputs": {"unet_name": unet, **values}}
    first, second = host.run(core), host.run(nox)
    assert second.status == "success", second.error
    assert not [line for line in second.log if "does not know" in line]
    assert second.digest == first.digest
    assert second.report == first.report
    without_lora = host.run(latent_graph(attention("sparse"), unet=unet))
    assert first.digest != without_lora.digest


@pytest.mark.parametrize("name", graphs.LORA_KEYS)
def test_a_lora_with_other_key_names_that_core_knows_is_a_lora(host, name):
    assert host.run(load_graph(lora=f"{name}.safetensors")).error == ""


def refused(host, *patches) -> str:
    """Refused by validation: nothing of the graph runs."""
    result = host.run(latent_graph(*patches))
    assert result.status == "rejected", (result.status, result.error)
    assert "\n" not in result.error
    return result.error


@pytest.mark.parametrize("budget", [0, 101, -5])
def test_a_budget_out_of_range_is_refused(host, budget):
    text = refused(host, attention("sparse", budget=budget))
    assert "budget" in text.lower()
    assert str(budget) in text


@pytest.mark.parametrize("budget", [-1, 101])
def test_a_veda_budget_out_of_range_is_refused(host, budget):
    text = refused(host, veda(veda_budget=budget))
    assert "veda_budget" in text
    assert str(budget) in text


def test_an_unknown_answer_to_an_unknown_geometry_is_refused(host):
    text = refused(host, veda(on_unknown_geometry="nearest"))
    assert "'nearest'" in text
    assert all(answer in text for answer in ("error", "sparse", "dense"))


def wired(class_type: str, name: str, source: str, value) -> Graph:
    """A graph whose node gets one value by wire: unknown until the node runs."""
    graph = latent_graph(attention("sparse"), dense_control())
    (node,) = [node for node in graph.values() if node["class_type"] == class_type]
    node["inputs"][name] = graph.add(source, value=value)
    return graph


@pytest.mark.parametrize(
    ("class_type", "name", "source", "value"),
    [
        ("NoxAttention", "budget", "PrimitiveInt", 20),
        ("NoxAttention", "veda_budget", "PrimitiveInt", 20),
        ("NoxAttention", "route_references", "PrimitiveBoolean", True),
        ("NoxDenseControl", "first_steps", "PrimitiveInt", 1),
        ("NoxDenseControl", "last_steps", "PrimitiveInt", 1),
        ("NoxDenseControl", "blocks", "PrimitiveString", "0-1"),
        ("NoxDenseControl", "start_percent", "PrimitiveFloat", 0.25),
        ("NoxDenseControl", "end_percent", "PrimitiveFloat", 0.75),
    ],
)
def test_values_may_come_by_wire(host, class_type, name, source, value):
    result = host.run(wired(class_type, name, source, value))
    assert result.status == "success", result.error


@pytest.mark.parametrize(
    ("class_type", "name", "source", "value", "text"),
    [
        ("NoxAttention", "budget", "PrimitiveInt", 0, "Budget must keep 1 to 100 % of the tiles"),
        ("NoxAttention", "veda_budget", "PrimitiveInt", -1, "Veda's budget must be 0 (the "),
        ("NoxAttention", "veda_budget", "PrimitiveInt", 101, "Veda's budget must be 0 (the "),
        ("NoxDenseControl", "blocks", "PrimitiveString", "x", "Blocks: 'x' is not a block "),
        ("NoxDenseControl", "last_steps", "PrimitiveInt", -1, "Dense steps cannot be negative"),
    ],
)
def test_a_wrong_value_that_comes_by_wire_is_refused(host, class_type, name, source, value, text):
    assert error_of(host, wired(class_type, name, source, value)).startswith(text)


def test_an_unknown_mode_is_refused(host):
    text = refused(host, attention("turbo"))
    assert "turbo" in text
    assert all(mode in text for mode in ("sage", "sparse", "veda", "dense"))


def test_an_unknown_precision_is_refused(host):
    text = refused(host, attention(precision="fast"))
    assert "'fast'" in text
    assert all(precision in text for precision in ("accurate", "faithful"))


@pytest.mark.parametrize("name", ["gone.json", "readme.txt", "../../../etc/passwd"])
def test_a_layout_that_is_not_there_is_refused_by_name(host, name):
    result = host.run(latent_graph(attention("sparse", layout=name)))
    assert result.status in ("rejected", "error")
    assert name in result.error
    assert "\n" not in result.error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken.json", "broken.json cannot be read as a layout table: "),
        ("odd_candidate.json", "odd_candidate.json: candidate '3x3x3' is unknown. Known: "),
        (
            "other_version.json",
            "other_version.json: format is 'nox-layout-table-v9', this version ",
        ),
        (
            "real_size.json",
            "Layout table 'real_size' is for 50 layers of 56 heads, but this model has 4 layers "
            "of 4.",
        ),
        (
            "bands-v0",
            "Layout bands-v0 is for a model of 50 layers, but this model has 4. Choose layout "
            "windows.",
        ),
    ],
)
def test_a_layout_file_that_does_not_fit_is_refused_by_name(host, name, text):
    assert error_of(host, latent_graph(attention("sparse", layout=name))).startswith(text)


def error_of_veda(host, node) -> str:
    """Of a graph whose model must not have been loaded, let alone sampled."""
    result = host.run(latent_graph(node, probe(label="never"), canvas=graphs.LARGE))
    assert result.status == "error", result.status
    assert result.loads == []
    assert result.calls_of("never") == 0
    assert "\n" not in result.error
    return result.error


def test_mode_veda_without_a_predictor_says_where_to_get_one(host):
    assert error_of_veda(host, attention("veda")) == (
        "Mode veda needs a predictor: wire Nox Load Veda Predictor to this node's predictor "
        "input, or choose mode sparse."
    )


def test_a_truncated_predictor_is_told_by_its_size(host):
    file = "truncated.safetensors"
    size = (host.base / "models" / "veda_predictors" / file).stat().st_size
    text = error_of_veda(host, veda(file))
    assert text.startswith(f"{file} is truncated: it has {size:,} bytes, its header asks for ")
    assert text.endswith(" or more. Download it again.")


@pytest.mark.parametrize("file", ["page.safetensors", "empty.safetensors"])
def test_a_predictor_that_is_no_safetensors_file_is_named(host, file):
    assert error_of_veda(host, veda(file)) == (
        f"{file} is not a safetensors file. Download it again."
    )


@pytest.mark.parametrize("file", ["a_lora.safetensors", "a_model.safetensors"])
def test_a_file_that_is_no_predictor_is_named(host, file):
    assert error_of_veda(host, veda(file)) == (
        f"{file}: format is 'pt', a Veda predictor has 'miowtion-veda-predictor-v1'; choose "
        f"another file."
    )


def test_a_predictor_for_another_model_is_named(host):
    assert error_of_veda(host, veda("other_model.safetensors")) == (
        "Veda predictor other_model.safetensors is for 2 layers of 4 heads of 128, but this model "
        "has 4 layers of 4 heads of 128. Choose another predictor, or use mode sparse."
    )


def test_a_predictor_that_is_not_there_is_refused_by_name(host):
    result = host.run(latent_graph(veda("gone.safetensors")))
    assert result.status == "rejected"
    assert "gone.safetensors" in result.error
    assert "\n" not in result.error


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"blocks": "x"}, ["Blocks: 'x' is not a block number or a range. Write them like "]),
        ({"blocks": "0, 5-3"}, ["Blocks: '5-3' is not a block number or a range."]),
        ({"kernel": "cuda"}, ["'cuda'", "sage", "native"]),
        ({"first_steps": -2}, ["-2", "first"]),
        ({"last_steps": -1}, ["-1", "last"]),
    ],
)
def test_a_dense_control_that_cannot_be_is_refused(host, values, texts):
    error = refused(host, attention("sparse"), dense_control(**values))
    assert all(text in error for text in texts), error


def test_a_window_that_ends_before_it_starts_is_refused(host):
    result = host.run(latent_graph(attention(), dense_control(start_percent=0.9, end_percent=0.1)))
    assert result.status in ("rejected", "error")
    assert "The sparse window must run from 0 to 1 with its start before its end" in result.error
    assert "\n" not in result.error


@pytest.mark.parametrize("patches", [(dense_control(blocks="99"),), (dense_control(blocks="0-4"),)])
def test_a_block_beyond_the_model_is_refused(host, patches):
    beyond = "99" if "99" in str(patches) else "4"
    assert error_of(host, latent_graph(attention(), *patches)) == (
        f"Dense block {beyond} does not exist: this model has blocks 0 to 3."
    )


@pytest.mark.parametrize("node", [attention(), attention("dense"), dense_control()])
def test_a_model_that_is_not_h3_is_refused(host, node):
    class_type, values = node
    graph = Graph()
    model = graph.add(class_type, model=graph.add("TinyOtherModel"), **values)
    graph.add("PreviewAny", source=model)
    assert error_of(host, graph) == (
        "This node works on MiniMax-H3 only, but the model is Flux. Connect a MiniMax-H3 model, "
        "or bypass the node."
    )


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("../../evil", "leaves ComfyUI's output folder"),
        ("", "no name at its end"),
        ("x" * 250, "250 bytes"),
    ],
)
def test_a_file_name_that_cannot_be_is_refused_before_the_run(host, prefix, words):
    graph = Graph()
    images = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0)
    graphs.add_saver(graph, images=images, filename_prefix=prefix)
    result = host.run(graph)
    assert result.status == "rejected"
    assert words in str(result.error)
