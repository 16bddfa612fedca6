"""Route: pooling, scoring and choosing KV tiles, against loops written out in Python."""

import math
from fractions import Fraction

import pytest
import torch

from nox_kernels import reference
from nox_kernels.layout import TileShape, raster_layout, window_layout
from nox_kernels.reference import pool_tiles
from nox_kernels.route import Selection, keep_all, num_kept, score_tiles
from nox_kernels.sequence import Segment, Sequence, TokenGrid, t2va_sequence
from tests.cases import keep_tiles

INF, NAN = float("inf"), float("nan")


def to_tiles(layout, x, tile):
    """[H, S, D] -> [H, N, tile, D], as the pre-pass gathers."""
    return reference.to_tiles(x, layout.slot_row, tile)


def make_sequence(grid, tail):
    segments, start = [], 0
    for kind, rows in (*tail, ("video", grid[0] * grid[1] * grid[2])):
        segments.append(Segment(start, start + rows, kind))
        start += rows
    return Sequence(segments=tuple(segments), token_grid=TokenGrid(*grid))


class Case:
    """A small problem with query tiles of 8 and KV tiles of 4 rows, and its facts by counting."""

    def __init__(self, grid, tail, window=None):
        sequence = make_sequence(grid, tail)
        if window is None:
            self.layout = raster_layout(sequence, query_tile=8, kv_tile=4)
        else:
            self.layout = window_layout(sequence, TileShape(*window), query_tile=8, kv_tile=4)
        num_video = grid[0] * grid[1] * grid[2]
        kinds = [kind for kind, rows in tail for _ in range(rows)]
        padding = -num_video % 8
        # What each slot holds, one letter per slot: video, tail, empty.
        slots = "v" * num_video + "." * padding + "t" * len(kinds) + "." * (-len(kinds) % 8)
        self.tiles = [slots[i : i + 4] for i in range(0, len(slots), 4)]
        self.num_query_tiles = len(slots) // 8
        self.num_kv_tiles = len(slots) // 4
        self.num_video_query_tiles = (num_video + padding) // 8
        self.video = [i for i, tile in enumerate(self.tiles) if "v" in tile]
        self.tail = [i for i, tile in enumerate(self.tiles) if "t" in tile]
        self.audio_query_tiles = [
            self.num_video_query_tiles + i
            for i in range(-(-len(kinds) // 8))
            if "audio" in kinds[8 * i : 8 * i + 8]
        ]

    def expected_mask(self, scores, num_kept):
        """[H, Nq, Nk] bool by sorting (score, index) pairs row by row."""
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        for head_idx, head in enumerate(scores.tolist()):
            for i, row in enumerate(head):
                if i in self.audio_query_tiles:
                    kept = self.video + self.tail
                else:
                    own = [2 * i, 2 * i + 1] if i < self.num_video_query_tiles else []
                    rest = [j for j in self.video if j not in own]
                    rank = {j: row[j] if math.isfinite(row[j]) else -INF for j in rest}
                    rest.sort(key=lambda j, rank=rank: (-rank[j], j))
                    kept = rest[:num_kept] + self.tail + [j for j in own if j in self.video]
                mask[head_idx, i, kept] = True
        return mask


TAIL = (("text", 9), ("audio", 6))
CASES = {
    # 60 tokens: KV tile 15 is empty. 15 tail rows: query tile 8 is text, 9 holds audio.
    "an empty KV tile": lambda: Case((3, 4, 5), TAIL),
    "windows": lambda: Case((3, 4, 5), TAIL, window=(2, 2, 2)),
    "an empty tail KV tile": lambda: Case((3, 4, 5), (("text", 3), ("cond", 8), ("audio", 8))),
    "no empty KV tile": lambda: Case((2, 4, 8), TAIL, window=(2, 4, 1)),
    "no audio": lambda: Case((2, 4, 7), (("text", 20),)),
    "audio in two tail tiles of four": lambda: Case(
        (2, 5, 7), (("text", 7), ("ref_audio", 9), ("ref_img", 7), ("audio", 2)), window=(1, 2, 4)
    ),
    "no tail": lambda: Case((3, 4, 5), ()),
    "one query tile": lambda: Case((2, 1, 3), TAIL),
    "one KV tile": lambda: Case((2, 1, 1), TAIL),
    "many tiles": lambda: Case((7, 9, 11), (("text", 77), ("audio", 34)), window=(2, 2, 2)),
}


def random_scores(case, num_heads, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_heads, case.num_query_tiles, case.num_kv_tiles)
    scores = torch.randn(shape, generator=generator)
    if kind == "ties":
        return scores.round()
    if kind == "hostile":
        planted = torch.tensor([NAN, INF, -INF, 0.0, torch.finfo(torch.float32).min, 3.0e38])
        which = torch.randint(0, len(planted), shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.7, planted[which], scores)
    return scores


def real_rows(layout, tile):
    """Real rows of each tile of `tile` slots, counted slot by slot."""
    return (layout.slot_row >= 0).view(-1, tile).sum(dim=1).to(torch.int32)


# ---- budget ----


@pytest.mark.parametrize(
    ("percent", "kept"), [(5, 30), (10, 59), (15, 88), (20, 117), (25, 146), (30, 175), (50, 292)]
)
def test_budget_of_the_short_official_clip(percent, kept):
    # N2: k for 583 video KV tiles.
    assert num_kept(percent / 100, 583) == kept


def test_a_budget_is_the_exact_ceiling_of_the_percentage():
    for percent in range(1, 101):
        share = Fraction(percent, 100)
        for num_tiles in range(1, 2001):
            assert num_kept(percent / 100, num_tiles) == math.ceil(share * num_tiles)


def test_a_budget_counts_the_smallest_fraction_of_a_tile():
    # The epsilon forgives rounding only: 1.0001 tiles are two.
    for parts, num_tiles in ((1, 10001), (15, 2001), (1500, 1687), (9999, 583)):
        exact = math.ceil(Fraction(parts, 10000) * num_tiles)
        assert num_kept(parts / 10000, num_tiles) == exact


def test_a_budget_is_at_least_one_tile():
    assert num_kept(1e-12, 583) == 1
    assert num_kept(0.001, 7) == 1


def test_a_budget_is_a_plain_int():
    assert type(num_kept(0.15, 583)) is int


# ---- pooling and scores ----


def pool(tiles, count, pooling="mean"):
    """Pool [H, N, T, D] tiles whose rows past count[n] lie in slots that hold no row."""
    num_tiles, tile = tiles.shape[1:3]
    slot = torch.arange(num_tiles * tile)
    is_row = slot % tile < count.repeat_interleave(tile)
    return pool_tiles(tiles.flatten(1, 2), torch.where(is_row, slot, -1).int(), count, pooling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pooling_takes_mean_extremes_and_variance_of_the_real_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 5, 64, 16, generator=generator) + 1.5).to(dtype)
    count = torch.tensor([64, 1, 48, 63, 0], dtype=torch.int32)
    pooled = pool(x, count, "variance")
    assert pooled.dtype == torch.float32
    assert pooled.shape == (3, 5, 4, 16)
    for tile_idx, num_rows in enumerate(count.tolist()):
        rows = x[:, tile_idx, :num_rows].double()
        expected = torch.zeros(3, 4, 16, dtype=torch.float64)
        if num_rows:
            expected = torch.stack(
                (rows.mean(1), rows.amax(1), rows.amin(1), rows.var(1, correction=0)), dim=1
            )
        torch.testing.assert_close(pooled[:, tile_idx].double(), expected, rtol=1e-6, atol=1e-7)


def test_fewer_statistics_are_the_first_of_all_of_them():
    x = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(3))
    count = torch.tensor([5, 8, 0], dtype=torch.int32)
    full = pool(x, count, "variance")
    for pooling, num_stats in (("none", 0), ("mean", 1), ("extremes", 3)):
        assert torch.equal(pool(x, count, pooling), full[:, :, :num_stats])


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_rows_in_no_slot_never_reach_a_statistic(junk):
    x = torch.ones(2, 3, 8, 4)
    x[:, 0, 5:] = junk
    x[:, 2] = junk
    pooled = pool(x, torch.tensor([5, 8, 0], dtype=torch.int32), "variance")
    assert torch.equal(pooled[:, :2, :3], torch.ones(2, 2, 3, 4))
    assert torch.equal(pooled[:, :2, 3], torch.zeros(2, 2, 4))
    assert torch.equal(pooled[:, 2], torch.zeros(2, 4, 4))


