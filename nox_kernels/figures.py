"""Figures: pictures for people - what a route kept, and clips beside each other."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .layout import TileLayout
from .sequence import TokenGrid

# Told apart by colour-blind eyes too (Okabe and Ito); the gap between frames is white.
SKIPPED, KEPT, SOURCE = (225, 225, 225), (0, 114, 178), (230, 159, 0)
GAP = (255, 255, 255)


def token_states(
    layout: TileLayout, mask_row: Tensor, query_tile: int, token_grid: TokenGrid
) -> np.ndarray:
    """What one query tile does with every video token.

    Args:
        layout: How the rows sit in tiles.
        mask_row: [Nk] bool, the KV tiles that the query tile keeps.
        query_tile: A query tile of the video.
        token_grid: Of the video.

    Returns:
        [t, h, w] uint8: 0 skipped, 1 kept, 2 a token of the query tile itself.
    """
    video_start = layout.num_rows - token_grid.num_tokens  # the video comes last
    slot = layout.row_slot[video_start:].cpu()
    state = mask_row.cpu()[slot // layout.kv_tile].byte()
    state[slot // layout.query_tile == query_tile] = 2
    return state.view(*token_grid).numpy()


def route_picture(
    layout: TileLayout,
    mask_row: Tensor,
    query_tile: int,
    token_grid: TokenGrid,
    path: str | None = None,
):
    """Draw one query tile's kept tokens, a panel per latent frame.

    Args:
        layout: How the rows sit in tiles.
        mask_row: [Nk] bool, the KV tiles that the query tile keeps.
        query_tile: A query tile of the video.
        token_grid: Of the video.
        path: Where to save the picture too; None = nowhere.

    Returns:
        The picture, a PIL RGB image.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from PIL import Image

    states = token_states(layout, mask_row, query_tile, token_grid)
    mosaic, corners = _mosaic(states)
    height, width = mosaic.shape[:2]
    # Without pyplot there is no global state to leave behind.
    figure = Figure(figsize=(10, 10 * height / width + 1.5), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(mosaic, interpolation="nearest")
    axes.set_axis_off()
    for frame_idx, (row, column) in enumerate(corners):
        axes.text(column - 0.5, row - 0.7, f"t={frame_idx}", fontsize=7, va="bottom")
    axes.set_title(route_title(layout, mask_row, query_tile), fontsize=11, pad=14)
    counts = np.bincount(states.flatten(), minlength=3)
    labels = (
        (SOURCE, f"the query tile's own tokens ({counts[2]})"),
        (KEPT, f"kept ({counts[1]})"),
        (SKIPPED, f"skipped ({counts[0]})"),
    )
    figure.legend(
        handles=[Patch(color=np.divide(color, 255), label=label) for color, label in labels],
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
    )
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    if path is not None:
        picture.save(path)
    return picture


def route_title(layout: TileLayout, mask_row: Tensor, query_tile: int) -> str:
    """The picture's title: how many KV tiles the query tile keeps, and how many it must."""
    num_tail = layout.num_real_kv_tiles - layout.num_video_kv_tiles
    return (
        f"What query tile {query_tile + 1} of {layout.num_query_tiles} (layout {layout.name}) looks "
        f"at, by latent frame t: {int(mask_row.sum())} of {layout.num_real_kv_tiles} KV tiles.\n"
        f"{num_tail} of them hold text, conditions and sound: always kept, not drawn."
    )


def _mosaic(states: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Frames side by side as one RGB picture, a pixel per token, and each frame's corner."""
    t, h, w = states.shape
    label_height, gap = max(2, h // 4), max(1, w // 8)
    # about 4 : 3 in all
    num_columns = min(t, max(1, round(math.sqrt(t * (h + label_height) / (w + gap) * 4 / 3))))
    num_rows = math.ceil(t / num_columns)
    mosaic = np.full((num_rows * (h + label_height), num_columns * (w + gap) - gap, 3), GAP[0])
    mosaic = mosaic.astype(np.uint8)
    colours = np.array((SKIPPED, KEPT, SOURCE), dtype=np.uint8)
    corners = []
    for frame_idx in range(t):
        row = frame_idx // num_columns * (h + label_height) + label_height
        column = frame_idx % num_columns * (w + gap)
        mosaic[row : row + h, column : column + w] = colours[states[frame_idx]]
        corners.append((row, column))
    return mosaic, corners


def side_by_side(clips: dict[str, Tensor]) -> Tensor:
    """Clips of one size in rows of about as many as there are rows, each under its label.

    Args:
        clips: Label -> frames [F, H, W, 3] in 0..1.

    Returns:
        [F, H', W', 3] float16; places without a clip are black.
    """
    labelled = []
    for text, frames in clips.items():
        num_frames, _, width, _ = frames.shape
        label = _label(text, width).expand(num_frames, -1, -1, -1)
        labelled.append(torch.cat((label, frames.half()), dim=1))
    num_columns = math.ceil(math.sqrt(len(labelled)))
    labelled += [torch.zeros_like(labelled[0])] * (-len(labelled) % num_columns)
    rows = [
        torch.cat(labelled[idx : idx + num_columns], dim=2)
        for idx in range(0, len(labelled), num_columns)
    ]
    return torch.cat(rows, dim=1)


def _label(text: str, width: int) -> Tensor:
    """[1, h, width, 3] float16: white on black, as large as the width allows."""
    from PIL import Image, ImageDraw, ImageFont

    size = max(10, min(28, width // 11))
    strip = Image.new("RGB", (width, 2 * (size * 3 // 4)))
    ImageDraw.Draw(strip).text(
        (width / 2, strip.height / 2),
        text,
        fill="white",
        font=ImageFont.load_default(size),
        anchor="mm",
    )
    pixels = torch.frombuffer(bytearray(strip.tobytes()), dtype=torch.uint8)
    return (pixels.view(1, strip.height, width, 3) / 255).half()
