"""Tiny H3 host: test-only ComfyUI nodes; makes the tiny synthetic H3 files loadable.

ComfyUI reads the sizes of the MiniMax-H3 DiT from its file, but those of the two VAEs and of the
text encoder are defaults in its code. This folder sets the defaults to the sizes of sizes.json, so
that VAELoader and CLIPLoader build small modules of the very same classes; all other code runs as
shipped. Never install it in a ComfyUI that loads real weights.
"""

import inspect
import json
from pathlib import Path

import comfy.ldm.minimax.audio_vae
import comfy.ldm.minimax.vae
import comfy.text_encoders.llama
import comfy.text_encoders.qwen3vl
from comfy_api.latest import ComfyExtension

from . import newer_core, peers, probes, sources, states

SIZES = json.loads((Path(__file__).parent / "sizes.json").read_text(encoding="utf-8"))


def set_defaults(function, **new) -> None:
    """Change default values of a function's parameters, in place.

    Raises:
        TypeError: A parameter does not exist or has no default; this ComfyUI differs.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is not p.empty]
    unknown = set(new) - set(names)
    if unknown:
        raise TypeError(f"{function.__qualname__} has no default for {', '.join(unknown)}")
    values = zip(names, function.__defaults__, strict=True)
    function.__defaults__ = tuple(new.get(name, value) for name, value in values)


def shrink(sizes: dict) -> None:
    """Make ComfyUI build the VAEs and the text encoder at the sizes of the tiny files."""
    vae, audio, text = sizes["video_vae"], sizes["audio_vae"], sizes["text_encoder"]
    set_defaults(
        comfy.ldm.minimax.vae.MiniMaxH3VideoVAE.__init__,
        ch=vae["ch"],
        ch_mult=tuple(vae["ch_mult"]),
        num_res_blocks=vae["num_res_blocks"],
    )
    set_defaults(
        comfy.ldm.minimax.vae.ViT3DDecoder.__init__,
        num_layers=vae["decoder_layers"],
        heads=vae["decoder_heads"],
        dim_head=vae["decoder_dim_head"],
    )
    set_defaults(comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE.__init__, **audio)
    language_names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    set_defaults(
        comfy.text_encoders.llama.Qwen3VL_32BConfig.__init__,
        **{name: text[name] for name in language_names},
    )
    comfy.text_encoders.qwen3vl.QWEN3VL_VISION["qwen3vl_32b"].update(
        hidden_size=text["vision_hidden_size"],
        intermediate_size=text["vision_intermediate_size"],
        depth=text["vision_depth"],
        deepstack_visual_indexes=list(text["vision_deepstack"]),
    )


shrink(SIZES)


class TinyH3Extension(ComfyExtension):
    """Registers the test-only nodes."""

    async def get_node_list(self):
        """Every node."""
        nodes = [sources.NODES, probes.NODES, peers.NODES, states.NODES, newer_core.NODES]
        return [node for group in nodes for node in group]


async def comfy_entrypoint():
    """Give ComfyUI the nodes."""
    return TinyH3Extension()
