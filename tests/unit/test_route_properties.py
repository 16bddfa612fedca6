"""The sparse route against a few plain loops: what every query tile keeps, whatever the shape."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nox_kernels.layout import TileShape, make_layout, raster_layout, window_layout, window_order
from nox_kernels.reference import pool_tiles
from nox_kernels.route import keep_all, keep_best, num_kept, score_tiles, select, sparse_rule
from nox_kernels.sequence import Segment, Sequence, TokenGrid, t2va_sequence

EXAMPLES = settings(deadline=None, max_examples=60, derandomize=True)
FEW_EXAMPLES = settings(deadline=None, max_examples=12, derandomize=True)

NONVIDEO = ("audio_dense", "all_dense", "all_routed")
CONDITIONS = ("cond", "cond_audio", "ref_img", "ref_audio")

# All on tiles of 8 queries and 4 keys.
LAYOUTS = ("raster", "2x2x2", "1x2x4", "4x1x2", "8x1x1", "1x1x8")


def make_sequence(prefix, grid):
    """A sequence of (kind, rows) pairs and a video on `grid`."""
    segments, start = [], 0
    for kind, rows in (*prefix, ("video", math.prod(grid))):
        segments.append(Segment(start, start + rows, kind))
        start += rows
    return Sequence(tuple(segments), TokenGrid(*grid))


def small_layout(sequence, name):
    if name == "raster":
        return raster_layout(sequence, query_tile=8, kv_tile=4)
    return window_layout(sequence, TileShape.parse(name), query_tile=8, kv_tile=4)


def tile_rows(layout, tile):
    """For each tile, the packed rows in it."""
    return [[row for row in rows if row >= 0] for rows in layout.slot_row.view(-1, tile).tolist()]


def kinds_of(sequence):
    return [s.kind for s in sequence.segments for _ in range(s.start, s.stop)]


def reference_tiles(sequence, layout):
    """For each reference image of 1024 rows or more, the KV tiles wholly inside it."""
    rows = tile_rows(layout, layout.kv_tile)
    spans = [set(range(*s[:2])) for s in sequence.segments if s.kind == "ref_img"]
    return [
        [j for j, tile in enumerate(rows) if tile and span.issuperset(tile)]
        for span in spans
        if len(span) >= 1024
    ]


def kept_by_b3(scores, sequence, layout, ratio, nonvideo="audio_dense", base="video", refs=False):
    """B3 and B4, one query tile at a time: the sets of KV tiles kept."""
    kinds, kv_rows = kinds_of(sequence), tile_rows(layout, layout.kv_tile)
    real = [j for j, rows in enumerate(kv_rows) if rows]
    video = [j for j in real if kinds[kv_rows[j][0]] == "video"]
    pools = [video] + (reference_tiles(sequence, layout) if refs else [])
    kept = []
    for i, rows in enumerate(tile_rows(layout, layout.query_tile)):
        here = {kinds[row] for row in rows}
        dense = {"all_routed": set(), "audio_dense": {"audio"}, "all_dense": here - {"video"}}
        if here & dense[nonvideo]:
            kept.append(set(real))
            continue
        own = {2 * i, 2 * i + 1} & set(real)
        chosen = forced = own | set(real).difference(*pools)
        for pool_idx, pool in enumerate(pools):
            count = math.ceil(ratio * len(pool) - 1e-9)
            if pool_idx == 0 and base == "all_keys":
                count = math.ceil(ratio * len(real) - 1e-9) - len(forced)
            rank = {j: s if math.isfinite(s := scores[i][j]) else -math.inf for j in pool}
            best = sorted(set(pool) - own, key=lambda j: (-rank[j], j))
            chosen = chosen | set(best[: max(1, count)])
        kept.append(chosen)
    return kept


def kept_sets(rule, scores, layout):
    """[H] lists of sets: what the rule keeps by `scores` [H, Nq, Nk]; no rule keeps all."""
    selection = keep_all(layout, len(scores)) if rule is None else keep_best(scores, rule)
    mask = selection.mask(layout.num_kv_tiles)
    return [[set(row.nonzero().flatten().tolist()) for row in head] for head in mask]


def hostile_scores(layout, num_heads, seed, levels):
    """Scores full of ties, some not finite; tiles without a row score higher than any."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_heads, layout.num_query_tiles, layout.num_kv_tiles)
    scores = torch.randint(-levels, levels, shape, generator=generator).float()
    odd = torch.randint(0, 40, shape, generator=generator)
    for value, number in enumerate((float("nan"), float("inf"), -float("inf"))):
        scores[odd == value] = number
    scores[:, :, layout.valid_count == 0] = 1e30
    return scores


