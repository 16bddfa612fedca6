"""Sources: test-only nodes that make inputs, and the one that saves a latent."""

import hashlib
import json
import math
from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import folder_paths
import numpy as np
import torch
from comfy_api.latest import io

CATEGORY = "testing"
TEXT_DIM = json.loads((Path(__file__).parent / "sizes.json").read_text(encoding="utf-8"))[
    "text_encoder"
]["hidden_size"]


class TinyH3Conditioning(io.ComfyNode):
    """Conditioning for H3 without a text encoder: a fixed pseudo-random function of the prompt.

    With `reference` it has a square reference picture of as many tokens a side, which no VAE had to
    encode.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        """`run` changes nothing but what ComfyUI's cache takes for new."""
        return io.Schema(
            node_id="TinyH3Conditioning",
            category=CATEGORY,
            inputs=[
                io.String.Input("prompt", multiline=True, default="a test"),
                io.Int.Input("tokens", default=16, min=1, max=4096),
                io.Int.Input("run", default=0, max=1 << 40),
                io.Int.Input("reference", default=0, min=0, max=64, optional=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, prompt, tokens, run, reference=0) -> io.NodeOutput:
        """Text states of shape [1, tokens, text_dim]."""
        seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(1, tokens, TEXT_DIM, generator=generator)
        # all text, no vision rows
        values = {"minimax_token_tags": torch.ones(tokens, dtype=torch.long)}
        if reference:
            size = 2 * reference  # a token is 2 x 2 latent cells
            latent = torch.randn(1, 24, 1, size, size, generator=generator)
            picture = {"kind": "image", "latent_h": size, "latent_w": size, "latent": latent}
            values["minimax_refs"] = [picture]
        return io.NodeOutput([[states, values]])


class TinyH3SaveLatent(io.ComfyNode):
    """Saves a latent's tensors, before any decoder or encoder can hide a difference."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """One output node."""
        return io.Schema(
            node_id="TinyH3SaveLatent",
            category=CATEGORY,
            is_output_node=True,
            inputs=[io.Latent.Input("samples")],
            outputs=[],
        )

    @classmethod
    def execute(cls, samples) -> io.NodeOutput:
        """Write one .npz of float32 arrays a content; the digest covers every value's bits."""
        latent = samples["samples"]
        streams = latent.unbind() if latent.is_nested else [latent]
        arrays = [stream.float().cpu().contiguous().numpy() for stream in streams]
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(str(array.shape).encode() + array.tobytes())
        name = f"latent_{digest.hexdigest()[:32]}.npz"
        np.savez(Path(folder_paths.get_output_directory(), name), *arrays)
        return io.NodeOutput(ui={"latent": [{"sha256": digest.hexdigest(), "file": name}]})


class TinyH3Audio(io.ComfyNode):
    """One second of sound of a chosen kind."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The kind is what the tests need."""
        return io.Schema(
            node_id="TinyH3Audio",
            category=CATEGORY,
            inputs=[io.Combo.Input("kind", options=["tone", "nan", "bool", "text", "unnamed"])],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, kind) -> io.NodeOutput:
        """Stereo at 32 kHz, as H3 makes it."""
        wave = 0.3 * torch.sin(torch.arange(32000) * (2 * math.pi * 440 / 32000)).repeat(1, 2, 1)
        if kind == "nan":
            wave[..., 1000:2000] = math.nan
        if kind == "bool":
            wave = wave > 0
        if kind == "text":
            return io.NodeOutput("no sound at all")
        if kind == "unnamed":
            return io.NodeOutput({"samples": wave})
        return io.NodeOutput({"waveform": wave, "sample_rate": 32000})


class TinyH3Grey(io.ComfyNode):
    """Three grey frames of one channel."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """No inputs."""
        return io.Schema(
            node_id="TinyH3Grey", category=CATEGORY, inputs=[], outputs=[io.Image.Output()]
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """Of middle grey."""
        return io.NodeOutput(torch.full((3, 64, 64, 1), 0.5))


class TinyOtherModel(io.ComfyNode):
    """A MODEL that is not MiniMax-H3: Flux, as small as its classes allow."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """No inputs."""
        return io.Schema(
            node_id="TinyOtherModel", category=CATEGORY, inputs=[], outputs=[io.Model.Output()]
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """Untrained; it is never sampled."""
        config = comfy.supported_models.Flux(
            {
                "image_model": "flux",
                "in_channels": 16,
                "out_channels": 16,
                "patch_size": 2,
                "vec_in_dim": 8,
                "context_in_dim": 8,
                "hidden_size": 16,
                "mlp_ratio": 1.0,
                "num_heads": 1,
                "depth": 1,
                "depth_single_blocks": 1,
                "txt_ids_dims": [],
                "axes_dim": [4, 6, 6],
                "theta": 10000,
                "qkv_bias": True,
                "guidance_embed": False,
            }
        )
        config.set_inference_dtype(torch.float32, None)
        cpu = torch.device("cpu")
        model = config.get_model({}, "", device=cpu)
        return io.NodeOutput(comfy.model_patcher.ModelPatcher(model, cpu, cpu))


NODES = [TinyH3Conditioning, TinyH3SaveLatent, TinyH3Audio, TinyH3Grey, TinyOtherModel]
