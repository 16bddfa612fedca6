"""The picture of Nox Report: each block of each evaluation has the colour of what ran there."""

import numpy as np
from PIL import ImageColor

from nodes import report_picture
from nodes.report_picture import BACKGROUND, COLOURS, EMPTY, RunMap


def colour_of(kind: str) -> tuple:
    return ImageColor.getrgb(COLOURS[kind][1] if kind else EMPTY)


def cells_of(picture, num_columns: int, num_rows: int) -> list[list[tuple]]:
    """The colour in the middle of each cell of the plot, which is as wide as the picture."""
    pixels = np.asarray(picture)
    is_drawn = (pixels != ImageColor.getrgb(BACKGROUND)).any(axis=2)
    rows = np.flatnonzero(is_drawn.mean(axis=1) > 0.8)
    columns = np.flatnonzero(is_drawn[rows].mean(axis=0) > 0.8)
    ys = rows[0] + (np.arange(num_rows) + 0.5) * (rows[-1] + 1 - rows[0]) / num_rows
    xs = columns[0] + (np.arange(num_columns) + 0.5) * (columns[-1] + 1 - columns[0]) / num_columns
    return [[tuple(pixels[int(y), int(x)].tolist()) for y in ys] for x in xs]


def test_every_cell_shows_its_call():
    kinds = [["sage", "sage", "native"], ["sage", "sparse", ""], ["sage", "veda", "declined"]]
    picture = report_picture.draw([RunMap("title", kinds, [0, 1, 2])])
    assert cells_of(picture, 3, 3) == [[colour_of(kind) for kind in column] for column in kinds]


def test_a_long_run_of_a_deep_model_still_fits():
    kinds = [["sage", *["sparse"] * 49]] * 100
    picture = report_picture.draw([RunMap("title", kinds, list(range(100)))])
    assert picture.width == report_picture.WIDTH
    columns = cells_of(picture, 100, 50)
    assert all(column == [colour_of(kind) for kind in kinds[0]] for column in columns)


def test_a_long_title_is_wrapped_and_not_cut():
    narrow = report_picture.draw([RunMap("word", [["sage"]], [0])])
    long = report_picture.draw([RunMap("word " * 60, [["sage"]], [0])])
    assert long.height > narrow.height
    assert long.width == narrow.width
    margin = np.asarray(long)[:, -report_picture.MARGIN :]
    assert (margin == ImageColor.getrgb(BACKGROUND)).all()


def test_the_same_runs_are_the_same_picture():
    runs = [RunMap("title", [["sage", "sparse"]] * 4, [0, 1, 2, 3])] * 2
    assert report_picture.draw(runs).tobytes() == report_picture.draw(runs).tobytes()
    assert report_picture.draw(runs).height == 2 * report_picture.draw(runs[:1]).height


def test_a_run_beyond_the_log_is_drawn_as_far_as_it_is_known():
    assert report_picture.draw([RunMap("title", [], [])]).width == report_picture.WIDTH