@st.composite
def sequences(draw):
    extents = st.integers(1, 6)
    grid = (draw(st.integers(2, 7)), draw(extents), draw(extents))
    middle = st.tuples(st.sampled_from(CONDITIONS), st.integers(1, 30))
    prefix = [("text", draw(st.integers(1, 30))), *draw(st.lists(middle, max_size=3))]
    prefix += [("audio", rows) for rows in draw(st.lists(st.integers(1, 25), max_size=1))]
    return make_sequence(prefix, grid)


@st.composite
def reference_sequences(draw):
    """One or two routed reference images, perhaps one too short, at any offset to the tiles."""
    prefix = [("text", draw(st.integers(1, 12)))]
    for rows in draw(st.lists(st.sampled_from([1024, 1027, 1056, 1023]), min_size=1, max_size=2)):
        prefix.append(("ref_img", rows))
        prefix += [("ref_audio", n) for n in draw(st.lists(st.integers(1, 9), max_size=1))]
    prefix.append(("audio", draw(st.integers(8, 20))))
    return make_sequence(prefix, (2, draw(st.integers(1, 6)), draw(st.integers(3, 7))))


RATIOS = st.one_of(st.floats(0.001, 1.0), st.sampled_from([0.05, 0.1, 0.15, 0.2, 0.3, 0.5]))


@EXAMPLES
@given(sequences(), st.sampled_from(LAYOUTS))
def test_every_row_has_one_slot_and_no_query_tile_mixes_video_with_the_rest(sequence, name):
    layout = small_layout(sequence, name)
    slots = layout.row_slot.long()
    assert torch.equal(layout.slot_row.long()[slots], torch.arange(sequence.num_rows))
    assert int((layout.slot_row >= 0).sum()) == sequence.num_rows
    kinds = kinds_of(sequence)
    for tile_idx, rows in enumerate(tile_rows(layout, 8)):
        is_video = {kinds[row] == "video" for row in rows}
        assert is_video == {tile_idx < layout.num_video_query_tiles}


@EXAMPLES
@given(
    sequences(),
    st.sampled_from(LAYOUTS),
    RATIOS,
    st.sampled_from(NONVIDEO),
    st.sampled_from(["video", "all_keys"]),
    st.integers(0, 2**20),
    st.sampled_from([1, 3, 100]),
)
def test_every_query_tile_keeps_forced_and_best_tiles(
    sequence, name, ratio, nonvideo, base, seed, levels
):
    layout = small_layout(sequence, name)
    rule = sparse_rule(layout, ratio, nonvideo_queries=nonvideo, budget_base=base)
    scores = hostile_scores(layout, 2, seed, levels)
    kept = kept_sets(rule, scores, layout)
    for head, sets in zip(scores.tolist(), kept, strict=True):
        assert sets == kept_by_b3(head, sequence, layout, ratio, nonvideo, base)
    if rule is not None:
        pairs = layout.num_query_tiles * layout.num_real_kv_tiles
        assert rule.kept_share == pytest.approx(sum(map(len, kept[0])) / pairs)


