"""Comfy prompts: the shipped API prompts, made small enough for the tiny models."""

import json
from pathlib import Path

import comfy_graphs as graphs
from comfy_host import Host
from PIL import Image

FOLDER = Path(__file__).parent.parent / "prompts"
# what a shipped prompt's own value becomes; what comes by wire stays wired
TINY = {
    "NoxLoadH3.unet_name": graphs.UNET,
    "NoxLoadH3.lora_name": "tiny_turbo_8step_v1.safetensors",
    "CLIPLoader.clip_name": graphs.CLIP,
    "LoadImage.image": "keyframe.png",
    "MiniMaxH3ImageToVideo.width": graphs.SHIPPED["width"],
    "MiniMaxH3ImageToVideo.height": graphs.SHIPPED["height"],
    "PrimitiveFloat.value": 0.9,  # seconds: 22 frames
    "PrimitiveInt.value": graphs.SHIPPED["height"],  # pixels of the short edge
}


def shipped_prompt(host: Host, name: str) -> graphs.Graph:
    """The prompt of a shipped workflow, "t2v" or "i2v", on the canvas `graphs.SHIPPED`."""
    Image.new("RGB", (160, 120), "teal").save(host.base / "input" / "keyframe.png")
    prompt = graphs.Graph(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
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
