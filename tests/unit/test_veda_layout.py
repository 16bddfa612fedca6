"""Veda layouts: padded tiles of one shape for each span, then global tiles in packed order."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nox_kernels.layout import (
    TileShape,
    least_padding_shape,
    power_of_two_shapes,
    tile_order,
    veda_layout,
)
from nox_kernels.sequence import Segment, Sequence, TokenGrid, t2va_sequence

EXAMPLES = settings(deadline=None, max_examples=80, derandomize=True)

# D7: tiles of every grid and shape that the search used.
TILE_COUNTS = {
    (37, 24, 42): "8x4x4 330, 2x8x8 342, 4x8x4 330, 8x8x2 315, 4x4x8 360, 8x2x8 360",
    (72, 24, 42): "8x4x4 594, 4x8x4 594, 2x8x8 648, 4x4x8 648, 8x2x8 648, 8x8x2 567",
    (102, 24, 42): "8x4x4 858, 4x8x4 858, 2x8x8 918, 8x8x2 819, 4x4x8 936, 8x2x8 936",
    (37, 24, 32): "2x8x8 228, 8x4x4 240, 4x8x4 240, 8x8x2 240, 4x4x8 240, 8x2x8 240",
    (102, 24, 32): "2x8x8 612, 8x4x4 624, 4x8x4 624, 8x8x2 624, 4x4x8 624, 8x2x8 624",
    (72, 24, 24): "2x8x8 324, 8x4x4 324, 4x8x4 324, 8x8x2 324, 4x4x8 324, 8x2x8 324",
}
COUNT_ROWS = [
    (grid, *entry.split()) for grid, line in TILE_COUNTS.items() for entry in line.split(", ")
]

# Everything that may stand before the video, in packed order; sizes are rows or a token grid.
PREFIX = (
    ("text", 13),
    ("cond", (1, 5, 7)),
    ("cond_audio", 6),
    ("ref_audio", 4),
    ("ref_img", (2, 3, 4)),
    ("ref_img", (1, 9, 2)),
    ("audio", 10),
)


def make_sequence(prefix, grid):
    """A sequence of (kind, rows or token grid) pairs and a video on `grid`."""
    segments, start = [], 0
    for kind, size in (*prefix, ("video", grid)):
        rows = size if isinstance(size, int) else math.prod(size)
        token_grid = None if isinstance(size, int) else TokenGrid(*size)
        segments.append(Segment(start, start + rows, kind, token_grid))
        start += rows
    return Sequence(tuple(segments), TokenGrid(*grid))


def shapes_of(num_tokens):
    """All power-of-two triples of a product, lexicographic."""
    powers = [2**n for n in range(num_tokens.bit_length())]
    return [s for s in itertools.product(powers, repeat=3) if math.prod(s) == num_tokens]


def count_tiles(grid, shape):
    return math.prod(math.ceil(extent / edge) for extent, edge in zip(grid, shape, strict=True))


def tightest(grid, num_tokens):
    """D3's shape for a condition, spelled out."""
    menu = shapes_of(num_tokens)
    fits = [s for s in menu if all(e <= g for e, g in zip(s, grid, strict=True))] or menu
    return min(fits, key=lambda s: (count_tiles(grid, s), max(s) / min(s), s))


def cut_span(start, grid, shape):
    """Row lists of a span's tiles, padded with -1 at the end: D3 as nested loops."""
    (t_all, h_all, w_all), (tt, th, tw) = grid, shape
    tiles = []
    for h0, w0, t0 in itertools.product(
        range(0, h_all, th), range(0, w_all, tw), range(0, t_all, tt)
    ):
        rows = [
            start + (t * h_all + h) * w_all + w
            for t in range(t0, min(t0 + tt, t_all))
            for h in range(h0, min(h0 + th, h_all))
            for w in range(w0, min(w0 + tw, w_all))
        ]
        tiles.append(rows + [-1] * (tt * th * tw - len(rows)))
    return tiles


def spell_out(sequence, shape, tile_conditions, tile):
    """(condition tiles, target tiles, global tiles) as lists of rows, -1 where empty."""
    tiled, loose = [], []
    for segment in sequence.segments[:-1]:
        if tile_conditions and segment.kind in ("cond", "ref_img"):
            tiled += cut_span(segment.start, segment.grid, tightest(segment.grid, tile))
        else:
            loose += range(segment.start, segment.stop)
    target = cut_span(sequence.video_start, sequence.token_grid, shape)
    loose += [-1] * (-len(loose) % tile)
    return tiled, target, [loose[at : at + tile] for at in range(0, len(loose), tile)]


@st.composite
def sequences(draw):
    """Any order of conditions H3 can pack, each with a grid of its own, before a small video."""
    extents = st.integers(1, 7)
    grid = (draw(st.integers(2, 7)), draw(extents), draw(extents))
    prefix = [("text", draw(st.integers(0, 30)))]
    for clip in draw(st.lists(st.integers(1, 3), max_size=2)):
        prefix.append(("cond", (clip, *grid[1:])))
        prefix += [("cond_audio", rows) for rows in draw(st.lists(st.integers(1, 9), max_size=1))]
    for image in draw(st.lists(st.tuples(extents, extents, extents), max_size=2)):
        prefix += [("ref_audio", rows) for rows in draw(st.lists(st.integers(1, 9), max_size=1))]
        prefix.append(("ref_img", image))
    prefix.append(("audio", draw(st.integers(0, 20))))
    return make_sequence(prefix, grid)