@FEW_EXAMPLES
@given(
    reference_sequences(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([0.02, 0.15, 0.5, 0.97]),
    st.sampled_from(NONVIDEO),
    st.integers(0, 2**20),
)
def test_each_reference_image_keeps_its_own_share(sequence, name, ratio, nonvideo, seed):
    layout = small_layout(sequence, name)
    expected_tiles = reference_tiles(sequence, layout)
    assert [list(tiles) for tiles in layout.reference_kv_tiles] == expected_tiles
    rule = sparse_rule(layout, ratio, nonvideo_queries=nonvideo, route_references=True)
    scores = hostile_scores(layout, 1, seed, 5)
    kept = kept_sets(rule, scores, layout)[0]
    assert kept == kept_by_b3(scores[0].tolist(), sequence, layout, ratio, nonvideo, refs=True)


@FEW_EXAMPLES
@given(reference_sequences(), st.sampled_from([0.02, 0.15, 0.5]), st.integers(0, 2**20))
def test_references_are_routed_beside_a_budget_over_all_keys(sequence, ratio, seed):
    layout = small_layout(sequence, "2x2x2")
    rule = sparse_rule(layout, ratio, budget_base="all_keys", route_references=True)
    scores = hostile_scores(layout, 1, seed, 5)
    kept = kept_sets(rule, scores, layout)[0]
    expected = kept_by_b3(scores[0].tolist(), sequence, layout, ratio, base="all_keys", refs=True)
    assert kept == expected


def test_a_reference_of_1023_rows_stays_forced():
    for rows, num_pools in ((1023, 0), (1024, 1)):
        sequence = make_sequence((("text", 4), ("ref_img", rows), ("audio", 9)), (2, 4, 4))
        layout = small_layout(sequence, "raster")
        assert len(layout.reference_kv_tiles) == num_pools
        rule = sparse_rule(layout, 0.25, nonvideo_queries="all_routed", route_references=True)
        kept = kept_sets(rule, torch.zeros(1, layout.num_query_tiles, layout.num_kv_tiles), layout)
        tail = {j for j in kept[0][0] if j >= layout.first_tail_kv_tile}
        # All 256 tiles of the reference, or a quarter of them; text, the edge and audio beside.
        num_tail = sum(count > 0 for count in layout.valid_count[layout.first_tail_kv_tile :])
        assert len(tail) == (num_tail - 192 if num_pools else num_tail)


@EXAMPLES
@given(
    sequences(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([0.05, 0.15, 0.4]),
    st.integers(1, 6),
    st.integers(0, 2**20),
)
def test_any_split_of_heads_or_rows_gives_the_same_sets(sequence, name, ratio, step, seed):
    layout = small_layout(sequence, name)
    rule = sparse_rule(layout, ratio)
    if rule is None:
        return
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, layout.num_query_tiles, 5, generator=generator)
    k = torch.randn(3, layout.num_kv_tiles, 5, generator=generator)
    whole = select(q, k, rule).bits
    assert torch.equal(keep_best(score_tiles(q, k), rule).bits, whole)
    for head in range(3):
        part = slice(head, head + 1)
        assert torch.equal(select(q[part], k[part], rule).bits, whole[part])
    for start in range(0, layout.num_query_tiles, step):
        stop = min(start + step, layout.num_query_tiles)
        part = select(q[:, start:stop], k, rule.rows(start, stop)).bits
        assert torch.equal(part, whole[:, start:stop])


def test_windows_walk_complete_boxes_first():
    # N1.
    expected = """
        0 1 5 6 20 21 25 26 | 2 3 7 8 22 23 27 28 | 10 11 15 16 30 31 35 36 |
        12 13 17 18 32 33 37 38 | 4 9 24 29 | 14 19 34 39 | 40 41 45 46 | 42 43 47 48 | 44 49 |
        50 51 55 56 | 52 53 57 58 | 54 59
    """
    order = window_order(TokenGrid(3, 4, 5), TileShape(2, 2, 2))
    assert order.tolist() == [int(token) for token in expected.replace("|", " ").split()]


@pytest.mark.parametrize(
    ("ratio", "count"),
    [(0.05, 30), (0.1, 59), (0.15, 88), (0.2, 117), (0.25, 146), (0.3, 175), (0.5, 292)],
)
def test_the_budget_of_583_tiles_rounds_up(ratio, count):
    # N2.
    assert num_kept(ratio, 583) == count


def test_a_product_that_is_whole_is_not_rounded_up():
    # The first two land a hair above 7 and 55 in fp64, the last a hair below 29.
    assert [num_kept(0.07, 100), num_kept(0.55, 100), num_kept(0.29, 100)] == [7, 55, 29]
    assert num_kept(0.001, 20) == 1


def test_the_last_video_row_of_the_official_clip_owns_one_tile():
    # N3.
    layout = make_layout(t2va_sequence(1344, 768, 124, 594), "4x8x4")
    rule = sparse_rule(layout, 0.15)
    scores = torch.randn(1, 300, 600, generator=torch.Generator().manual_seed(0))
    scores[:, :, 583] = 1e9
    kept = kept_sets(rule, scores, layout)[0]
    tail = set(range(584, 600))
    assert all(tail <= row for row in kept)
    assert not any(583 in row for row in kept)
    assert [len(row - tail) for row in kept[:292]] == [90] * 291 + [89]
    assert all({2 * i, 2 * i + 1} <= kept[i] for i in range(291))
    assert 582 in kept[291]
    # Text alone is routed without a tile of its own; four audio tiles see all 599.
    assert [len(row) for row in kept[292:]] == [88 + 16] * 4 + [599] * 4


def test_equal_scores_keep_the_lowest_tiles():
    # N4.
    sequence = make_sequence((("text", 5),), (4, 4, 4))
    layout = small_layout(sequence, "raster")
    rule = sparse_rule(layout, 0.2)  # 4 of 16
    kept = kept_sets(rule, torch.zeros(1, 9, 18), layout)[0]
    assert kept[0] == {0, 1, 2, 3, 4, 5, 16, 17}
    assert kept[1] == {0, 1, 2, 3, 4, 5, 16, 17}
    assert kept[5] == {0, 1, 2, 3, 10, 11, 16, 17}
    assert kept[8] == {0, 1, 2, 3, 16, 17}


@EXAMPLES
@given(
    st.tuples(st.integers(2, 5), st.integers(1, 4), st.sampled_from([4, 8])),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**20),
)
def test_a_constant_added_to_all_keys_changes_no_route(grid, name, seed):
    # N5. Small integers in tiles of 4 or 8 rows: every mean and score is exact.
    sequence = make_sequence((("text", 8),), grid)
    layout = small_layout(sequence, name)
    rule = sparse_rule(layout, 0.15)
    if rule is None:
        return
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randint(-4, 5, (2, 2, sequence.num_rows, 6), generator=generator).float()
    constant = torch.randint(-50, 51, (2, 1, 6), generator=generator).float()
    q_count = layout.valid_count.view(-1, 2).sum(1)

    def bits_of(keys):
        q_mean = pool_tiles(q, layout.slot_row, q_count, "mean")[:, :, 0]
        k_mean = pool_tiles(keys, layout.slot_row, layout.valid_count, "mean")[:, :, 0]
        return select(q_mean, k_mean, rule).bits

    assert torch.equal(bits_of(k + constant), bits_of(k))


