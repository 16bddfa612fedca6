"""Comfy graphs: builds API prompts around the tiny H3."""

import itertools

from nox_kernels.sequence import token_grid

UNET = "tiny_h3_dit.safetensors"
QUANTS = ("fp8", "int8_convrot", "nvfp4")  # in which the released files are stored, beside bf16
CLIP = "tiny_h3_qwen3vl.safetensors"
VIDEO_VAE = "tiny_h3_video_vae.safetensors"
AUDIO_VAE = "tiny_h3_audio_vae.safetensors"
TAEH3 = "tiny_h3_taeh3.safetensors"
LORA = "tiny_h3_lora.safetensors"
LORA_KEYS = {  # file: endings of its keys, beside the released files' .lora_A.weight
    "lora_kohya": (".lora_down.weight", ".lora_up.weight"),
    "lora_peft": (".lora_A.default.weight", ".lora_B.default.weight"),
    "lora_diffusers": (".lora.down.weight", ".lora.up.weight"),
}
MP4 = "mp4 (H.264 + AAC)"

_runs = itertools.count(1)


class Graph(dict):
    """An API prompt: node id -> {"class_type", "inputs"}."""

    def add(self, class_type: str, **inputs) -> list:
        """Add a node; returns the link to its first output."""
        node = str(max(map(int, self), default=0) + 1)
        self[node] = {"class_type": class_type, "inputs": inputs}
        return [node, 0]


def second(link: list) -> list:
    """The link to a node's second output."""
    return [link[0], 1]


def attention(mode="sage", **values):
    """A Nox H3 Attention node, for `patches`; `predictor` is the name of a file."""
    defaults = {
        "mode": mode,
        "budget": 15,
        "layout": "windows",
        "precision": "accurate",
        "veda_budget": 0,
        "on_unknown_geometry": "error",
        "route_references": False,
    }
    return "NoxAttention", defaults | values


def veda(predictor="tiny.safetensors", **values):
    """A Nox H3 Attention node in mode veda, with a predictor; for `patches`."""
    return attention("veda", predictor=predictor, **values)


def dense_control(**values):
    """A Nox Dense Steps and Blocks node, for `patches`."""
    defaults = {
        "first_steps": -1,
        "last_steps": 0,
        "blocks": "0",
        "start_percent": 0.0,
        "end_percent": 1.0,
        "kernel": "sage",
    }
    return "NoxDenseControl", defaults | values


def probe(**values):
    """A block probe, for `patches`."""
    defaults = {
        "label": "probe",
        "block": 1,
        "attention": "whole",
        "foreign_calls": False,
        "wait_s": 0.0,
        "fail_at": 0,
    }
    return "TinyH3BlockProbe", defaults | values


def sigma_shift(video=6.0, audio=2.0):
    """Core's shift node, for `patches`."""
    return "MiniMaxH3SigmaShift", {"shift_video": video, "shift_audio": audio}


def add_model(graph: Graph, *patches, unet=UNET) -> list:
    """A loaded model and the nodes that patch it, in this order."""
    model = graph.add("UNETLoader", unet_name=unet, weight_dtype="default")
    for class_type, values in patches:
        if "predictor" in values:
            loader = graph.add("NoxLoadVedaPredictor", predictor_name=values["predictor"])
            values = values | {"predictor": loader}
        model = graph.add(class_type, model=model, **values)
    return model


def add_conditioning(graph: Graph, prompt="a red ball", tokens=16, reference=0) -> list:
    """Text states that ComfyUI's cache has never seen: every run samples, loaders stay cached.

    `reference` is the side of a square reference picture in tokens; 0 = none.
    """
    return graph.add(
        "TinyH3Conditioning", prompt=prompt, tokens=tokens, run=next(_runs), reference=reference
    )


def add_sampler(
    graph: Graph,
    model: list,
    positive: list,
    latent: list,
    *,
    negative: list | None = None,
    steps=4,
    seed=1,
    sampler="euler",
    denoise=1.0,
) -> list:
    """H3's own sampling nodes; with a negative, CFG at 3."""
    if negative is None:
        guider = graph.add("BasicGuider", model=model, conditioning=positive)
    else:
        guider = graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=3.0)
    return graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=seed),
        guider=guider,
        sampler=graph.add("KSamplerSelect", sampler_name=sampler),
        sigmas=graph.add(
            "BasicScheduler", model=model, scheduler="simple", steps=steps, denoise=denoise
        ),
        latent_image=latent,
    )


