"""Shipped graphs: the workflows of the pack, and what makes them small enough for the test host."""

import itertools
import json
from pathlib import Path

WORKFLOWS = Path(__file__).parents[3] / "workflows"
TEXT = "Nox H3 Text to Video and Audio"
IMAGE = "Nox H3 Image to Video and Audio"
CONTINUE = "Nox H3 Continue a Clip"
PROMPTS = {TEXT: "t2v", IMAGE: "i2v", CONTINUE: "continue"}
# another one for each run, or the second would come from the cache
_seeds = itertools.count(1)


def read(name: str) -> dict:
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def id_of(graph: dict, kind: str) -> int:
    (node,) = [node for node in graph["nodes"] if node["type"] == kind]
    return node["id"]


def id_titled(graph: dict, title: str) -> int:
    (node,) = [node for node in graph["nodes"] if node.get("title") == title]
    return node["id"]


def make_new(page, graph: dict) -> None:
    """Another seed: the next run samples."""
    page.set(id_of(graph, "RandomNoise"), "noise_seed", next(_seeds))


def make_small(page, graph: dict) -> None:
    """The tiny files of the test host, and the smallest canvas that still routes tiles."""
    loader = id_of(graph, "NoxLoadH3")
    page.set(loader, "unet_name", "minimax_h3_fl2va_tiny.safetensors")
    page.set(loader, "lora_name", "tiny_turbo_8step_v1.safetensors")
    page.set(id_of(graph, "CLIPLoader"), "clip_name", "tiny_h3_qwen3vl.safetensors")
    page.set(id_titled(graph, "Video VAE"), "vae_name", "tiny_h3_video_vae.safetensors")
    page.set(id_titled(graph, "Audio VAE"), "vae_name", "tiny_h3_audio_vae.safetensors")
    page.set(id_titled(graph, "Duration (seconds)"), "value", 0.9)
    kinds = {node["type"] for node in graph["nodes"]}
    if "LoadVideo" in kinds:
        page.set(id_of(graph, "LoadVideo"), "file", "clip.mp4")
        page.set(id_titled(graph, "Short edge at most"), "value", 192)
    elif "LoadImage" in kinds:
        page.set(id_titled(graph, "Short edge (768 = official)"), "value", 192)
    else:
        h3 = id_of(graph, "MiniMaxH3ImageToVideo")
        page.set(h3, "width", 256)
        page.set(h3, "height", 192)
