"""H3's payload -> Sequence; the only file that knows comfy.ldm.minimax."""

from dataclasses import dataclass

import torch

from ..nox_kernels.errors import RequestError
from ..nox_kernels.sequence import Segment, Sequence, TokenGrid, grid_of_positions


@dataclass(frozen=True)
class ModelShape:
    """What of H3's size attention depends on."""

    num_layers: int
    num_heads: int
    head_dim: int


def model_shape(model) -> ModelShape:
    """Sizes of a ComfyUI MODEL.

    Told by its modules, not by their classes: GGUF and quantised loaders replace those.

    Raises:
        RequestError: The model is not MiniMax-H3.
    """
    diffusion_model = model.model.diffusion_model
    blocks = getattr(diffusion_model, "blocks", None)
    attention = getattr(blocks[0], "attn", None) if blocks else None
    is_h3 = hasattr(diffusion_model, "video_patch_proj") and hasattr(
        diffusion_model, "audio_patch_proj"
    )
    if not is_h3 or not hasattr(attention, "heads") or not hasattr(attention, "head_dim"):
        raise RequestError(
            f"This node works on MiniMax-H3 only, but the model is "
            f"{type(model.model).__name__}. Connect a MiniMax-H3 model, or bypass the node."
        )
    return ModelShape(len(blocks), attention.heads, attention.head_dim)


def grid_of_latent(shape: tuple[int, ...]) -> TokenGrid:
    """Token grid of a video latent [1, 24, T, H, W], which H3 pads to whole tokens."""
    t, h, w = shape[-3:]
    return TokenGrid(t, (h + 1) // 2, (w + 1) // 2)


def sequence_of(layout) -> Sequence:
    """ComfyUI's packed layout as a Sequence."""
    _, latent_t, latent_h, latent_w, _ = layout.signature
    token_grid = TokenGrid(latent_t, latent_h // 2, latent_w // 2)
    segments = []
    for start, stop, kind in layout.segments:
        grid = token_grid if kind == "video" else None
        if kind in ("cond", "ref_img") and stop > start:
            grid = grid_of_positions(layout.position_ids[start:stop])
        segments.append(Segment(start, stop, kind, grid))
    return Sequence(tuple(segments), token_grid)


def find_layout(x: list[torch.Tensor], context: torch.Tensor, payload: dict | None):
    """The packed layout that one forward will use.

    Sampling prebuilds it in the payload; where that does not fit the latents (another canvas, or
    un-refined text), H3 builds a new one, and so do we.

    Args:
        x: Video [1, 24, T, H, W] and audio [1, 32, 2, A] latents.
        context: [1, L, ...] text states.
        payload: H3's `minimax_payload`.
    """
    from comfy.ldm.minimax.model import PackedLayout

    video, audio = x[0], x[1]
    latent_t, latent_h, latent_w = video.shape[2:]
    signature = (
        context.shape[1],
        latent_t,
        latent_h + latent_h % 2,
        latent_w + latent_w % 2,
        audio.shape[-1],
    )
    payload = payload or {}
    layout = payload.get("layout")
    if layout is None or layout.signature != signature:
        layout = PackedLayout(
            *signature, keyframes=payload.get("keyframes"), refs=payload.get("refs")
        )
    return layout


def newer_layout(args: dict):
    """The layout that a newer ComfyUI hands to each block; None on 0.33."""
    return args.get("layout") or args["transformer_options"].get("minimax_h3_layout")
