"""Layout: where every packed row sits in tile order, for raster, windows and packed order."""

import pytest
import torch

from nox_kernels import reference
from nox_kernels.errors import NoxError
from nox_kernels.layout import (
    KV_TILE,
    MENU,
    QUERY_TILE,
    TileShape,
    make_layout,
    packed_layout,
    raster_layout,
    window_layout,
    window_order,
)
from nox_kernels.sequence import Segment, Sequence, TokenGrid, t2va_sequence

GRIDS = [(37, 24, 42), (37, 15, 27), (37, 11, 19), (107, 43, 24), (2, 1, 1), (12, 28, 22)]
GRIDS += [(3, 4, 5)]

# The menu, in its fixed order; a table file stores these names.
MENU_NAMES = "raster 4x8x4 4x4x8 8x4x4 2x8x8 8x8x2 8x2x8 1x8x16 1x16x8 2x4x16 2x16x4 16x4x2 16x2x4"
WINDOWS = MENU_NAMES.split()[1:]

TAIL = (("text", 37), ("cond", 12), ("cond_audio", 6), ("audio", 22))


def to_tiles(layout, x, tile):
    """[H, S, D] -> [H, N, tile, D], as the pre-pass gathers."""
    return reference.to_tiles(x, layout.slot_row, tile)


def to_rows(layout, tiles):
    """[H, N, tile, D] -> [H, S, D] in packed order."""
    return tiles.flatten(1, 2)[:, layout.row_slot.long()]


def make_sequence(grid, tail=TAIL):
    """A sequence with the given (kind, rows) before a video segment on `grid`."""
    segments, start = [], 0
    for kind, rows in (*tail, ("video", grid[0] * grid[1] * grid[2])):
        segments.append(Segment(start, start + rows, kind))
        start += rows
    return Sequence(segments=tuple(segments), token_grid=TokenGrid(*grid))


def cut_windows(grid, shape):
    """Token ids window by window, cut out of a box: (complete windows, incomplete windows)."""
    box = torch.arange(grid[0] * grid[1] * grid[2]).view(grid)
    complete, incomplete = [], []
    for t in range(0, grid[0], shape[0]):
        for h in range(0, grid[1], shape[1]):
            for w in range(0, grid[2], shape[2]):
                window = box[t : t + shape[0], h : h + shape[1], w : w + shape[2]]
                fits = tuple(window.shape) == tuple(shape)
                (complete if fits else incomplete).append(window.flatten())
    return complete, incomplete


def shape_of(name):
    return tuple(int(part) for part in name.split("x"))


def test_tiles_are_128_queries_and_64_keys():
    assert (QUERY_TILE, KV_TILE) == (128, 64)


def test_the_menu_holds_thirteen_names_in_fixed_order():
    assert tuple(MENU) == tuple(MENU_NAMES.split())


@pytest.mark.parametrize("name", WINDOWS)
def test_a_tile_shape_reads_and_writes_its_name(name):
    shape = TileShape.parse(name)
    assert tuple(shape) == shape_of(name)
    assert str(shape) == name
    assert shape.t * shape.h * shape.w == 128


@pytest.mark.parametrize(
    "text", ["", "raster", "4x8", "4x8x4x1", "axbxc", "4x8x", "0x8x4", "4,8,4"]
)
def test_a_name_that_is_no_shape_is_refused(text):
    with pytest.raises(NoxError):
        TileShape.parse(text)


def test_complete_windows_come_first_then_the_cut_ones():
    # N1: grid (3, 4, 5), window (2, 2, 2).
    expected = """
        0 1 5 6 20 21 25 26 | 2 3 7 8 22 23 27 28 | 10 11 15 16 30 31 35 36 |
        12 13 17 18 32 33 37 38 | 4 9 24 29 | 14 19 34 39 | 40 41 45 46 | 42 43 47 48 | 44 49 |
        50 51 55 56 | 52 53 57 58 | 54 59
    """
    order = window_order(TokenGrid(3, 4, 5), TileShape(2, 2, 2))
    assert order.dtype == torch.int64
    assert order.tolist() == [int(token) for token in expected.replace("|", " ").split()]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_window_order_is_a_bijection_that_walks_windows(grid, name):
    order = window_order(TokenGrid(*grid), TileShape(*shape_of(name)))
    assert torch.equal(order.sort().values, torch.arange(grid[0] * grid[1] * grid[2]))
    complete, incomplete = cut_windows(grid, shape_of(name))
    assert torch.equal(order, torch.cat(complete + incomplete))