def test_there_are_36_shapes_of_128_tokens_in_lexicographic_order():
    shapes = power_of_two_shapes()
    assert len(shapes) == 36
    assert [tuple(shape) for shape in shapes] == shapes_of(128)
    assert [tuple(shape) for shape in power_of_two_shapes(8)] == shapes_of(8)


def test_the_last_tiles_of_an_axis_are_padded_to_whole_tiles():
    grid = TokenGrid(37, 24, 42)
    assert tile_order(grid, TileShape(1, 8, 16)).shape == (333, 128)
    assert tile_order(grid, TileShape(8, 4, 4)).shape == (330, 128)
    assert 330 * 128 == 40 * 24 * 44


def test_tiles_go_by_rows_of_height_then_width_and_time_fastest():
    order = tile_order(TokenGrid(4, 8, 16), TileShape(2, 4, 16))
    assert order.dtype == torch.int64
    assert order.tolist() == [
        [*range(first, first + 64), *range(first + 128, first + 192)] for first in (0, 256, 64, 320)
    ]


def test_rows_outside_the_grid_are_dropped_and_the_padding_comes_last():
    order = tile_order(TokenGrid(2, 4, 9), TileShape(4, 4, 8))
    assert (order >= 0).sum(1).tolist() == [64, 8]
    assert order[1].tolist() == [8, 17, 26, 35, 44, 53, 62, 71] + [-1] * 120


def test_a_grid_smaller_than_its_shape_is_a_prefix_of_one_tile():
    order = tile_order(TokenGrid(3, 4, 8), TileShape(4, 4, 8))
    assert order.tolist() == [[*range(96), *[-1] * 32]]


@pytest.mark.parametrize(("grid", "name", "count"), COUNT_ROWS)
def test_tile_counts_are_those_of_the_published_plans(grid, name, count):
    assert tile_order(TokenGrid(*grid), TileShape.parse(name)).shape == (int(count), 128)


@pytest.mark.parametrize(("grid", "name", "count"), COUNT_ROWS)
def test_a_portrait_grid_has_the_tile_counts_of_its_mirror(grid, name, count):
    t, h, w = grid
    shape = TileShape.parse(name)
    mirror = TileShape(shape.t, shape.w, shape.h)
    assert len(tile_order(TokenGrid(t, w, h), mirror)) == int(count)


@EXAMPLES
@given(st.tuples(*[st.integers(1, 20)] * 3), st.sampled_from(power_of_two_shapes()))
def test_every_tile_is_one_box_of_the_grid_with_its_tokens_first(grid, shape):
    order = tile_order(TokenGrid(*grid), shape)
    assert order.tolist() == cut_span(0, grid, shape)
    blocks = itertools.product(*(range(math.ceil(grid[axis] / shape[axis])) for axis in (1, 2, 0)))
    for row, (hb, wb, tb) in zip(order, blocks, strict=True):
        box = [
            min(edge, extent - block * edge)
            for block, edge, extent in zip((tb, hb, wb), shape, grid, strict=True)
        ]
        count = math.prod(box)
        assert count >= 1
        assert (row >= 0).tolist() == [True] * count + [False] * (128 - count)
    assert sorted(order[order >= 0].tolist()) == list(range(math.prod(grid)))


@pytest.mark.parametrize(
    ("grid", "name", "num_tiles"),
    [
        ((1, 24, 42), "1x8x16", 9),
        ((1, 42, 24), "1x16x8", 9),
        ((1, 24, 32), "1x8x16", 6),
        ((1, 64, 112), "1x8x16", 56),
        ((12, 24, 42), "4x8x4", 99),
        ((1, 6, 10), "1x8x16", 1),
    ],
)
def test_a_condition_takes_the_shape_with_the_least_padding(grid, name, num_tiles):
    shape = least_padding_shape(TokenGrid(*grid))
    assert str(shape) == name
    assert len(tile_order(TokenGrid(*grid), shape)) == num_tiles


@EXAMPLES
@given(st.tuples(*[st.integers(1, 40)] * 3), st.sampled_from([8, 128]))
def test_least_padding_follows_its_three_rules(grid, num_tokens):
    assert tuple(least_padding_shape(TokenGrid(*grid), num_tokens)) == tightest(grid, num_tokens)


@pytest.mark.parametrize("shape", power_of_two_shapes(), ids=str)
def test_text_and_audio_fill_global_tiles_behind_the_video(shape):
    sequence = make_sequence((("text", 100), ("audio", 50)), (7, 6, 10))
    layout = veda_layout(sequence, shape)
    assert sequence.num_rows == 570
    first = layout.first_tail_kv_tile
    assert first == 2 * count_tiles((7, 6, 10), shape) == 2 * layout.num_video_query_tiles
    assert layout.valid_count[first:].tolist() == [64, 64, 22, 0]
    rows = layout.slot_row[layout.slot_row >= 0]
    assert sorted(rows.tolist()) == list(range(570))
    assert layout.slot_row[64 * first :][:150].tolist() == list(range(150))


