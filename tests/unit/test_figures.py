"""Figures: the route picture shows what the mask says."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nox_kernels import figures
from nox_kernels.layout import make_layout
from nox_kernels.sequence import TokenGrid, t2va_sequence

ROOT = Path(figures.__file__).resolve().parent.parent
SEQUENCE = t2va_sequence(256, 256, 22, 9)  # 7 x 8 x 8 tokens
GRID = SEQUENCE.token_grid


def mask_of(layout, kept):
    mask = torch.zeros(layout.num_kv_tiles, dtype=torch.bool)
    mask[kept] = True
    return mask


def test_raster_tiles_cover_consecutive_tokens():
    layout = make_layout(SEQUENCE, "raster")
    states = figures.token_states(layout, mask_of(layout, [0, 2, 3]), 1, GRID).flatten()
    expected = np.zeros(GRID.num_tokens)
    expected[:64] = 1  # tile 0; tiles 2 and 3 are the query tile's own
    expected[128:256] = 2
    assert (states == expected).all()


def test_a_window_is_a_box_of_tokens():
    layout = make_layout(SEQUENCE, "4x8x4")
    states = figures.token_states(layout, mask_of(layout, [2]), 0, GRID)
    expected = np.zeros(GRID)
    expected[:4, :8, :4] = 2
    expected[:2, :8, 4:] = 1  # half of the second window
    assert (states == expected).all()


def test_tail_tiles_do_not_show_as_tokens():
    layout = make_layout(SEQUENCE, "4x8x4")
    tail = list(range(layout.first_tail_kv_tile, layout.num_kv_tiles))
    assert not figures.token_states(layout, mask_of(layout, tail), -1, GRID).any()


def test_the_title_counts_kept_and_forced_tiles():
    layout = make_layout(SEQUENCE, "4x8x4")
    kept = [0, 1, 5, layout.first_tail_kv_tile, layout.first_tail_kv_tile + 1]
    title = figures.route_title(layout, mask_of(layout, kept), 0)
    assert f"query tile 1 of {layout.num_query_tiles}" in title
    assert f": 5 of {layout.num_real_kv_tiles} KV tiles" in title
    assert "2 of them" in title


@pytest.mark.parametrize("grid", [TokenGrid(1, 1, 1), TokenGrid(7, 8, 8), TokenGrid(102, 24, 42)])
def test_the_mosaic_holds_every_token_once(grid):
    states = np.random.default_rng(0).integers(0, 3, grid)
    mosaic, corners = figures._mosaic(states)
    assert len(set(corners)) == grid.t
    for value, colour in enumerate((figures.SKIPPED, figures.KEPT, figures.SOURCE)):
        assert (mosaic == colour).all(axis=2).sum() == (states == value).sum()


def test_the_picture_has_all_three_colours_and_is_saved(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    layout = make_layout(SEQUENCE, "4x8x4")
    path = tmp_path / "route.png"
    picture = figures.route_picture(layout, mask_of(layout, [2, 5]), 0, GRID, str(path))
    pixels = np.asarray(picture).reshape(-1, 3)
    for colour in (figures.SKIPPED, figures.KEPT, figures.SOURCE):
        assert (pixels == colour).all(axis=1).mean() > 0.01
    assert image.open(path).size == picture.size


def test_drawing_does_not_touch_pyplot():
    import subprocess
    import sys

    program = (
        "import sys, torch;"
        "from nox_kernels import figures; assert 'matplotlib' not in sys.modules;"
        "from nox_kernels.layout import make_layout;"
        "from nox_kernels.sequence import t2va_sequence;"
        "s = t2va_sequence(64, 64, 5, 1); layout = make_layout(s, 'raster');"
        "mask = torch.ones(layout.num_kv_tiles, dtype=torch.bool);"
        "figures.route_picture(layout, mask, 0, s.token_grid);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