def test_the_mean_of_bfloat16_rows_is_exact():
    # 1 + 2^-7 is a bfloat16; a bfloat16 running sum of 128 of them would stop growing early.
    x = torch.full((1, 1, 128, 2), 1.0078125, dtype=torch.bfloat16)
    assert torch.equal(
        pool(x, torch.tensor([128], dtype=torch.int32)), torch.full((1, 1, 1, 2), 1.0078125)
    )
    # one row outweighs the others by more than float32 holds, and is taken back again
    x = torch.ones(1, 1, 4, 1, dtype=torch.bfloat16)
    x[0, 0, 0], x[0, 0, 3] = 2.0**30, -(2.0**30)
    assert float(pool(x, torch.tensor([4], dtype=torch.int32))) == 0.5


def test_pooling_accepts_strided_rows():
    x = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(1)).permute(2, 0, 1)
    slot_row = torch.tensor([3, 1, 7, -1, 0, 2, -1, -1], dtype=torch.int32)
    count = torch.tensor([3, 2], dtype=torch.int32)
    expected = pool_tiles(x.contiguous(), slot_row, count, "variance")
    assert torch.equal(pool_tiles(x, slot_row, count, "variance"), expected)


def test_a_score_is_the_plain_dot_product_of_two_means():
    generator = torch.Generator().manual_seed(2)
    q_mean, k_mean = (torch.randn(2, n, 128, generator=generator) for n in (5, 9))
    scores = score_tiles(q_mean, k_mean)
    assert scores.dtype == torch.float32
    assert scores.shape == (2, 5, 9)
    for head_idx in range(2):
        for i in range(5):
            for j in range(9):
                dot = math.fsum((q_mean[head_idx, i].double() * k_mean[head_idx, j]).tolist())
                assert abs(float(scores[head_idx, i, j]) - dot) < 1e-4