def test_a_window_larger_than_the_grid_keeps_natural_order():
    # 4x8x4 on (2, 1, 1) and 16x16x16 on (3, 4, 5): one incomplete window holds everything.
    assert window_order(TokenGrid(2, 1, 1), TileShape(4, 8, 4)).tolist() == [0, 1]
    assert window_order(TokenGrid(3, 4, 5), TileShape(16, 16, 16)).tolist() == list(range(60))


@pytest.mark.parametrize(
    ("name", "num_complete"),
    [("4x8x4", 270), ("4x4x8", 270), ("2x8x8", 270), ("8x8x2", 252), ("8x4x4", 240)],
)
def test_every_complete_window_is_exactly_one_query_tile(name, num_complete):
    # 16:9, T = 37: complete windows of 292 query tiles.
    grid, shape = (37, 24, 42), shape_of(name)
    layout = window_layout(make_sequence(grid), TileShape(*shape))
    token = layout.slot_row.view(-1, 128)[: layout.num_video_query_tiles].long() - 77
    assert layout.num_video_query_tiles == 292
    t, h, w = token // (24 * 42), token // 42 % 24, token % 42
    for tile_idx in range(num_complete):
        for axis, extent in zip((t, h, w), shape, strict=True):
            low = int(axis[tile_idx].min())
            assert low % extent == 0
            assert sorted(set(axis[tile_idx].tolist())) == list(range(low, low + extent))
        assert len(set(token[tile_idx].tolist())) == 128
    corner = [int(axis[num_complete].max() - axis[num_complete].min()) + 1 for axis in (t, h, w)]
    assert tuple(corner) != shape