# B4 for 16:9, 124 frames at 15 %: prompt and keyframes, then kept share by nonvideo_queries.
SHARES = [
    (594, 0, "all_routed", 0.1769),
    (594, 0, "audio_dense", 0.1879),
    (594, 0, "all_dense", 0.1989),
    (300, 1, "all_routed", 0.2122),
    (300, 1, "audio_dense", 0.2223),
    (300, 1, "all_dense", 0.2676),
    (300, 2, "all_routed", 0.2504),
    (300, 2, "audio_dense", 0.2618),
    (300, 2, "all_dense", 0.3370),
]


@pytest.mark.parametrize(("num_text", "num_keyframes", "nonvideo", "share"), SHARES)
def test_the_kept_share_of_official_requests(num_text, num_keyframes, nonvideo, share):
    sequence = t2va_sequence(1344, 768, 124, num_text, num_keyframes)
    layout = make_layout(sequence, "4x8x4")
    rule = sparse_rule(layout, 0.15, nonvideo_queries=nonvideo)
    # Counted by hand: 291 video rows with two tiles of their own, one with one, then the tail.
    num_tail_rows = sequence.num_rows - 37296
    num_tail, num_tail_queries = math.ceil(num_tail_rows / 64), math.ceil(num_tail_rows / 128)
    num_audio = num_tail_queries - (num_tail_rows - 414) // 128  # audio is the end of the tail
    num_dense = {"all_routed": 0, "audio_dense": num_audio, "all_dense": num_tail_queries}
    num_all = 583 + num_tail
    pairs = 291 * (90 + num_tail) + (89 + num_tail) + num_dense[nonvideo] * num_all
    pairs += (num_tail_queries - num_dense[nonvideo]) * (88 + num_tail)
    expected = pairs / ((292 + num_tail_queries) * num_all)
    assert rule.kept_share == pytest.approx(expected, rel=1e-12)
    assert rule.kept_share == pytest.approx(share, abs=6e-5)