@pytest.mark.parametrize("tile_conditions", [False, True])
@pytest.mark.parametrize("shape", power_of_two_shapes(8), ids=str)
def test_tiled_conditions_come_first_in_packed_order_and_the_target_last(shape, tile_conditions):
    sequence = make_sequence(PREFIX, (4, 5, 7))
    layout = veda_layout(sequence, shape, tile_conditions=tile_conditions, query_tile=8, kv_tile=4)
    conditions, target, rest = spell_out(sequence, shape, tile_conditions, 8)
    assert layout.num_condition_tiles == len(conditions)
    assert bool(conditions) == tile_conditions
    assert layout.num_video_query_tiles == len(conditions) + len(target)
    assert layout.slot_row.view(-1, 8).tolist() == conditions + target + rest


def test_condition_tiles_have_a_shape_of_their_own():
    # A keyframe of 16:9 takes 9 tiles of 1x8x16 whatever shape its video has; with the video's
    # 8x4x4 it would take 66.
    keyframe = make_sequence((("text", 300), ("cond", (1, 24, 42)), ("audio", 40)), (7, 24, 42))
    layout = veda_layout(keyframe, TileShape(8, 4, 4), tile_conditions=True)
    assert layout.num_condition_tiles == 9
    assert layout.num_video_query_tiles == 9 + 66
    tokens = layout.slot_row[: 9 * 128]
    assert sorted(tokens[tokens >= 0].tolist()) == list(range(300, 1308))
    assert layout.num_query_tiles == 75 + 3  # 340 global rows


@EXAMPLES
@given(sequences(), st.sampled_from(power_of_two_shapes(8)), st.booleans())
def test_every_row_has_exactly_one_slot(sequence, shape, tile_conditions):
    layout = veda_layout(sequence, shape, tile_conditions=tile_conditions, query_tile=8, kv_tile=4)
    conditions, target, rest = spell_out(sequence, shape, tile_conditions, 8)
    tiles = conditions + target + rest
    assert layout.slot_row.view(-1, 8).tolist() == tiles
    assert layout.row_slot.shape == (sequence.num_rows,)
    slots = layout.row_slot.long()
    assert torch.equal(layout.slot_row.long()[slots], torch.arange(sequence.num_rows))
    assert int((layout.slot_row >= 0).sum()) == sequence.num_rows
    assert (layout.slot_row.dtype, layout.row_slot.dtype) == (torch.int32, torch.int32)


@EXAMPLES
@given(sequences(), st.sampled_from(power_of_two_shapes(8)), st.booleans())
def test_counts_of_a_layout_are_those_of_its_tiles(sequence, shape, tile_conditions):
    layout = veda_layout(sequence, shape, tile_conditions=tile_conditions, query_tile=8, kv_tile=4)
    conditions, target, rest = spell_out(sequence, shape, tile_conditions, 8)
    num_video, num_all = len(conditions) + len(target), len(conditions + target + rest)
    counts = [sum(row >= 0 for row in tile) for tile in conditions + target + rest]
    halves = [half for v in counts for half in (min(4, v), max(0, v - 4))]
    assert layout.valid_count.dtype == torch.int32
    assert layout.valid_count.tolist() == halves
    # An own tile is never empty, so a routed query always has a key.
    assert min(counts) >= 1
    assert counts[num_video:-1] == [8] * max(0, len(rest) - 1)
    assert (layout.query_tile, layout.kv_tile, layout.kv_per_query_tile) == (8, 4, 2)
    assert (layout.num_query_tiles, layout.num_kv_tiles) == (num_all, 2 * num_all)
    assert layout.num_condition_tiles == len(conditions)
    assert layout.num_video_query_tiles == num_video
    assert layout.first_tail_kv_tile == 2 * num_video
    assert layout.num_real_kv_tiles == sum(half > 0 for half in halves)
    assert layout.num_video_kv_tiles == sum(half > 0 for half in halves[: 2 * num_video])


@pytest.mark.parametrize("name", ["8x4x4", "2x8x8", "4x8x4", "8x8x2", "4x4x8", "8x2x8"])
def test_a_text_request_has_its_published_tiles_and_eight_global_ones(name):
    # 594 text and 414 audio rows: seven full global tiles and one of 112.
    layout = veda_layout(t2va_sequence(1344, 768, 124, 594), TileShape.parse(name))
    counts = layout.valid_count.view(-1, 2).sum(1)
    expected = {"8x4x4": 330, "2x8x8": 342, "4x8x4": 330, "8x8x2": 315, "4x4x8": 360, "8x2x8": 360}
    assert layout.num_condition_tiles == 0
    assert layout.num_video_query_tiles == expected[name]
    assert int(counts[: expected[name]].sum()) == 37296
    assert counts[expected[name] :].tolist() == [128] * 7 + [112]