@pytest.mark.parametrize(
    ("name", "half"), [("4x8x4", (2, 8, 4)), ("2x8x8", (1, 8, 8)), ("1x8x16", (1, 4, 16))]
)
def test_the_two_kv_tiles_of_a_complete_window_are_its_halves(name, half):
    # Halves along t, or along h when the window is one frame thick.
    layout = window_layout(make_sequence((37, 24, 42)), TileShape(*shape_of(name)))
    token = layout.slot_row.view(-1, 64)[:400].long() - 77
    for axis, extent in zip((token // 1008, token // 42 % 24, token % 42), half, strict=True):
        assert torch.all(axis.amax(dim=1) - axis.amin(dim=1) + 1 == extent)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_all_layouts_have_equal_tile_counts(grid):
    sequence = make_sequence(grid)
    num_tokens, num_tail = grid[0] * grid[1] * grid[2], 77
    num_query_tiles = -(-num_tokens // 128)
    for name in MENU_NAMES.split():
        layout = make_layout(sequence, name)
        assert layout.name == name
        assert layout.query_tile == 128
        assert layout.kv_tile == 64
        assert layout.num_video_query_tiles == num_query_tiles
        assert layout.num_video_kv_tiles == -(-num_tokens // 64)
        assert layout.num_query_tiles == num_query_tiles + -(-num_tail // 128)
        assert layout.num_kv_tiles == 2 * layout.num_query_tiles
        assert layout.slot_row.numel() == 128 * layout.num_query_tiles
        assert layout.num_video_query_tiles == num_query_tiles
        assert layout.first_tail_kv_tile == 2 * num_query_tiles


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["raster", "4x8x4", "1x8x16", "16x2x4"])
def test_slots_hold_video_first_then_the_tail_in_packed_order(grid, name):
    layout = make_layout(make_sequence(grid), name)
    num_tokens, num_tail = grid[0] * grid[1] * grid[2], 77
    if name == "raster":
        order = torch.arange(num_tokens)
    else:
        complete, incomplete = cut_windows(grid, shape_of(name))
        order = torch.cat(complete + incomplete)
    expected = torch.full((layout.slot_row.numel(),), -1)
    expected[:num_tokens] = num_tail + order
    tail_start = 128 * -(-num_tokens // 128)
    expected[tail_start : tail_start + num_tail] = torch.arange(num_tail)
    assert torch.equal(layout.slot_row.long(), expected)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", MENU_NAMES.split())
def test_slot_row_and_row_slot_are_inverse(grid, name):
    layout = make_layout(make_sequence(grid), name)
    num_rows = grid[0] * grid[1] * grid[2] + 77
    assert layout.row_slot.shape == (num_rows,)
    slots = layout.row_slot.long()
    assert torch.equal(layout.slot_row.long()[slots], torch.arange(num_rows))
    assert int((layout.slot_row >= 0).sum()) == num_rows
    assert int(layout.slot_row.min()) >= -1


def test_slots_rows_and_counts_are_32_bit():
    layout = raster_layout(make_sequence((3, 4, 5)))
    assert layout.valid_count.dtype == torch.int32
    assert layout.slot_row.dtype == torch.int32
    assert layout.row_slot.dtype == torch.int32


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["raster", "8x8x2"])
def test_valid_count_counts_rows_that_come_first_in_their_tile(grid, name):
    layout = make_layout(make_sequence(grid), name)
    assert layout.valid_count.shape == (layout.num_kv_tiles,)
    tiles = layout.slot_row.view(-1, 64).tolist()
    for rows, count in zip(tiles, layout.valid_count.tolist(), strict=True):
        assert all(row >= 0 for row in rows[:count])
        assert all(row == -1 for row in rows[count:])


@pytest.mark.parametrize("name", ["raster", "4x8x4", "8x8x2"])
def test_the_short_official_clip_has_one_empty_kv_tile_before_its_tail(name):
    # N3: N = 37296, 292 query tiles, 583 KV tiles; tile 582 holds 48 rows, tile 583 none.
    layout = make_layout(t2va_sequence(1344, 768, 124, 594), name)
    assert (layout.num_video_query_tiles, layout.num_video_kv_tiles) == (292, 583)
    assert layout.valid_count[581:585].tolist() == [64, 48, 0, 64]
    assert layout.first_tail_kv_tile == 584
    assert layout.row_slot[0] == 128 * 292
    assert int((layout.valid_count > 0).sum()) == 599
    # 1008 tail rows: 15 full tiles and one with 48.
    assert layout.valid_count[584:].tolist() == [64] * 15 + [48]


def test_no_kv_tile_is_empty_when_the_last_query_tile_is_more_than_half_full():
    layout = raster_layout(make_sequence((2, 8, 12), tail=(("text", 128),)))  # 192 tokens
    assert layout.valid_count.tolist() == [64, 64, 64, 0, 64, 64]
    layout = raster_layout(make_sequence((1, 13, 15), tail=(("text", 65),)))  # 195 tokens
    assert layout.valid_count.tolist() == [64, 64, 64, 3, 64, 1]


def test_a_sequence_without_a_tail_has_video_tiles_only():
    layout = raster_layout(make_sequence((3, 4, 5), tail=()))
    assert layout.num_query_tiles == layout.num_video_query_tiles == 1
    assert layout.num_kv_tiles == 2
    assert layout.valid_count.tolist() == [60, 0]
    assert tuple(layout.audio_query_tiles) == ()


def test_tile_sizes_are_parameters():
    sequence = make_sequence((3, 4, 5), tail=(("text", 9), ("audio", 6)))
    for layout in (
        raster_layout(sequence, query_tile=8, kv_tile=4),
        window_layout(sequence, TileShape(2, 2, 2), query_tile=8, kv_tile=4),
        make_layout(sequence, "2x2x2", query_tile=8, kv_tile=4),
    ):
        assert (layout.query_tile, layout.kv_tile) == (8, 4)
        assert (layout.num_video_query_tiles, layout.num_video_kv_tiles) == (8, 15)
        assert (layout.num_query_tiles, layout.num_kv_tiles) == (10, 20)
        assert (layout.num_video_query_tiles, layout.first_tail_kv_tile) == (8, 16)
        assert layout.valid_count.tolist() == [4] * 15 + [0] + [4, 4, 4, 3]
        assert tuple(layout.audio_query_tiles) == (9,)


@pytest.mark.parametrize(
    "tail",
    [
        (("text", 594), ("audio", 414)),
        (("text", 128), ("audio", 128)),
        (("text", 127), ("audio", 2)),
        (("text", 128), ("cond", 100), ("cond_audio", 90), ("audio", 60)),
        (("text", 5), ("ref_audio", 300), ("ref_img", 140), ("audio", 1)),
        (("text", 5), ("ref_audio", 300), ("cond_audio", 300)),
    ],
)
@pytest.mark.parametrize("name", ["raster", "4x8x4"])
def test_audio_query_tiles_are_those_with_a_target_audio_row(tail, name):
    layout = make_layout(make_sequence((5, 9, 11), tail=tail), name)  # 495 tokens, 4 query tiles
    kinds = [kind for kind, rows in tail for _ in range(rows)]
    expected = [
        4 + tile_idx
        for tile_idx in range(-(-len(kinds) // 128))
        if "audio" in kinds[128 * tile_idx : 128 * (tile_idx + 1)]
    ]
    assert [int(tile_idx) for tile_idx in layout.audio_query_tiles] == expected


def test_audio_tiles_of_the_benchmark_shape_are_the_last_four():
    # 594 text rows, then 414 audio rows: tail positions 594..1007 are tiles 4..7 of the tail.
    layout = raster_layout(t2va_sequence(1344, 768, 124, 594))
    assert [int(tile_idx) for tile_idx in layout.audio_query_tiles] == [296, 297, 298, 299]


@pytest.mark.parametrize("name", ["raster", "4x8x4", "2x4x16"])
@pytest.mark.parametrize("tile", [64, 128])
def test_rows_come_back_unchanged_and_empty_slots_are_zero(name, tile):
    layout = make_layout(make_sequence((7, 9, 11)), name)
    x = torch.randn(3, 7 * 9 * 11 + 77, 6, generator=torch.Generator().manual_seed(0))
    tiles = to_tiles(layout, x, tile)
    assert tiles.shape == (3, layout.slot_row.numel() // tile, tile, 6)
    flat = tiles.reshape(3, -1, 6)
    for slot, row in enumerate(layout.slot_row.tolist()):
        expected = x[:, row] if row >= 0 else torch.zeros(3, 6)
        assert torch.equal(flat[:, slot], expected)
    assert torch.equal(to_rows(layout, tiles), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strided_views_of_a_fused_buffer_pack_like_copies(dtype):
    layout = make_layout(make_sequence((7, 9, 11)), "4x8x4")
    num_rows = 7 * 9 * 11 + 77
    fused = torch.randn(num_rows, 3, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for part in range(3):
        view = fused[:, part].transpose(0, 1)  # [H, S, D], row stride 48
        assert not view.is_contiguous()
        tiles = to_tiles(layout, view, 128)
        assert tiles.dtype == dtype
        assert torch.equal(tiles, to_tiles(layout, view.contiguous(), 128))
        assert torch.equal(to_rows(layout, tiles), view)


def test_rows_come_back_from_a_strided_tile_tensor():
    layout = make_layout(make_sequence((7, 9, 11)), "4x4x8")
    x = torch.randn(2, 7 * 9 * 11 + 77, 4, generator=torch.Generator().manual_seed(2))
    tiles = to_tiles(layout, x, 64)
    strided = tiles.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    assert not strided.is_contiguous()
    assert torch.equal(to_rows(layout, strided), x)


@pytest.mark.parametrize("name", ["raster", "8x4x4"])
def test_nan_in_empty_slots_never_reaches_a_row(name):
    layout = make_layout(make_sequence((7, 9, 11)), name)
    x = torch.randn(2, 7 * 9 * 11 + 77, 4, generator=torch.Generator().manual_seed(3))
    tiles = to_tiles(layout, x, 128).clone()
    empty = (layout.slot_row < 0).view(-1, 128)
    assert bool(empty.any())
    tiles[:, empty] = float("nan")
    assert torch.equal(to_rows(layout, tiles), x)


def test_nan_in_rows_never_reaches_an_empty_slot():
    layout = raster_layout(make_sequence((7, 9, 11)))
    tiles = to_tiles(layout, torch.full((1, 7 * 9 * 11 + 77, 4), float("nan")), 64)
    empty = (layout.slot_row < 0).view(-1, 64)
    assert torch.equal(tiles[:, empty], torch.zeros(1, int(empty.sum()), 4))


def test_small_tiles_round_trip():
    sequence = make_sequence((3, 4, 5), tail=(("text", 9), ("audio", 6)))
    layout = window_layout(sequence, TileShape(2, 2, 2), query_tile=8, kv_tile=4)
    x = torch.arange(75.0)[None, :, None]
    tiles = to_tiles(layout, x, 8)
    # First complete window of N1, behind 15 tail rows.
    assert tiles[0, 0, :, 0].tolist() == [15, 16, 20, 21, 35, 36, 40, 41]
    assert tiles[0, 8, :, 0].tolist() == list(range(8))
    assert tiles[0, 9, :, 0].tolist() == [8, 9, 10, 11, 12, 13, 14, 0]
    assert torch.equal(to_rows(layout, tiles), x)


def test_packed_layout_keeps_natural_order():
    sequence = make_sequence((7, 9, 11))  # 770 rows
    layout = packed_layout(sequence)
    assert layout.num_query_tiles == 7
    assert layout.num_kv_tiles == 14
    assert layout.slot_row.tolist() == [*range(770), *[-1] * 126]
    assert layout.row_slot.tolist() == list(range(770))
    assert layout.valid_count.tolist() == [64] * 12 + [2, 0]
    x = torch.randn(2, 770, 4, generator=torch.Generator().manual_seed(4))
    tiles = to_tiles(layout, x, 128)
    assert torch.equal(tiles.reshape(2, -1, 4)[:, :770], x)
    assert torch.equal(to_rows(layout, tiles), x)


def test_make_layout_refuses_an_unknown_name_by_name():
    with pytest.raises(NoxError, match="hexagons"):
        make_layout(make_sequence((7, 9, 11)), "hexagons")


def test_make_layout_builds_what_the_two_makers_build():
    sequence = make_sequence((7, 9, 11))
    assert torch.equal(make_layout(sequence, "raster").slot_row, raster_layout(sequence).slot_row)
    window = window_layout(sequence, TileShape(2, 8, 8))
    assert window.name == "2x8x8"
    assert torch.equal(make_layout(sequence, "2x8x8").slot_row, window.slot_row)


def test_a_layout_moves_to_another_device_whole():
    layout = make_layout(make_sequence((7, 9, 11)), "4x8x4")
    moved = layout.to(torch.device("meta"))
    for field in ("slot_row", "row_slot", "valid_count"):
        assert getattr(moved, field).device.type == "meta"
        assert getattr(moved, field).dtype == getattr(layout, field).dtype
        assert getattr(moved, field).shape == getattr(layout, field).shape
        assert getattr(layout, field).device.type == "cpu"
    assert moved.name == layout.name
    assert moved.num_kv_tiles == layout.num_kv_tiles
    assert moved.num_video_kv_tiles == layout.num_video_kv_tiles
    assert tuple(moved.audio_query_tiles) == tuple(layout.audio_query_tiles)
    assert torch.equal(layout.to("cpu").slot_row, layout.slot_row)