# ---- selection bits ----


@pytest.mark.parametrize("num_kv_tiles", [1, 20, 31, 32, 33, 64, 95, 600])
def test_bits_and_mask_are_one_and_the_same(num_kv_tiles):
    generator = torch.Generator().manual_seed(num_kv_tiles)
    mask = torch.rand(3, 5, num_kv_tiles, generator=generator) < 0.4
    selection = Selection.from_mask(mask)
    assert selection.bits.dtype == torch.int32
    assert selection.bits.shape == (3, 5, -(-num_kv_tiles // 32))
    assert selection.mask(num_kv_tiles).dtype == torch.bool
    assert torch.equal(selection.mask(num_kv_tiles), mask)


@pytest.mark.parametrize("num_kv_tiles", [1, 20, 32, 45, 64, 70])
def test_all_set_and_none_set_survive_the_round_trip(num_kv_tiles):
    for value in (False, True):
        mask = torch.full((1, 2, num_kv_tiles), value)
        assert torch.equal(Selection.from_mask(mask).mask(num_kv_tiles), mask)


def test_a_tile_is_its_own_bit_counted_upwards():
    mask = torch.zeros(1, 70, 70, dtype=torch.bool)
    mask[0].fill_diagonal_(True)
    words = Selection.from_mask(mask).bits[0].tolist()
    for tile_idx, row in enumerate(words):
        expected = [0, 0, 0]
        expected[tile_idx // 32] = 1 << tile_idx % 32
        assert [word % (1 << 32) for word in row] == expected
    assert words[31][0] == -(2**31)


def test_spare_bits_of_the_last_word_are_zero():
    selection = Selection.from_mask(torch.ones(1, 1, 40, dtype=torch.bool))
    assert selection.bits.tolist() == [[[-1, 255]]]


def test_a_strided_mask_gives_the_same_bits():
    mask = torch.rand(3, 40, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    strided = mask.transpose(1, 2)
    assert torch.equal(
        Selection.from_mask(strided).bits, Selection.from_mask(strided.contiguous()).bits
    )


# ---- keep_best ----


@pytest.mark.parametrize("kind", ["plain", "ties", "hostile"])
@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES.keys())
def test_keep_best_equals_a_sorted_loop(make_case, kind):
    case = make_case()
    for seed, budget in enumerate([1, 2, 3, 5, 8, 13, 14, 15, 16, 40, 1000]):
        scores = random_scores(case, 2, seed, kind)
        selection = keep_tiles(scores.clone(), case.layout, budget)
        assert selection.bits.dtype == torch.int32
        assert selection.bits.shape == (2, case.num_query_tiles, -(-case.num_kv_tiles // 32))
        mask = selection.mask(case.num_kv_tiles)
        assert torch.equal(mask, case.expected_mask(scores, budget))


@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES.keys())
def test_forced_tiles_are_on_top_of_the_budget(make_case):
    case = make_case()
    scores = random_scores(case, 2, 7, "plain")
    budget = 2
    mask = keep_tiles(scores, case.layout, budget).mask(case.num_kv_tiles)
    for i in range(case.num_query_tiles):
        if i in case.audio_query_tiles:
            continue
        own = {2 * i, 2 * i + 1} & set(case.video) if i < case.num_video_query_tiles else set()
        assert torch.all(mask[:, i, sorted(own)])
        assert torch.all(mask[:, i, case.tail])
        num_selected = min(budget, len(case.video) - len(own))
        assert torch.all(mask[:, i].sum(dim=1) == num_selected + len(own) + len(case.tail))


def test_tail_scores_do_not_matter():
    case = CASES["windows"]()
    scores = random_scores(case, 1, 5, "plain")
    other = scores.clone()
    other[:, :, case.tail] = 1e9
    bits = keep_tiles(scores, case.layout, 4).bits
    assert torch.equal(keep_tiles(other, case.layout, 4).bits, bits)
    other[:, :, case.tail] = NAN
    assert torch.equal(keep_tiles(other, case.layout, 4).bits, bits)


def test_an_own_tile_with_the_best_score_does_not_use_the_budget():
    case = CASES["an empty KV tile"]()
    scores = torch.zeros(1, case.num_query_tiles, case.num_kv_tiles)
    for i in range(case.num_video_query_tiles):
        scores[0, i, 2 * i : 2 * i + 2] = 100.0
    mask = keep_tiles(scores, case.layout, 3).mask(case.num_kv_tiles)
    assert mask[0, 4].nonzero().flatten().tolist() == [0, 1, 2, 8, 9, 16, 17, 18, 19]


@pytest.mark.parametrize("value", [0.0, -5.0, NAN, INF, -INF])
def test_equal_scores_keep_the_lowest_tiles(value):
    # N4. Query tile 0 owns tiles 0 and 1, query tile 7 owns 14 alone (15 is empty).
    case = CASES["an empty KV tile"]()
    scores = torch.full((1, case.num_query_tiles, case.num_kv_tiles), value)
    mask = keep_tiles(scores, case.layout, 3).mask(case.num_kv_tiles)
    tail = [16, 17, 18, 19]
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, *tail]
    assert mask[0, 1].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, *tail]
    assert mask[0, 7].nonzero().flatten().tolist() == [0, 1, 2, 14, *tail]
    assert mask[0, 8].nonzero().flatten().tolist() == [0, 1, 2, *tail]


def test_minus_zero_ties_with_zero():
    case = CASES["an empty KV tile"]()
    scores = torch.zeros(1, case.num_query_tiles, case.num_kv_tiles)
    scores[:, :, ::2] = -0.0
    mask = keep_tiles(scores, case.layout, 3).mask(case.num_kv_tiles)
    assert mask[0, 8].nonzero().flatten().tolist() == [0, 1, 2, 16, 17, 18, 19]


def test_infinite_scores_rank_below_every_finite_one():
    case = CASES["an empty KV tile"]()
    scores = torch.full((1, case.num_query_tiles, case.num_kv_tiles), INF)
    scores[:, :, 9] = torch.finfo(torch.float32).min
    scores[:, :, 11] = NAN
    scores[:, :, 12] = 2.0
    mask = keep_tiles(scores, case.layout, 3).mask(case.num_kv_tiles)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 9, 12, 16, 17, 18, 19]


def test_a_tile_with_a_non_finite_score_stays_eligible():
    case = CASES["an empty KV tile"]()
    scores = torch.full((1, case.num_query_tiles, case.num_kv_tiles), NAN)
    mask = keep_tiles(scores, case.layout, 1000).mask(case.num_kv_tiles)
    assert torch.all(mask[:, :, case.video])


@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES.keys())
def test_an_empty_kv_tile_is_never_kept(make_case):
    case = make_case()
    scores = torch.zeros(2, case.num_query_tiles, case.num_kv_tiles)
    empty = [j for j, tile in enumerate(case.tiles) if tile == "...."]
    scores[:, :, empty] = 1e9
    for selection in (
        keep_tiles(scores, case.layout, 1),
        keep_tiles(scores, case.layout, 1000),
        keep_all(case.layout, 2),
    ):
        assert not torch.any(selection.mask(case.num_kv_tiles)[:, :, empty])


