"""Checkpoint headers: what a file is, told without loading it."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from nox_kernels import checkpoint
from nox_kernels.tensor_file import read_header

H3 = ("video_patch_proj.weight", "audio_patch_proj.weight", "blocks.0.attn.qkv_proj.weight")


def write(path, names, size=4, cut=0):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(offset)
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (H3, "a MiniMax-H3 model"),
        ([f"model.diffusion_model.{name}" for name in H3], "a MiniMax-H3 model"),
        (["diffusion_model.blocks.0.attn.out_proj.lora_A.weight"], "a LoRA"),
        (["lora_unet_blocks_0_attn.lora_down.weight"], "a LoRA"),
        (["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"], "a text encoder"),
        (["encoder.conv_in.weight", "decoder.x_embedder.weight"], "a video VAE"),
        (["decoder.conv_pre.weight"], "an audio VAE"),
        (["double_blocks.0.img_attn.qkv.weight"], "another model"),
    ],
)
def test_the_kind_is_read_from_the_header(tmp_path, names, kind):
    path = write(tmp_path / "file.safetensors", names)
    assert checkpoint.kind_of(read_header(path).tensors) == kind
    for wanted in (checkpoint.H3, checkpoint.LORA):
        # a LoRA of a form that we do not know is left to its loader
        if kind == wanted or (kind, wanted) == ("another model", "a LoRA"):
            checkpoint.check(path, wanted)
        else:
            with pytest.raises(ValueError, match=f"file.safetensors is {kind}, but {wanted} is"):
                checkpoint.check(path, wanted)


def described(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "metadata", "formats"),
    [
        ({}, {}, set()),
        ({"a.comfy_quant": b'{"format": "nvfp4"}'}, {}, {"nvfp4"}),
        (
            {
                "m.a.comfy_quant": b'{"format": "int8_tensorwise", "convrot": true}',
                "m.b.comfy_quant": b'{"format": "float8_e4m3fn"}',
            },
            {},
            {"int8_tensorwise", "float8_e4m3fn"},
        ),
        (
            {},
            {"_quantization_metadata": '{"layers": {"a": {"format": "float8_e5m2"}}}'},
            {"float8_e5m2"},
        ),
    ],
)
def test_the_storage_of_layers_is_read_from_their_descriptions(
    tmp_path, tensors, metadata, formats
):
    path = tmp_path / "file.safetensors"
    file = {name: described(text) for name, text in tensors.items()}
    save_file(file | {"a.weight": torch.zeros(2, 2)}, path, metadata)
    assert checkpoint.quant_formats(path) == formats


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b"\xff", b'{"format": {}}'])
def test_a_description_that_is_none_is_one_sentence(tmp_path, text):
    path = tmp_path / "file.safetensors"
    save_file({"a.comfy_quant": described(text)}, path)
    with pytest.raises(
        ValueError, match=r"^file.safetensors does not say how its layers .*again.$"
    ):
        checkpoint.quant_formats(path)


def test_the_tensors_of_a_model_are_named_without_its_prefix(tmp_path):
    names = [f"model.diffusion_model.{name}" for name in H3]
    path = write(tmp_path / "file.safetensors", [*names, "vae.decoder.weight"])
    assert checkpoint.h3_tensors(path) == set(H3)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_truncated_file_is_told_with_both_sizes(tmp_path, cut):
    path = write(tmp_path / "file.safetensors", H3, cut=cut)
    size = path.stat().st_size
    with pytest.raises(ValueError, match=f"truncated: it has {size:,} bytes.*{size + cut:,}"):
        checkpoint.check(path, "a MiniMax-H3 model")


def test_a_file_cut_inside_its_header_is_truncated(tmp_path):
    path = write(tmp_path / "file.safetensors", H3)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match="truncated"):
        checkpoint.check(path, "a MiniMax-H3 model")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"<html>" * 30, bytes(64)])
def test_what_is_not_safetensors_is_said_to_be_so(tmp_path, data):
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a safetensors file"):
        checkpoint.check(path, "a MiniMax-H3 model")


def test_other_formats_are_left_to_their_loader(tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(b"GGUF")
    checkpoint.check(path, "a MiniMax-H3 model")


@pytest.mark.parametrize(
    "offsets", [[0], [4, 0], [-4, 4], ["a", "b"], None, [0, float("nan")], [0, float("inf")], 5]
)
def test_offsets_that_make_no_sense_are_one_sentence(tmp_path, offsets):
    text = json.dumps({"x.weight": {"dtype": "F32", "shape": [1], "data_offsets": offsets}})
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(8))
    with pytest.raises(ValueError, match=r"(not a|damaged) safetensors file"):
        checkpoint.check(path, checkpoint.H3)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b"\xff\xfe" * 20, b"[1, 2]", b'[["a", {"data_offsets": [0, 1]}]]', b"{}"],
)
def test_a_header_that_is_no_header_is_one_sentence(tmp_path, text):
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=r"(not a|damaged) safetensors file"):
        checkpoint.check(path, checkpoint.H3)


def test_a_link_to_nowhere_and_a_folder_cannot_be_read(tmp_path):
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("link.safetensors", "folder.safetensors"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            checkpoint.check(tmp_path / name, checkpoint.H3)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors", 8),
        ("minimax_h3_ref2v_turbo_4step_v0.1.safetensors", 4),
        ("Turbo-8-Steps.safetensors", 8),
        ("turbo_steps4.safetensors", 4),
        ("8step/foo_4step.safetensors", 4),
        ("4step\\plain.safetensors", 20),
        ("h3_style.safetensors", 20),
        ("epoch8_step2000.safetensors", 20),
        ("h3_v4_step_1000.safetensors", 20),
        ("mylora-step4k.safetensors", 20),
        ("x_step4.5.safetensors", 20),
        ("turbo_18step.safetensors", 20),
    ],
)
def test_the_steps_are_read_from_the_files_name(name, steps):
    assert checkpoint.steps_of(name) == steps
