"""Veda's predictor: from pooled tiles to the score of every pair of tiles."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nox_kernels.layout import power_of_two_shapes, veda_layout
from nox_kernels.reference import pool_tiles
from nox_kernels.route import keep_best, score_tiles, select
from nox_kernels.sequence import Segment, Sequence, TokenGrid
from nox_kernels.veda.budget import veda_rule
from nox_kernels.veda.bundle_info import Budget
from nox_kernels.veda.predictor import LayerPredictor, VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan

EXAMPLES = settings(deadline=None, max_examples=30, derandomize=True)

POOLING = ["extremes", "variance"]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_predictor(num_heads, dim, *, rank=0, count_term=False, seed=0, scale=0.3):
    """A layer with random projections, and the terms asked for."""
    return LayerPredictor(
        proj_q=scale * randn(num_heads, 3 * dim, dim, seed=seed),
        proj_k=scale * randn(num_heads, 3 * dim, dim, seed=seed + 1),
        so_q=scale * randn(num_heads, dim, rank, seed=seed + 2) if rank else None,
        so_k=scale * randn(num_heads, dim, rank, seed=seed + 3) if rank else None,
        count_gain=randn(num_heads, seed=seed + 4) if count_term else None,
    )


def zero_predictor(num_heads, dim, **terms):
    zeros = torch.zeros(num_heads, 3 * dim, dim)
    terms = {"so_q": None, "so_k": None, "count_gain": None, **terms}
    return LayerPredictor(proj_q=zeros, proj_k=zeros.clone(), **terms)


def logits(layer, q_pool, k_pool, valid_count, head_idx=None):
    """[h, Nq, Nt] of D4, through the two calls a route makes."""
    head_idx = torch.arange(len(q_pool)) if head_idx is None else torch.tensor(head_idx)
    return score_tiles(*layer.embed(q_pool, k_pool, torch.as_tensor(valid_count), head_idx))


def pool_by_hand(rows):
    """(mean, max, min, variance, mean square) of [n, D] rows in float64; zeros without a row."""
    if not len(rows):
        return (torch.zeros(rows.shape[1], dtype=torch.float64),) * 5
    rows = rows.double()
    mean = rows.mean(0)
    return mean, rows.amax(0), rows.amin(0), (rows - mean).square().mean(0), rows.square().mean(0)


def logit_by_hand(layer, head, q_rows, k_rows):
    """D4 for one pair of tiles from their real rows, in float64."""
    q_mean, q_max, q_min, _, q_square = pool_by_hand(q_rows)
    k_mean, k_max, k_min, k_variance, _ = pool_by_hand(k_rows)
    q_hat = torch.cat([q_mean, q_max, q_min]) @ layer.proj_q[head].double() + q_mean
    k_hat = torch.cat([k_mean, k_max, k_min]) @ layer.proj_k[head].double() + k_mean
    logit = q_hat @ k_hat / math.sqrt(len(q_mean))
    if layer.count_gain is not None:
        logit += layer.count_gain[head].double() * math.log(max(1, len(k_rows)))
    if layer.so_q is not None:
        logit += (q_square @ layer.so_q[head].double()) @ (k_variance @ layer.so_k[head].double())
    return logit


def logits_by_hand(layer, q, k, slot_row, tile):
    """[H, N, N] from packed rows [H, S, D]: loops over heads and pairs of tiles."""
    tiles = [[row for row in rows if row >= 0] for rows in slot_row.view(-1, tile).tolist()]
    out = [
        [[logit_by_hand(layer, h, q[h, i], k[h, j]) for j in tiles] for i in tiles]
        for h in range(len(q))
    ]
    return torch.tensor(out, dtype=torch.float64)


def scattered_tiles(counts, tile, num_spare):
    """(slot_row, S): tiles with that many real rows; rows 0 and S - 1 and others are in no tile."""
    order = torch.randperm(sum(counts) + num_spare, generator=torch.Generator().manual_seed(5)) + 1
    slot_row = torch.full((len(counts), tile), -1, dtype=torch.int32)
    for row, count, part in zip(slot_row, counts, order[: sum(counts)].split(counts), strict=True):
        row[:count] = part
    return slot_row.flatten(), sum(counts) + num_spare + 2


def test_padding_never_reaches_a_pool():
    # Rows 0 and 3 are in no tile; a gather with -1 or 0 would meet them.
    x = torch.tensor([[[9.0, 99.0], [1.0, -2.0], [3.0, 4.0], [-99.0, 999.0]]])
    slot_row = torch.tensor([1, 2, -1, -1], dtype=torch.int32)
    pooled = pool_tiles(x, slot_row, torch.tensor([2]), "extremes")
    assert pooled.dtype == torch.float32
    assert pooled.tolist() == [[[[2, 1], [3, 4], [1, -2]]]]
    negative = torch.tensor([[[-1.0], [-3.0]]])
    pooled = pool_tiles(negative, torch.tensor([0, 1, -1, -1]), torch.tensor([2]), "extremes")
    assert pooled.flatten().tolist() == [-2, -1, -3]


def test_an_empty_tile_pools_to_zero():
    slot_row = torch.tensor([0, 1, -1, -1])
    for pooling, num_stats in (("mean", 1), ("extremes", 3), ("variance", 4)):
        x = torch.full((2, 2, 3), float("inf"))
        pooled = pool_tiles(x, slot_row, torch.tensor([2, 0]), pooling)
        assert pooled.shape == (2, 2, num_stats, 3)
        assert torch.equal(pooled[:, 1], torch.zeros(2, num_stats, 3))


def test_variance_is_the_population_variance_around_the_mean():
    # One pass over squares in float32 would lose this to 4096^2.
    x = (4096 + torch.tensor([0.0, 1.0, 2.0, 5.0]))[None, :, None]
    pooled = pool_tiles(x, torch.arange(4), torch.tensor([4]), "variance")
    assert pooled.flatten().tolist() == [4098, 4101, 4096, 3.5]


def test_zero_projections_leave_the_mean_pooled_score():
    q_pool = torch.tensor([[[[2.0, 1.0], [3.0, 4.0], [1.0, -2.0]]]])
    k_pool = torch.tensor([[[[1.0, 3.0], [7.0, 8.0], [-9.0, -9.0]]]])
    assert logits(zero_predictor(1, 2), q_pool, k_pool, [4]).item() == pytest.approx(3.535534)
    # From max_0 (feature 2 of mean | max | min) to output 0.
    layer = zero_predictor(1, 2)
    layer.proj_q[0, 2, 0] = 0.5
    assert logits(layer, q_pool, k_pool, [4]).item() == pytest.approx(4.596194)


@pytest.mark.parametrize("side", ["proj_q", "proj_k"])
@pytest.mark.parametrize("feature", range(6))
def test_every_feature_reaches_its_output(side, feature):
    q_pool = torch.tensor([[[[2.0, 1.0], [3.0, 4.0], [1.5, -2.0]]]])
    k_pool = torch.tensor([[[[1.0, 3.0], [7.0, 8.0], [-9.0, -6.0]]]])
    layer = zero_predictor(1, 2)
    getattr(layer, side)[0, feature, 1] = 1.0
    own, other = (q_pool, k_pool) if side == "proj_q" else (k_pool, q_pool)
    hat = own[0, 0, 0] + torch.tensor([0.0, float(own.flatten()[feature])])
    expected = float(hat @ other[0, 0, 0]) / math.sqrt(2)
    assert logits(layer, q_pool, k_pool, [4]).item() == pytest.approx(expected)


def test_the_count_term_adds_the_logarithm_of_the_real_rows():
    layer = zero_predictor(2, 2, count_gain=torch.tensor([1.0, -2.0]))
    q_pool = torch.ones(2, 1, 3, 2)
    k_pool = torch.ones(2, 4, 3, 2)
    k_pool[:, 3] = 0
    scores = logits(layer, q_pool, k_pool, [128, 32, 1, 0])[:, 0]
    assert (scores[0, 0] - scores[0, 1]).item() == pytest.approx(1.386294, abs=1e-6)
    assert (scores[1, 0] - scores[1, 1]).item() == pytest.approx(-2 * math.log(4), abs=1e-6)
    # ln(max(1, count)): neither one row nor none adds anything.
    assert scores[:, 2].tolist() == pytest.approx([2 / math.sqrt(2)] * 2)
    assert scores[:, 3].tolist() == [0, 0]


def test_the_second_order_term_is_the_query_power_times_the_key_variance():
    # mean 1 and variance 3 make a mean square of 4; the term has no 1 / sqrt(D).
    so_q, so_k = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)
    so_q[0, 0, 0], so_k[0, 1, 0] = 0.5, 10.0
    layer = zero_predictor(1, 2, so_q=so_q, so_k=so_k)
    q_pool = torch.tensor([[[[1.0, 0.0], [9.0, 9.0], [9.0, 9.0], [3.0, 7.0]]]])
    k_pool = torch.tensor([[[[2.0, 5.0], [9.0, 9.0], [9.0, 9.0], [8.0, 0.25]]]])
    expected = 2 / math.sqrt(2) + (0.5 * 4) * (10 * 0.25)
    assert logits(layer, q_pool, k_pool, [4]).item() == pytest.approx(expected)


@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("count_term", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_loops_in_float64(pooling, count_term, dtype):
    rank = 3 if pooling == "variance" else 0
    layer = make_predictor(2, 6, rank=rank, count_term=count_term)
    slot_row, num_rows = scattered_tiles([8, 3, 1, 8, 5], 8, 4)
    counts = torch.tensor([8, 3, 1, 8, 5])
    q, k = (randn(2, num_rows, 6, seed=seed).to(dtype) for seed in (7, 8))
    pools = [pool_tiles(x, slot_row, counts, pooling) for x in (q, k)]
    expected = logits_by_hand(layer, q, k, slot_row, 8)
    scores = logits(layer, *pools, counts)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_bf16_projections_are_upcast_and_not_the_pools_rounded():
    layer = make_predictor(2, 8, rank=2, count_term=True)
    names = ("proj_q", "proj_k", "so_q", "so_k", "count_gain")
    short = LayerPredictor(**{name: getattr(layer, name).bfloat16() for name in names})
    long = LayerPredictor(**{name: getattr(layer, name).bfloat16().double() for name in names})
    q_pool, k_pool = randn(2, 5, 4, 8, seed=1), randn(2, 6, 4, 8, seed=2)
    q_embedding, k_embedding = short.embed(
        q_pool, k_pool, torch.tensor([8, 8, 8, 8, 2, 1]), torch.arange(2)
    )
    assert (q_embedding.dtype, k_embedding.dtype) == (torch.float64, torch.float64)
    counts = [8, 8, 8, 8, 2, 1]
    expected = logits(long, q_pool, k_pool, counts)
    torch.testing.assert_close(
        logits(short, q_pool, k_pool, counts), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -3e38])
def test_rows_in_no_tile_change_nothing(pooling, poison):
    counts = [8, 3, 0, 1, 7]
    slot_row, num_rows = scattered_tiles(counts, 8, 6)
    layer = make_predictor(2, 6, rank=3 if pooling == "variance" else 0, count_term=True)
    q, k = randn(2, num_rows, 6, seed=7), randn(2, num_rows, 6, seed=8)
    outside = torch.ones(num_rows, dtype=torch.bool)
    outside[slot_row[slot_row >= 0].long()] = False
    assert outside[0]
    assert outside[-1]

    def scores_of(q, k):
        pools = [pool_tiles(x, slot_row, torch.tensor(counts), pooling) for x in (q, k)]
        return logits(layer, *pools, counts)

    clean = scores_of(q, k)
    assert torch.isfinite(clean).all()
    scrambled = [x.masked_fill(outside[None, :, None], poison) for x in (q, k)]
    assert torch.equal(scores_of(*scrambled), clean)


@pytest.mark.parametrize("pooling", POOLING)
def test_head_ids_choose_the_projections(pooling):
    rank = 2 if pooling == "variance" else 0
    layer = make_predictor(5, 4, rank=rank, count_term=True)
    num_stats = 4 if rank else 3
    q_pool, k_pool = randn(5, 6, num_stats, 4, seed=1), randn(5, 7, num_stats, 4, seed=2)
    counts = [8, 8, 2, 8, 8, 1, 8]
    whole = logits(layer, q_pool, k_pool, counts)
    for heads in ([3, 1], [0], [4, 2, 0]):
        part = logits(layer, q_pool[heads], k_pool[heads], counts, heads)
        torch.testing.assert_close(part, whole[heads], rtol=1e-6, atol=1e-6)


@st.composite
def routes(draw):
    """(layer, q pools, k pools, counts, rule) of a random Veda layout on tiles of 8."""
    extents = st.integers(1, 6)
    grid = TokenGrid(draw(st.integers(2, 6)), draw(extents), draw(extents))
    rows = draw(st.integers(1, 20))
    sequence = Sequence(
        (Segment(0, rows, "text"), Segment(rows, rows + grid.num_tokens, "video", grid)), grid
    )
    shape = draw(st.sampled_from(power_of_two_shapes(8)))
    layout = veda_layout(sequence, shape, query_tile=8, kv_tile=4)
    counts = layout.valid_count.view(-1, 2).sum(1)
    rule = veda_rule(
        counts,
        num_condition_tiles=0,
        num_video_tiles=layout.num_video_query_tiles,
        target=draw(st.floats(1.0, 4.0).map(lambda value: Budget("tiles", value))),
        tile=8,
    )
    pooling = draw(st.sampled_from(POOLING))
    layer = make_predictor(4, 4, rank=2 if pooling == "variance" else 0, count_term=True)
    seed = draw(st.integers(0, 2**20))
    q, k = (randn(4, sequence.num_rows, 4, seed=seed + n).bfloat16() for n in (0, 1))
    pools = [pool_tiles(x, layout.slot_row, counts, pooling) for x in (q, k)]
    return layer, *pools, counts, rule


@EXAMPLES
@given(routes(), st.integers(1, 5), st.integers(1, 5))
def test_any_split_over_heads_queries_or_keys_gives_the_same_sets(route, q_step, k_step):
    layer, q_pool, k_pool, counts, rule = route
    if rule is None:
        return
    num_tiles, every_head = len(counts), torch.arange(4)
    embeddings = layer.embed(q_pool, k_pool, counts, every_head)
    whole = select(*embeddings, rule).bits
    assert torch.equal(keep_best(score_tiles(*embeddings), rule).bits, whole)
    for head in range(4):
        part = slice(head, head + 1)
        alone = layer.embed(q_pool[part], k_pool[part], counts, every_head[part])
        assert torch.equal(select(*alone, rule).bits, whole[part])
    q_embedding, k_embedding = embeddings
    for start in range(0, num_tiles, q_step):
        stop = min(start + q_step, num_tiles)
        part = select(q_embedding[:, start:stop], k_embedding, rule.rows(start, stop))
        assert torch.equal(part.bits, whole[:, start:stop])
    streamed = [score_tiles(q_embedding, part) for part in k_embedding.split(k_step, dim=1)]
    assert torch.equal(keep_best(torch.cat(streamed, dim=2), rule).bits, whole)


@EXAMPLES
@given(st.integers(2, 24), st.integers(0, 2**20), st.floats(1.0, 6.0))
def test_a_constant_added_to_all_keys_changes_no_route(num_tiles, seed, budget):
    # Small integers and counts that are powers of two: every mean and score is exact.
    counts = 2 ** torch.randint(0, 4, (num_tiles,), generator=torch.Generator().manual_seed(seed))
    slot_row, num_rows = scattered_tiles(counts.tolist(), 8, 0)
    rule = veda_rule(
        counts,
        num_condition_tiles=0,
        num_video_tiles=num_tiles,
        target=Budget("tiles", budget),
        tile=8,
    )
    if rule is None:
        return
    q, k = (randn(2, num_rows, 4, seed=seed + n).mul(4).round() for n in (0, 1))
    constant = randn(2, 1, 4, seed=seed + 2).mul(16).round()
    layer = zero_predictor(2, 4)

    def bits_of(keys):
        pools = [pool_tiles(x, slot_row, counts, "extremes") for x in (q, keys)]
        return select(*layer.embed(*pools, counts, torch.arange(2)), rule).bits

    assert torch.equal(bits_of(k + constant), bits_of(k))


@pytest.mark.parametrize(("rank", "pooling"), [(0, "extremes"), (2, "variance")])
def test_a_bundle_pools_what_its_terms_need(rank, pooling):
    plan = random_plan("tiny", TokenGrid(2, 8, 16), ("4x4x8", "1x8x16"), num_layers=2, num_heads=2)
    bundle = random_bundle(
        (plan,), num_layers=2, num_heads=2, dtype="float32", second_order_rank=rank, count_term=True
    )
    predictor = VedaPredictor.from_bundle(bundle)
    assert predictor.info == bundle.info
    assert len(predictor.layers) == 2
    for layer_idx, layer in enumerate(predictor.layers):
        for name in ("proj_q", "proj_k", "count_gain", *(("so_q", "so_k") if rank else ())):
            assert torch.equal(getattr(layer, name), bundle.tensors[f"layers.{layer_idx}.{name}"])
        assert layer.pooling == pooling
        assert (layer.so_q is None) == (rank == 0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_short_projections_stay_bf16_on_the_model(dtype):
    plan = random_plan("tiny", TokenGrid(2, 8, 16), ("4x4x8",), num_layers=1, num_heads=2)
    bundle = random_bundle((plan,), num_layers=1, num_heads=2, dtype=dtype)
    layer = VedaPredictor.from_bundle(bundle).layers[0]
    assert layer.proj_q.dtype == layer.proj_k.dtype == torch.bfloat16
    assert layer.proj_q.shape == (2, 384, 128)
    assert layer.count_gain is None
    value = bundle.tensors["layers.0.proj_q"].float()
    if dtype == "float8_e4m3fn":
        value = value * bundle.tensors["layers.0.proj_q.__scale"][:, None, None]
    assert torch.equal(layer.proj_q, value.bfloat16())
