"""Veda's budget: how many tiles each query tile keeps, and which rows get one more."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nox_kernels.layout import TileShape, veda_layout
from nox_kernels.route import keep_best
from nox_kernels.sequence import Segment, Sequence, TokenGrid
from nox_kernels.veda.budget import keep_counts, per_row, split, veda_rule
from nox_kernels.veda.bundle_info import Budget

EXAMPLES = settings(deadline=None, max_examples=120, derandomize=True)

# D7 at ratio 0.1: grid, ideal tiles, (shapes, tiles, per_row, rows with k_hi), total kept.
TABLE = [
    ((37, 24, 42), 292, "8x4x4 4x8x4", 330, 25.837576, 276, 8526),
    ((37, 24, 42), 292, "2x8x8", 342, 24.930994, 318, 8526),
    ((37, 24, 42), 292, "8x8x2", 315, 27.067937, 21, 8526),
    ((37, 24, 42), 292, "4x4x8 8x2x8", 360, 23.684444, 246, 8526),
    ((72, 24, 42), 567, "8x4x4 4x8x4", 594, 54.122727, 72, 32148),
    ((72, 24, 42), 567, "2x8x8 4x4x8 8x2x8", 648, 49.6125, 396, 32148),
    ((72, 24, 42), 567, "8x8x2", 567, 56.7, 396, 32148),
    ((102, 24, 42), 804, "8x4x4 4x8x4", 858, 75.339860, 291, 64641),
    ((102, 24, 42), 804, "2x8x8", 918, 70.415686, 381, 64641),
    ((102, 24, 42), 804, "8x8x2", 819, 78.927473, 759, 64641),
    ((102, 24, 42), 804, "4x4x8 8x2x8", 936, 69.061538, 57, 64641),
    ((37, 24, 32), 222, "2x8x8", 228, 21.615789, 140, 4928),
    ((37, 24, 32), 222, "8x4x4 4x8x4 8x8x2 4x4x8 8x2x8", 240, 20.535, 128, 4928),
    ((102, 24, 32), 612, "2x8x8", 612, 61.2, 122, 37454),
    ((102, 24, 32), 612, "8x4x4 4x8x4 8x8x2 4x4x8 8x2x8", 624, 60.023077, 14, 37454),
    ((72, 24, 24), 324, "8x4x4 4x8x4 2x8x8 8x8x2 4x4x8 8x2x8", 324, 32.4, 129, 10497),
]
TABLE_ROWS = [(row[0], name, *row[3:]) for row in TABLE for name in row[2].split()]

# D8 10, also used by 11 and 13; and D8 12.
FOUR = [[0.1, 0.9, 0.2, 0.3], [0.5, 0.1, 0.9, 0.2], [0.9, 0.1, 0.2, 0.3], [0.2, 0.8, 0.1, 0.0]]
FIVE = [
    [0.1, 0.6, 0.9, 0.2, 0.8],
    [0.7, 0.1, 0.3, 0.4, 0.5],
    [0.9, 0.2, 0.1, 0.4, 0.3],
    [0.3, 0.8, 0.9, 0.1, 0.2],
    [0.6, 0.5, 0.1, 0.7, 0.2],
]


def tiles(value):
    return Budget("tiles", value)


def ratio(value):
    return Budget("ratio", value)


def make_rule(valid, num_conditions, num_video, target, conditions=None, tile=128):
    return veda_rule(
        torch.tensor(valid),
        num_condition_tiles=num_conditions,
        num_video_tiles=num_video,
        target=target,
        conditions=conditions,
        tile=tile,
    )


def kept_sets(rule, scores, valid, tile=128):
    """For each row of `scores` [Nq, N], the tiles kept; no rule keeps every real tile."""
    counts = torch.tensor(valid)
    real = torch.stack([counts > 0, counts > tile // 2], dim=1)  # [N, 2] halves with a row
    if rule is None:
        halves = real.expand(len(scores), -1, -1)
    else:
        assert torch.equal(rule.is_real, real.flatten())
        mask = keep_best(torch.tensor(scores)[None], rule).mask(2 * len(valid))
        halves = mask[0].view(len(scores), len(valid), 2)
    kept = halves.any(dim=-1)
    assert torch.equal(halves, kept[:, :, None] & real), "a tile is kept with all its real halves"
    return [set(row.nonzero().flatten().tolist()) for row in kept]


def count_by_d5(budget, valid, num_rows, tile):
    """Tiles each of `num_rows` query tiles may keep in a block of tiles: D5.3 and D5.4."""
    columns = len(valid)
    share = budget.value
    if budget.kind == "ratio":
        share = budget.value * math.ceil(sum(valid) / tile) ** 2 / columns
    if share >= columns or (budget.kind == "ratio" and budget.value >= 1):
        return [columns] * num_rows
    low = min(max(math.floor(share), 1), columns)
    high, part = min(low + 1, columns), round(min(max(share - low, 0.0), 1.0), 12)
    more = [math.floor((r + 1) * part) > math.floor(r * part) for r in range(num_rows)]
    return [high if is_more else low for is_more in more]


def kept_by_d5(scores, valid, num_conditions, num_video, target, conditions, tile):
    """D5, one row and one block at a time: the sets of tiles kept."""
    every = {j for j, count in enumerate(valid) if count}
    blocks = [(0, num_conditions, conditions), (num_conditions, num_video, target)]
    rows = [{j for j in every if j >= num_video} for _ in range(num_video)]
    for start, stop, budget in blocks:
        counts = count_by_d5(budget, valid[start:stop], num_video, tile) if stop > start else []
        for i, count in enumerate(counts):
            rank = {j: scores[i][j] if valid[j] else -math.inf for j in range(start, stop)}
            rank |= {i: math.inf} if start <= i < stop else {}
            rows[i] |= set(sorted(rank, key=lambda j: (-rank[j], j))[:count]) & every
    return rows + [every] * (len(valid) - num_video)


@st.composite
def problems(draw, smallest_count=1):
    """(scores, valid, n_ref, n_video, target, conditions) on tiles of 8, scores full of ties."""
    num_conditions = draw(st.integers(0, 6))
    num_target = draw(st.integers(1, 14))
    num_global = draw(st.integers(1 - min(1, smallest_count), 3))  # one tile has a row for sure
    num_video, num_all = num_conditions + num_target, num_conditions + num_target + num_global
    counts = st.integers(smallest_count, 8)
    valid = draw(st.lists(counts, min_size=num_video, max_size=num_video))
    valid += [8] * (num_global - 1) + [draw(st.integers(1, 8))] * min(1, num_global)
    budgets = st.one_of(
        st.floats(0.01, 1.3).map(ratio),
        st.sampled_from([0.1, 0.15, 0.3, 1.0]).map(ratio),
        st.floats(0.2, 16.0).map(tiles),
        st.integers(1, 8).map(tiles),
    )
    conditions = draw(budgets) if num_conditions else None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    levels = draw(st.sampled_from([1, 3, 1000]))
    scores = torch.randint(-levels, levels, (num_all, num_all), generator=generator).float()
    return scores.tolist(), valid, num_conditions, num_video, draw(budgets), conditions


def test_a_ratio_spends_the_tiles_an_unpadded_grid_would_have():
    assert per_row(ratio(0.1), 37296, 330) == pytest.approx(8526.4 / 330, rel=1e-14)
    assert per_row(tiles(7), 37296, 330) == 7.0
    assert per_row(tiles(7.25), 1, 3) == 7.25
    # 9 tokens need two ideal tiles of 8.
    assert per_row(ratio(0.5), 9, 4, tile=8) == pytest.approx(0.5 * 4 / 4)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (2.3, (2, 3, 0.3)),
        (0.4, (1, 2, 0)),
        (5, (5, 6, 0)),
        (63.5, (63, 64, 0.5)),
        (64, (64, 64, 0)),
        (70.25, (64, 64, 0)),
    ],
)
def test_a_share_splits_into_two_whole_budgets_and_a_fraction(share, expected):
    assert tuple(split(share, 64)) == expected


@pytest.mark.parametrize(
    ("fraction", "num_rows", "rows"),
    [(0.3, 10, [3, 6, 9]), (0.25, 8, [3, 7]), (0.5, 4, [1, 3]), (0.0, 5, [])],
)
def test_rows_with_one_more_tile_are_spread_evenly(fraction, num_rows, rows):
    counts = keep_counts(2 + fraction, 64, num_rows)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [3 if row in rows else 2 for row in range(num_rows)]


def test_a_fraction_is_rounded_before_it_is_spread():
    # 2.3 - 2 is a hair under 0.3 in fp64 and would lose the last of 120 extras.
    assert (
        sum(math.floor((r + 1) * (2.3 - 2)) > math.floor(r * (2.3 - 2)) for r in range(400)) < 120
    )
    assert int(keep_counts(2.3, 64, 400).sum()) == 800 + 120


@pytest.mark.parametrize(("grid", "name", "num_tiles", "share", "num_more", "total"), TABLE_ROWS)
def test_budgets_at_ten_percent_are_the_published_ones(
    grid, name, num_tiles, share, num_more, total
):
    video = Sequence((Segment(0, math.prod(grid), "video", TokenGrid(*grid)),), TokenGrid(*grid))
    layout = veda_layout(video, TileShape.parse(name))
    assert layout.num_query_tiles == num_tiles
    value = per_row(ratio(0.1), math.prod(grid), num_tiles)
    assert value == pytest.approx(share, abs=5.1e-7)
    low, high, _ = split(value, num_tiles)
    counts = keep_counts(value, num_tiles, num_tiles)
    assert (low, high) == (math.floor(share), math.floor(share) + 1)
    assert int((counts == high).sum()) == num_more
    assert set(counts.tolist()) <= {low, high}
    assert int(counts.sum()) == total


@pytest.mark.parametrize(("grid", "num_ideal"), sorted({row[:2] for row in TABLE}))
def test_every_shape_of_a_grid_costs_the_same(grid, num_ideal):
    assert num_ideal == math.ceil(math.prod(grid) / 128)
    totals = {row[-1] for row in TABLE if row[0] == grid}
    assert totals == {math.floor(0.1 * num_ideal**2)}


@pytest.mark.parametrize("name", ["8x4x4", "2x8x8", "4x8x4", "8x8x2"])
def test_the_rule_of_a_real_layout_keeps_8526_tiles(name):
    grid = TokenGrid(37, 24, 42)
    segments = (Segment(0, 200, "text"), Segment(200, 200 + grid.num_tokens, "video", grid))
    layout = veda_layout(Sequence(segments, grid), TileShape.parse(name))
    valid = layout.valid_count.view(-1, 2).sum(1).tolist()
    num_video = layout.num_video_query_tiles
    rule = make_rule(valid, 0, num_video, ratio(0.1))
    scores = torch.randn(len(valid), len(valid), generator=torch.Generator().manual_seed(0))
    kept = kept_sets(rule, scores.tolist(), valid)
    everything = set(range(num_video + 2))
    assert sum(len(row - {num_video, num_video + 1}) for row in kept[:num_video]) == 8526
    assert all({i, num_video, num_video + 1} <= row for i, row in enumerate(kept[:num_video]))
    assert kept[num_video:] == [everything, everything]


def test_the_own_tile_consumes_budget():
    rule = make_rule([128] * 4, 0, 4, tiles(1.5))
    assert kept_sets(rule, FOUR, [128] * 4) == [{0}, {1, 2}, {2}, {1, 3}]


def test_a_row_keeps_its_budget_when_it_is_passed_alone():
    rule = make_rule([128] * 4, 0, 4, tiles(1.5))
    # Counted from the start of the chunk, row 3 would keep one tile: {3}.
    assert kept_sets(rule.rows(3, 4), FOUR[3:], [128] * 4) == [{1, 3}]
    assert kept_sets(rule.rows(1, 3), FOUR[1:3], [128] * 4) == [{1, 2}, {2}]


def test_references_and_target_have_budgets_of_their_own():
    rule = make_rule([128] * 5, 2, 5, tiles(2), tiles(1))
    expected = [{0, 2, 4}, {1, 3, 4}, {0, 2, 3}, {1, 2, 3}, {0, 3, 4}]
    assert kept_sets(rule, FIVE, [128] * 5) == expected
    assert rule.kept_share == pytest.approx(15 / 25)


def test_the_unit_of_the_own_tile_comes_off_the_pool_that_holds_it():
    rule = make_rule([128] * 5, 2, 5, tiles(2), tiles(1))
    assert torch.equal(rule.forced, torch.eye(5, dtype=torch.bool))
    counts = {(pool.start, pool.stop): pool.keep_count.tolist() for pool in rule.pools}
    assert counts == {(0, 2): [0, 0, 1, 1, 1], (2, 5): [2, 2, 1, 1, 1]}


def test_an_empty_tile_is_never_selected():
    valid = [128, 0, 128, 128]
    rule = make_rule(valid, 0, 4, tiles(3))
    kept = kept_sets(rule, FOUR, valid)
    assert [kept[0], kept[2], kept[3]] == [{0, 2, 3}] * 3
    # Row 1 is an empty query tile, which no layout has: its own tile takes a unit all the same,
    # and has no key to keep.
    assert kept[1] == {0, 2}


@pytest.mark.parametrize("value", [1.0, 1.5])
def test_a_ratio_of_one_keeps_every_tile_with_a_row(value):
    valid = [128, 0, 128, 128]
    rule = make_rule(valid, 0, 4, ratio(value))
    assert rule is None
    assert kept_sets(rule, FOUR, valid) == [{0, 2, 3}] * 4
    # Eight rows in eight tiles fill one ideal tile: the equal-cost formula would keep one of them.
    assert make_rule([1] * 8, 0, 8, ratio(value)) is None


def test_a_full_target_budget_leaves_the_references_routed():
    rule = make_rule([128] * 5, 2, 5, ratio(1.0), tiles(1))
    expected = [{0, 2, 3, 4}, {1, 2, 3, 4}, {0, 2, 3, 4}, {1, 2, 3, 4}, {0, 2, 3, 4}]
    assert kept_sets(rule, FIVE, [128] * 5) == expected


def test_a_tiles_budget_of_the_whole_block_keeps_everything():
    assert make_rule([128] * 5, 2, 5, tiles(3), tiles(2)) is None
    assert make_rule([128] * 5, 2, 5, tiles(2.5), tiles(2)) is not None


def test_global_tiles_are_dense_both_ways():
    rule = make_rule([128] * 4, 0, 3, tiles(1))
    scores = [[1.0 - 0.1 * j for j in range(4)] for _ in range(4)]
    assert kept_sets(rule, scores, [128] * 4) == [{0, 3}, {1, 3}, {2, 3}, {0, 1, 2, 3}]


def test_the_second_half_of_a_short_tile_is_never_kept():
    rule = make_rule([128, 64, 65, 3], 0, 3, tiles(1))
    assert rule.is_real.tolist() == [True, True, True, False, True, True, True, False]
    mask = keep_best(torch.zeros(1, 4, 4), rule).mask(8)[0]
    assert mask[1].tolist() == [False, False, True, False, False, False, True, False]


@EXAMPLES
@given(st.floats(0.001, 0.999), st.integers(1, 200), st.integers(1, 40), st.booleans())
def test_the_total_kept_is_the_sum_over_rows(value, num_rows, num_tiles, is_ratio):
    budget = ratio(value) if is_ratio else tiles(1.5 * value * num_tiles)
    valid = [8] * (num_tiles - 1) + [5]
    expected = count_by_d5(budget, valid, num_rows, 8)
    share = per_row(budget, sum(valid), num_tiles, tile=8)
    assert keep_counts(share, num_tiles, num_rows).tolist() == expected


@EXAMPLES
@given(problems())
def test_every_row_keeps_its_best_tiles(problem):
    scores, valid = problem[:2]
    rule = make_rule(*problem[1:], tile=8)
    assert kept_sets(rule, scores, valid, tile=8) == kept_by_d5(*problem, tile=8)


@EXAMPLES
@given(problems(smallest_count=0))
def test_empty_tiles_leave_a_row_with_fewer(problem):
    scores, valid = problem[:2]
    rule = make_rule(*problem[1:], tile=8)
    kept, expected = kept_sets(rule, scores, valid, tile=8), kept_by_d5(*problem, tile=8)
    for row, expected_row, count in zip(kept, expected, valid, strict=True):
        assert count == 0 or row == expected_row


@EXAMPLES
@given(problems(), st.integers(1, 7))
def test_any_split_of_rows_keeps_the_same_tiles(problem, step):
    scores, valid = problem[:2]
    rule = make_rule(*problem[1:], tile=8)
    if rule is None:
        return
    pieces = []
    for start in range(0, len(scores), step):
        stop = min(start + step, len(scores))
        pieces += kept_sets(rule.rows(start, stop), scores[start:stop], valid, tile=8)
    assert pieces == kept_by_d5(*problem, tile=8)
