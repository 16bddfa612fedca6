"""Report picture: which kind of attention ran in each block of each evaluation, as an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

WIDTH = 512  # halved on a node of 250 pixels, where the text is still read
PLOT_HEIGHT = 300
MARGIN = 12
FONT_SIZE = 22
LINE = 30
LABEL = 34  # of the block numbers, left of the plot

BACKGROUND, TEXT, EMPTY = "#181818", "#e8e8e8", "#2c2c2c"
# kind: (what the legend calls it, colour); told apart without colour vision, by brightness
COLOURS = {
    "sparse": ("sparse", "#1f6fb4"),
    "veda": ("veda", "#1f6fb4"),
    "sage": ("INT8, all tiles", "#f2a93b"),
    "native": ("native", "#9a9a9a"),
    "declined": ("left to ComfyUI", "#ff5470"),
}


@dataclass(frozen=True)
class RunMap:
    """What a run did.

    Attributes:
        title: Above the plot.
        kinds: Of each evaluation the kind that ran in each block, "" where attention was not
            called.
        steps: Of each evaluation its step, from 0.
    """

    title: str
    kinds: Sequence[Sequence[str]]
    steps: Sequence[int]


def draw(maps: Sequence[RunMap]) -> Image.Image:
    """One picture of some runs, one below the other; the same for the same runs."""
    parts = [_draw_run(run) for run in maps]
    picture = Image.new("RGB", (WIDTH, sum(part.height for part in parts)), BACKGROUND)
    top = 0
    for part in parts:
        picture.paste(part, (0, top))
        top += part.height
    return picture


def message(text: str) -> Image.Image:
    """A picture that says why there is nothing to draw."""
    font = ImageFont.load_default(FONT_SIZE)
    lines = _wrap(text, font, WIDTH - 2 * MARGIN)
    picture = Image.new("RGB", (WIDTH, 2 * MARGIN + LINE * len(lines)), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for idx, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + idx * LINE), line, TEXT, font)
    return picture


def _draw_run(run: RunMap) -> Image.Image:
    font = ImageFont.load_default(FONT_SIZE)
    counts = {kind: sum(list(column).count(kind) for column in run.kinds) for kind in COLOURS}
    legend = [(kind, counts[kind]) for kind in COLOURS if counts[kind]]
    title = _wrap(run.title, font, WIDTH - 2 * MARGIN)
    plot_top = MARGIN + LINE * len(title) + 4
    height = plot_top + PLOT_HEIGHT + LINE * (1 + len(legend)) + 2 * MARGIN
    picture = Image.new("RGB", (WIDTH, height), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for idx, line in enumerate(title):
        pen.text((MARGIN, MARGIN + idx * LINE), line, TEXT, font)
    _draw_plot(pen, run, font, plot_top)
    for idx, (kind, count) in enumerate(legend):
        name, colour = COLOURS[kind]
        y = plot_top + PLOT_HEIGHT + LINE * (1 + idx) + MARGIN
        pen.rectangle((MARGIN, y + 3, MARGIN + 20, y + 23), colour)
        pen.text((MARGIN + 32, y), f"{name}: {count} calls", TEXT, font)
    return picture


def _draw_plot(pen: ImageDraw.ImageDraw, run: RunMap, font, top: int) -> None:
    """A column an evaluation, a row a block; numbers of the first and last of both."""
    left, right, bottom = MARGIN + LABEL, WIDTH - MARGIN, top + PLOT_HEIGHT
    pen.rectangle((left, top, right - 1, bottom - 1), EMPTY)
    xs = _edges(left, right, len(run.kinds))
    for idx, column in enumerate(run.kinds):
        ys = _edges(top, bottom, len(column))
        # a gap where a step ends, if there is room for one
        is_last = idx + 1 == len(run.steps) or run.steps[idx + 1] != run.steps[idx]
        gap = 2 if is_last and xs[idx + 1] - xs[idx] > 6 else 1 if xs[idx + 1] - xs[idx] > 6 else 0
        for layer_idx, kind in enumerate(column):
            if kind:
                box = (xs[idx], ys[layer_idx], xs[idx + 1] - 1 - gap, ys[layer_idx + 1] - 2)
                pen.rectangle(box, COLOURS[kind][1])
    if not run.kinds:
        return
    last_block, last_step = len(run.kinds[0]) - 1, run.steps[-1] + 1
    pen.text((left - 8, top), "0", TEXT, font, anchor="rt")
    pen.text((left - 8, bottom), str(last_block), TEXT, font, anchor="rb")
    pen.text((left, bottom + 6), f"step {run.steps[0] + 1}", TEXT, font)
    pen.text(((left + right) // 2, bottom + 6), "rows: blocks", TEXT, font, anchor="ma")
    pen.text((right, bottom + 6), f"step {last_step}", TEXT, font, anchor="ra")


def _edges(start: int, stop: int, count: int) -> list[int]:
    """Where each of `count` equal parts begins, and the last one ends."""
    return [start + (stop - start) * idx // max(count, 1) for idx in range(count + 1)]


def _wrap(text: str, font, width: int) -> list[str]:
    """Lines of whole words that are no wider than that."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
