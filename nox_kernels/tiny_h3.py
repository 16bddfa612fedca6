"""Tiny H3: makes a small synthetic MiniMax-H3 for diffusers, a function of its seed."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MARKER = "nox_tiny_h3.json"  # beside saved weights: says that they are ours

_TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "hidden_size": 256,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "ffn_dim": 512,
    "text_dim": 64,
    "freq_dim": 256,
    "time_embed_hidden_dim": 128,
    "time_embed_dim": 64,
}
_VIDEO_VAE = {
    "block_out_channels": (32, 32, 32, 32, 32, 64),
    "layers_per_block": 1,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 64,
}
_AUDIO_VAE = {
    "encoder_dim": 4,
    "latent_dim": 64,
    "decoder_dim": 128,
    "latents_mean": [0.0] * 32,
    "latents_std": [1.0] * 32,
}

# Gain of a weight over unit output variance, by a part of its name. Plain random weights attend
# almost evenly, which hides what an attention does; these peak it (logits of standard deviation
# 3) and let it weigh more.
_PEAK = math.sqrt(3.0)
_GAINS = {"adaln_proj": 0.5, "norm_out.linear": 0.2, "attn.to_out": 2.0}


@dataclass(frozen=True, eq=False)
class TinyH3:
    """The three models of a small H3: float32, on the CPU, in eval mode."""

    transformer: torch.nn.Module
    vae: torch.nn.Module
    audio_vae: torch.nn.Module
    seed: int


def make_tiny_h3(seed: int = 0) -> TinyH3:
    """Make all three models; the caller's random state stays as it is."""
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

    return TinyH3(
        transformer=make_transformer(seed),
        vae=_paint(_seeded(AutoencoderKLMiniMaxH3, _VIDEO_VAE, seed), seed),
        audio_vae=_amplify(_seeded(AutoencoderKLMiniMaxH3Audio, _AUDIO_VAE, seed)),
        seed=seed,
    )


def make_transformer(seed: int = 0) -> torch.nn.Module:
    """The transformer alone: 4 layers and 1 refiner block of 4 heads of 128 channels.

    Every tensor depends on the seed and its own name only.
    """
    from diffusers import MiniMaxH3Transformer3DModel

    model = _seeded(MiniMaxH3Transformer3DModel, _TRANSFORMER, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_values(name, tuple(weight.shape), seed))
    return model


def prompt_embeds(prompt: str, seed: int = 0) -> Tensor:
    """Stand-in for the text encoder: [1, words, text_dim], fixed by the prompt and the seed."""
    words = prompt.split() or [""]
    rows = [_randn(f"word/{word}", (_TRANSFORMER["text_dim"],), seed) for word in words]
    return torch.stack(rows)[None]


def save_tiny_h3(folder: str | Path, seed: int = 0) -> None:
    """Save a tiny H3 in diffusers' layout, a folder per component, with our marker beside it."""
    from diffusers import MiniMaxH3Scheduler

    folder = Path(folder)
    model = make_tiny_h3(seed)
    model.transformer.save_pretrained(folder / "transformer")
    model.vae.save_pretrained(folder / "vae")
    model.audio_vae.save_pretrained(folder / "audio_vae")
    MiniMaxH3Scheduler(shift=12.0).save_pretrained(folder / "scheduler")
    MiniMaxH3Scheduler(shift=3.0).save_pretrained(folder / "audio_scheduler")
    (folder / MARKER).write_text(json.dumps({"seed": seed}), encoding="utf-8")


def saved_seed(folder: str | Path) -> int | None:
    """Seed of a tiny H3 that `save_tiny_h3` wrote; None for any other folder."""
    try:
        return int(json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _seeded(model_class: type, config: dict, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(**config).eval()


def _paint(vae: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Make every latent voxel a square of one colour: an eye and a video encoder can follow it."""
    proj = vae.decoder.proj_out
    dim = proj.in_features
    with torch.no_grad():
        for name, weight in vae.decoder.named_parameters():
            if name.endswith((".scale1", ".scale2")):  # 0 would switch a block off
                weight.fill_(0.2)
        colours = _randn("vae/colours", (3, 1, dim), seed) * (1.5 / math.sqrt(dim))
        proj.weight.copy_(colours.expand(3, proj.out_features // 3, dim).flatten(0, 1))
        proj.bias.zero_()
    return vae


def _amplify(audio_vae: torch.nn.Module) -> torch.nn.Module:
    """Make the sound follow the latents: torch's first weights let the biases drown them."""
    with torch.no_grad():
        for name, weight in audio_vae.named_parameters():
            if name.startswith("dec") and name.endswith(".bias"):
                weight.zero_()
            elif name.startswith(("decoder.ups", "decoder.conv")) and name.endswith("weight_g"):
                weight.mul_(1.5)
    return audio_vae


def _randn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.randn(shape, generator=generator)


def _values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    noise = _randn(name, shape, seed)
    if name.endswith(".bias"):
        return 0.02 * noise
    if len(shape) == 1:  # an RMS norm
        peak = _PEAK if name.endswith(("norm_q.weight", "norm_k.weight")) else 1.0
        return peak * (1.0 + 0.05 * noise)
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    return noise * (gain / math.sqrt(shape[1]))