def test_query_tiles_with_target_audio_are_dense_and_text_ones_are_routed():
    case = CASES["audio in two tail tiles of four"]()
    # 70 tokens: query tiles 0..8; tail tiles 9..12, the two audio rows sit in tiles 11 and 12.
    assert case.audio_query_tiles == [11, 12]
    assert tuple(case.layout.audio_query_tiles) == (11, 12)
    mask = keep_tiles(random_scores(case, 1, 1, "plain"), case.layout, 2).mask(case.num_kv_tiles)
    for i in (11, 12):
        assert torch.all(mask[0, i, case.video + case.tail])
    for i in (9, 10):
        assert torch.all(mask[0, i, case.tail])
        assert int(mask[0, i, case.video].sum()) == 2


@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES.keys())
def test_keep_all_keeps_every_tile_that_holds_a_row(make_case):
    case = make_case()
    mask = keep_all(case.layout, 3).mask(case.num_kv_tiles)
    holds_rows = torch.tensor([tile != "...." for tile in case.tiles])
    assert mask.shape == (3, case.num_query_tiles, case.num_kv_tiles)
    assert torch.equal(mask, holds_rows.expand_as(mask))


@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES.keys())
def test_a_budget_of_every_candidate_keeps_all(make_case):
    case = make_case()
    scores = random_scores(case, 2, 3, "hostile")
    best = keep_tiles(scores, case.layout, max(1, len(case.video)))
    assert torch.equal(best.bits, keep_all(case.layout, 2).bits)