# Frames are 17k + 5, a token is 32 pixels wide and high. SMALL: 7 x 4 x 8 = 224 video tokens are
# 2 query tiles and 4 KV tiles in raster order: a query tile has 2 candidates besides its own 2.
SMALL = {"width": 256, "height": 128, "length": 22}
# 7 x 8 x 8 = 448 video tokens, 7 KV tiles
MEDIUM = {"width": 256, "height": 256, "length": 22}
# 12 x 8 x 10 = 960 video tokens, 15 KV tiles
LARGE = {"width": 320, "height": 256, "length": 39}
# of the shipped prompts, once they are made small: 7 x 4 x 5 = 140 video tokens
SHIPPED = {"width": 160, "height": 128, "length": 22}
CANVASES = {"SMALL": SMALL, "MEDIUM": MEDIUM, "LARGE": LARGE, "SHIPPED": SHIPPED}


def grid_of(canvas: dict):
    """Token grid of one of the canvases."""
    return token_grid(canvas["width"], canvas["height"], canvas["length"])


def latent_graph(
    *patches, canvas=SMALL, unet=UNET, tokens=16, reference=0, negative=None, **sampling
) -> Graph:
    """Text to latent, saved before any decoder; `negative` is a second prompt."""
    graph = Graph()
    model = add_model(graph, *patches, unet=unet)
    positive = add_conditioning(graph, tokens=tokens, reference=reference)
    if negative is not None:
        negative = add_conditioning(graph, negative, tokens + 7)
    latent = graph.add("EmptyMiniMaxH3LatentAV", **canvas)
    latent = add_sampler(graph, model, positive, latent, negative=negative, **sampling)
    graph.add("TinyH3SaveLatent", samples=latent)
    return graph


def add_saver(graph: Graph, **inputs) -> list:
    """Nox Save Video with its defaults."""
    defaults = {
        "fps": 24.0,
        "filename_prefix": "nox/test",
        "format": MP4,
        "crf": 18,
        "save_metadata": True,
    }
    return graph.add("NoxSaveVideo", **defaults | inputs)


def video_graph(*patches, canvas=SMALL, **sampling) -> Graph:
    """Text to a saved video with sound, and its latent."""
    graph = latent_graph(*patches, canvas=canvas, **sampling)
    (latent,) = [
        node["inputs"]["samples"]
        for node in graph.values()
        if node["class_type"] == "TinyH3SaveLatent"
    ]
    images = graph.add("VAEDecode", samples=latent, vae=graph.add("VAELoader", vae_name=VIDEO_VAE))
    audio = graph.add(
        "VAEDecodeAudio", samples=latent, vae=graph.add("VAELoader", vae_name=AUDIO_VAE)
    )
    add_saver(graph, images=images, audio=audio)
    return graph


def task_graph(task: str, *patches, canvas=SMALL, **sampling) -> Graph:
    """Keyframes or references to latent, through the text encoder and the VAEs."""
    graph = Graph()
    model = add_model(graph, *patches)
    inputs = {
        "clip": graph.add("CLIPLoader", clip_name=CLIP, type="minimax", device="default"),
        "vae": graph.add("VAELoader", vae_name=VIDEO_VAE),
        **canvas,
    }
    image = graph.add("EmptyImage", width=160, height=120, batch_size=1, color=0xFF0000)
    if task == "keyframes":
        inputs |= {"prompt": "a red ball", "first_frame": image, "last_frame": image}
        start = graph.add("MiniMaxH3ImageToVideo", **inputs)
    else:
        clip = graph.add("EmptyImage", width=128, height=128, batch_size=22, color=255)
        sound = graph.add("EmptyAudio", duration=1.0, sample_rate=44100, channels=2)
        inputs |= {
            "audio_vae": graph.add("VAELoader", vae_name=AUDIO_VAE),
            "prompt": "<Picture 1> <Video 1> <Audio 1>",
            "ref_image_size": "match",
            "ref_images.ref_image_0": image,
            "ref_videos.ref_video_0": clip,
            "ref_video_audios.ref_video_audio_0": sound,
            "ref_audios.ref_audio_0": sound,
        }
        start = graph.add("MiniMaxH3ReferenceToVideo", **inputs)
    latent = add_sampler(graph, model, start, second(start), **sampling)
    graph.add("TinyH3SaveLatent", samples=latent)
    return graph
