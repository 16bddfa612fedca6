"""Comfy prompts: the shipped API prompts, made small enough for the tiny models."""

import json
from pathlib import Path

import comfy_graphs as graphs
import torch
from comfy_host import Host
from PIL import Image

from nox_kernels.sound import Audio
from nox_kernels.video import write_video

FOLDER = Path(__file__).parent.parent / "prompts"
# what a shipped prompt's own value becomes; what comes by wire stays wired
TINY = {
    "NoxLoadH3.unet_name": graphs.UNET,
    "NoxLoadH3.lora_name": "tiny_turbo_8step_v1.safetensors",
    "CLIPLoader.clip_name": graphs.CLIP,
    "LoadImage.image": "keyframe.png",
    "LoadVideo.file": "clip.mp4",
    "MiniMaxH3ImageToVideo.width": graphs.SHIPPED["width"],
    "MiniMaxH3ImageToVideo.height": graphs.SHIPPED["height"],
    "PrimitiveFloat.value": 0.9,  # seconds: 22 frames
    "PrimitiveInt.value": graphs.SHIPPED["height"],  # pixels of the short edge
}


def save_clip(path: Path, num_frames: int = 30) -> None:
    """A clip with sound, of graphs.SHIPPED's size, to be continued."""
    if path.exists():
        return
    width, height = graphs.SHIPPED["width"], graphs.SHIPPED["height"]
    shade = torch.linspace(0.2, 0.8, num_frames)[:, None, None, None]
    time = torch.arange(round(num_frames / 24 * 32000)) / 32000
    sound = Audio(0.3 * torch.sin(2 * torch.pi * 440 * time)[None], 32000)
    write_video(path, shade.expand(num_frames, height, width, 3), sound)


def shipped_prompt(host: Host, name: str) -> graphs.Graph:
    """The prompt of a shipped workflow by its file, on the canvas `graphs.SHIPPED`."""
    return small_prompt(host, FOLDER / f"{name}.json")


def small_prompt(host: Host, file: Path) -> graphs.Graph:
    """A prompt's file with the tiny models, on that canvas."""
    inputs_folder = host.base / "input"
    Image.new("RGB", (160, 120), "teal").save(inputs_folder / "keyframe.png")
    save_clip(inputs_folder / "clip.mp4")
    prompt = graphs.Graph(json.loads(file.read_text(encoding="utf-8")))
    for node in prompt.values():
        inputs = node["inputs"]
        for field, value in inputs.items():
            wanted = TINY.get(f"{node['class_type']}.{field}")
            if wanted is not None and not isinstance(value, list):
                inputs[field] = wanted
        if node["class_type"] == "VAELoader":
            is_audio = "audio" in inputs["vae_name"]
            inputs["vae_name"] = graphs.AUDIO_VAE if is_audio else graphs.VIDEO_VAE
    return prompt