def test_the_short_official_clip_keeps_90_video_tiles_and_89_in_its_last_row():
    # N3 at 15 %: own(291) = {582} alone, since tile 583 is empty; the tail has 16 KV tiles.
    layout = raster_layout(t2va_sequence(1344, 768, 124, 594))
    scores = torch.randn(1, 300, 600, generator=torch.Generator().manual_seed(0))
    scores[:, :, 583] = 1e9
    mask = keep_tiles(scores, layout, num_kept(0.15, layout.num_video_kv_tiles)).mask(600)
    video = mask[0, :, :584].sum(dim=1).tolist()
    assert video[:291] == [90] * 291
    assert 90 * 64 == 5760
    assert video[291] == 89
    assert bool(mask[0, 291, 582])
    assert video[292:296] == [88] * 4
    assert video[296:] == [583] * 4
    assert not torch.any(mask[:, :, 583])
    assert torch.all(mask[:, :, 584:])
    # Share of (query tile, KV tile) pairs: 18.8 %.
    assert round(100 * int(mask.sum()) / (300 * 599), 1) == 18.8


# ---- the whole route ----


def means(layout, q, k):
    """[H, S, D] tensors in packed order -> means of query tiles and of KV tiles."""
    q_mean = pool_tiles(q, layout.slot_row, real_rows(layout, layout.query_tile), "mean")
    return q_mean[:, :, 0], pool_tiles(k, layout.slot_row, layout.valid_count, "mean")[:, :, 0]


def route(layout, q, k, budget):
    """[H, S, D] tensors in packed order -> Selection."""
    return keep_tiles(score_tiles(*means(layout, q, k)), layout, budget)


@pytest.mark.parametrize("window", [None, (2, 2, 2)])
def test_a_constant_added_to_every_key_leaves_the_route_unchanged(window):
    # N5. Small integers and power-of-two row counts: every mean and score is exact.
    case = Case((3, 4, 5), (("text", 8), ("audio", 8)), window=window)
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randint(-3, 4, (4, 76, 16), generator=generator).float() for _ in range(2))
    constant = torch.randint(-9, 10, (4, 1, 16), generator=generator).float()
    for budget in (1, 3, 6):
        bits = route(case.layout, q, k, budget).bits
        assert torch.equal(route(case.layout, q, k + constant, budget).bits, bits)


def test_the_route_finds_planted_matches():
    # Query tile 3 points where KV tile 11 points; every other key is orthogonal to it.
    case = Case((3, 4, 5), TAIL, window=(2, 2, 2))
    q, k = torch.zeros(1, 75, 4), torch.zeros(1, 75, 4)
    slot_row = case.layout.slot_row.tolist()
    q[0, slot_row[24:32], 2] = 1.0
    k[0, slot_row[44:48], 2] = 1.0
    mask = route(case.layout, q, k, 1).mask(20)
    assert mask[0, 3].nonzero().flatten().tolist() == [6, 7, 11, 16, 17, 18, 19]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_head_alone_gets_the_same_bits_as_in_its_group(dtype):
    case = Case((7, 9, 11), (("text", 77), ("audio", 34)), window=(2, 2, 2))
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(6, 804, 128, generator=generator).to(dtype) for _ in range(2))
    layout = case.layout
    q_mean, k_mean = means(layout, q, k)
    scores = score_tiles(q_mean, k_mean)
    bits = keep_tiles(scores, layout, 17).bits
    for head_idx in range(6):
        one = slice(head_idx, head_idx + 1)
        own_q_mean, own_k_mean = means(layout, q[one], k[one])
        assert torch.equal(own_q_mean, q_mean[one])
        assert torch.equal(own_k_mean, k_mean[one])
        assert torch.equal(score_tiles(q_mean[one], k_mean[one]), scores[one])
        assert torch.equal(keep_tiles(scores[one], layout, 17).bits, bits[one])
        assert torch.equal(route(layout, q[one], k[one], 17).bits, bits[one])
