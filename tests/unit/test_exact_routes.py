"""Exact routes: from a request to the kept keys of every row, against routers written out plainly.

Nothing of the project decides here what is right: tiles are lists of rows, scores are loops over
them in float64, and budgets are counted out by hand, straight from the description of each mode.
"""

import math
import random

import pytest
import torch

from nox_kernels import reference, route
from nox_kernels.attention import route_group
from nox_kernels.layout import MENU
from nox_kernels.layout_table import LayoutTable
from nox_kernels.plan import make_plan
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import Segment, Sequence, TokenGrid
from nox_kernels.veda.budget import Budget
from nox_kernels.veda.predictor import VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan

NUM_LAYERS, NUM_HEADS = 3, 3
SIZES = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}
CUBES = [
    (t, h, 128 // (t * h)) for t in (1, 2, 4, 8) for h in (1, 2, 4, 8, 16) if 128 % (t * h) == 0
]


def random_sequence(rng) -> Sequence:
    """Text, conditions in any order, perhaps audio, and a video of any grid."""
    parts = [("text", rng.choice((1, 63, 64, 65, 128, 200)), None)]
    for _ in range(rng.randint(0, 2)):
        kind = rng.choice(("cond", "cond_audio", "ref_img", "ref_audio"))
        grid = TokenGrid(rng.choice((1, 1, 3)), rng.randint(1, 9), rng.randint(1, 9))
        visual = kind in ("cond", "ref_img")
        parts.append((kind, grid.num_tokens, grid if visual else None))
    if rng.random() < 0.3:
        parts.append(("ref_img", 32 * 34, TokenGrid(1, 32, 34)))
    if rng.random() < 0.9:
        parts.append(("audio", rng.randint(1, 140), None))
    grid = TokenGrid(rng.choice((2, 3, 7, 12)), rng.randint(1, 11), rng.randint(1, 13))
    parts.append(("video", grid.num_tokens, grid))
    segments, row = [], 0
    for kind, num_rows, own_grid in parts:
        segments.append(Segment(row, row + num_rows, kind, own_grid))
        row += num_rows
    return Sequence(tuple(segments), grid)


def random_qk(sequence, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(sequence.num_rows, 2, NUM_HEADS, 128, generator=generator).to(dtype)
    return (buffer[:, part].transpose(0, 1) for part in range(2))


def kept_rows_of_groups(layer, q, k) -> list[dict[int, set[int]]]:
    """For each head: packed row -> the packed rows whose keys it sees."""
    seen = [{} for _ in range(NUM_HEADS)]
    for group in layer.groups:
        heads, layout = list(group.heads), group.layout
        rows = layout.slot_row.tolist()
        if group.rule is None:
            mask = torch.ones(len(heads), layout.num_query_tiles, layout.num_kv_tiles).bool()
        else:
            mask = route_group(group, q[heads], k[heads]).mask(layout.num_kv_tiles)
        for head, tiles in zip(heads, mask.tolist(), strict=True):
            for i, kept in enumerate(tiles):
                keys = {
                    row
                    for j, is_kept in enumerate(kept)
                    if is_kept
                    for row in rows[64 * j : 64 * j + 64]
                    if row >= 0
                }
                for row in rows[128 * i : 128 * i + 128]:
                    if row >= 0:
                        seen[head][row] = keys
    return seen


# ---- Veda, plainly -------------------------------------------------------------------------------


def boxes(start, grid, shape):
    """Rows of each tile: h block outermost, then w block, t block fastest."""
    (t, h, w), (tt, th, tw) = grid, shape
    return [
        [
            start + (i * h + j) * w + n
            for i in range(t0, min(t, t0 + tt))
            for j in range(h0, min(h, h0 + th))
            for n in range(w0, min(w, w0 + tw))
        ]
        for h0 in range(0, h, th)
        for w0 in range(0, w, tw)
        for t0 in range(0, t, tt)
    ]


def least_padding(grid):
    menu = [(1 << a, 1 << b, 128 >> (a + b)) for a in range(8) for b in range(8) if a + b <= 7]
    fitting = [s for s in menu if all(n <= m for n, m in zip(s, grid, strict=True))] or menu
    return min(fitting, key=lambda s: (len(boxes(0, grid, s)), max(s) / min(s), s))


def statistics(x, tile):
    rows = x[tile].double()
    mean = rows.mean(0)
    return mean, rows.amax(0), rows.amin(0), rows.square().mean(0), (rows - mean).square().mean(0)


def plain_veda(q, k, sequence, shape, weights, target, conditions):
    """packed row -> keys that it sees, for one head; `weights` by name, as float64."""
    tiles = []
    for segment in sequence.segments[:-1]:
        if conditions is not None and segment.kind in ("cond", "ref_img"):
            tiles += boxes(segment.start, segment.grid, least_padding(segment.grid))
    num_conditions = len(tiles)
    tiles += boxes(sequence.video_start, sequence.token_grid, shape)
    num_video = len(tiles)
    tiled = {row for tile in tiles for row in tile}
    rest = [row for row in range(sequence.num_rows) if row not in tiled]
    tiles += [rest[n : n + 128] for n in range(0, len(rest), 128)]

    def embed(x, proj):
        parts = [statistics(x, tile) for tile in tiles[:num_video]]
        hat = torch.stack([torch.cat(part[:3]) @ weights[proj] + part[0] for part in parts])
        return hat, torch.stack([p[3] for p in parts]), torch.stack([p[4] for p in parts])

    q_hat, q_square, _ = embed(q, "proj_q")
    k_hat, _, k_variance = embed(k, "proj_k")
    logit = q_hat @ k_hat.T / math.sqrt(128)
    if "count_gain" in weights:
        count = torch.tensor([len(tile) for tile in tiles[:num_video]], dtype=torch.float64)
        logit += weights["count_gain"] * count.log()
    if "so_q" in weights:
        logit += (q_square @ weights["so_q"]) @ (k_variance @ weights["so_k"]).T

    kept = [set(range(num_video, len(tiles))) for _ in tiles]
    for row in range(num_video, len(tiles)):
        kept[row] = set(range(len(tiles)))
    blocks = [(num_conditions, num_video, target)]
    if num_conditions:
        blocks.append((0, num_conditions, conditions))
    for start, stop, (kind, value) in blocks:
        num_cols = stop - start
        num_ideal = math.ceil(sum(map(len, tiles[start:stop])) / 128)
        mean = value if kind == "tiles" else value * num_ideal**2 / num_cols
        if kind == "ratio" and value >= 1:
            mean = num_cols
        low = min(max(math.floor(mean), 1), num_cols)
        share = round(min(max(mean - low, 0.0), 1.0), 12) if mean < num_cols else 0.0
        low = num_cols if mean >= num_cols else low
        for row in range(num_video):
            extra = math.floor((row + 1) * share) > math.floor(row * share)
            score = {
                col: math.inf if col == row else float(logit[row, col].float())
                for col in range(start, stop)
            }
            best = sorted(score, key=lambda col, score=score: (-score[col], col))
            kept[row] |= set(best[: min(low + extra, num_cols)])
    return {
        row: {key for col in kept[n] for key in tiles[col]}
        for n, tile in enumerate(tiles)
        for row in tile
    }


@pytest.mark.parametrize("seed", range(16))
def test_veda_keeps_what_a_plain_router_keeps(monkeypatch, seed):
    rng = random.Random(seed)
    for module in (reference, route):
        monkeypatch.setattr(module, "ELEMENTS_PER_CHUNK", rng.choice((1, 4000, 1 << 24)))
    sequence = random_sequence(rng)
    budgets = [
        rng.choice(
            (
                Budget("ratio", rng.choice((0.03, 0.3, 0.9))),
                Budget("tiles", 1.5),
                Budget("tiles", 2.3),
            )
        )
        for _ in range(2)
    ]
    tiled = rng.random() < 0.5
    shapes = tuple("x".join(map(str, shape)) for shape in rng.sample(CUBES, 3))
    plan = random_plan("clip", sequence.token_grid, shapes, **SIZES, seed=seed)
    bundle = random_bundle(
        (plan,),
        **SIZES,
        dtype=rng.choice(("float32", "bfloat16", "float8_e4m3fn")),
        seed=seed,
        target_budget=budgets[0],
        condition_budget=budgets[1] if tiled else None,
        tile_conditions=tiled,
        second_order_rank=rng.choice((0, 3)),
        count_term=rng.random() < 0.5,
    )
    predictor = VedaPredictor.from_bundle(bundle)
    asked = rng.choice((0.0, 0.0, 0.25))
    if asked:
        budgets = [Budget("ratio", asked)] * 2
    nox_plan = plan_of(
        AttentionRequest("veda", veda_keep_ratio=asked), sequence, raster_everywhere(), predictor
    )
    q, k = random_qk(sequence, seed, rng.choice((torch.bfloat16, torch.float16, torch.float32)))
    layer_idx = rng.randrange(NUM_LAYERS)
    found = kept_rows_of_groups(nox_plan.routed_layers[layer_idx], q, k)
    for head in range(NUM_HEADS):
        named = dict(predictor.layers[layer_idx].named_parameters())
        weights = {name: weight[head].double() for name, weight in named.items()}
        shape = plan.shapes[plan.head_shape[layer_idx][head]]
        conditions = budgets[1] if tiled else None
        expected = plain_veda(q[head], k[head], sequence, shape, weights, budgets[0], conditions)
        assert found[head] == expected


# ---- mode sparse, plainly ------------------------------------------------------------------------


def plain_order(grid, name):
    """Video tokens in the order of a layout."""
    cells = [(t, h, w) for t in range(grid.t) for h in range(grid.h) for w in range(grid.w)]
    if name == "raster":
        return list(range(len(cells)))
    box = [int(edge) for edge in name.split("x")]

    def key(token):
        cell = cells[token]
        block = [n // b for n, b in zip(cell, box, strict=True)]
        sticks_out = any((n + 1) * b > m for n, b, m in zip(block, box, grid, strict=True))
        return sticks_out, block, [n % b for n, b in zip(cell, box, strict=True)]

    return sorted(range(len(cells)), key=key)


def plain_sparse(q, k, sequence, name, request):
    """packed row -> keys that it sees, for one head."""
    video = [sequence.video_start + token for token in plain_order(sequence.token_grid, name)]
    tail = list(range(sequence.video_start))
    query_tiles = [
        (rows[n : n + 128], is_tail)
        for rows, is_tail in ((video, False), (tail, True))
        for n in range(0, len(rows), 128)
    ]
    key_tiles = [video[n : n + 64] for n in range(0, len(video), 64)]
    pools = [list(range(len(key_tiles)))]
    num_video_tiles = len(key_tiles)
    for n in range(0, len(tail), 64):
        key_tiles.append(tail[n : n + 64])
    for segment in sequence.segments:
        if request.route_references and segment.kind == "ref_img" and segment.num_rows >= 1024:
            inside = range(segment.start, segment.stop)
            pools.append(
                [
                    j
                    for j, tile in enumerate(key_tiles)
                    if j >= num_video_tiles and len(tile) == 64 and all(r in inside for r in tile)
                ]
            )
    audio = {r for s in sequence.segments if s.kind == "audio" for r in range(s.start, s.stop)}
    k_mean = torch.stack([k[tile].double().mean(0) for tile in key_tiles])
    seen = {}
    for rows, is_tail in query_tiles:
        competing = {j for pool in pools for j in pool}
        own = {j for j, tile in enumerate(key_tiles) if set(tile) <= set(rows)}
        kept = set(range(len(key_tiles))) - competing | own
        dense = {
            "audio_dense": not audio.isdisjoint(rows),
            "all_dense": is_tail,
            "all_routed": False,
        }[request.nonvideo_queries]
        if dense:
            kept = set(range(len(key_tiles)))
        score = (q[rows].double().mean(0) @ k_mean.T).float().tolist()
        num_forced = len(kept)
        for idx, pool in enumerate(pools):
            num_kept = max(1, math.ceil(request.keep_ratio * len(pool) - 1e-9))
            if request.budget_base == "all_keys" and idx == 0:
                total = math.ceil(request.keep_ratio * len(key_tiles) - 1e-9)
                num_kept = max(1, total - num_forced)
            rest = sorted(set(pool) - own, key=lambda j: (-score[j], j))
            kept |= set(rest[:num_kept]) if not dense else set()
        keys = {row for j in kept for row in key_tiles[j]}
        seen.update(dict.fromkeys(rows, keys))
    return seen


@pytest.mark.parametrize("seed", range(16))
def test_sparse_keeps_what_a_plain_router_keeps(monkeypatch, seed):
    rng = random.Random(seed)
    for module in (reference, route):
        monkeypatch.setattr(module, "ELEMENTS_PER_CHUNK", rng.choice((1, 4000, 1 << 24)))
    sequence = random_sequence(rng)
    request = AttentionRequest(
        "sparse",
        keep_ratio=rng.choice((0.01, 0.15, 0.4, 0.8)),
        nonvideo_queries=rng.choice(("audio_dense", "all_dense", "all_routed")),
        budget_base=rng.choice(("video", "all_keys")),
        route_references=rng.random() < 0.5,
    )
    choices = tuple(
        tuple(rng.randrange(len(MENU)) for _ in range(NUM_HEADS)) for _ in range(NUM_LAYERS)
    )
    plan = plan_of(request, sequence, LayoutTable("any", MENU, choices, choices))
    q, k = random_qk(sequence, seed, rng.choice((torch.bfloat16, torch.float16, torch.float32)))
    layer_idx = rng.randrange(NUM_LAYERS)
    found = kept_rows_of_groups(plan.routed_layers[layer_idx], q, k)
    for head in range(NUM_HEADS):
        name = MENU[choices[layer_idx][head]]
        assert found[head] == plain_sparse(q[head], k[head], sequence, name, request)


def raster_everywhere() -> LayoutTable:
    choices = ((0,) * NUM_HEADS,) * NUM_LAYERS
    return LayoutTable("raster", ("raster",), choices, choices)


def plan_of(request, sequence, table, predictor=None):
    dense = DenseRequest(first_steps=0, blocks=())
    return make_plan(
        request,
        dense,
        sequence,
        table,
        Schedule.resolve((1.0, 0.0), dense, lambda percent: 1.0 - percent),
        device="cpu",
        predictor=predictor,
        **SIZES,
    )


# ---- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 700, 5000, 60_000])
def test_the_pieces_of_a_route_do_not_show_in_it(monkeypatch, elements):
    # 13 query tiles by 26 scored tiles, 3 heads: from a piece per row to all in one
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, n, 8, generator=generator) for n in (13, 26))
    rule = route.Rule(
        torch.rand(13, 26, generator=generator) < 0.1,
        (
            route.Pool(0, 20, torch.rand(13, 20, generator=generator) < 0.8, torch.arange(13)),
            route.Pool(20, 26, torch.ones(13, 6).bool(), torch.arange(13) % 3),
        ),
        torch.ones(26).bool(),
    )
    whole = route.keep_best(route.score_tiles(q, k), rule).bits
    monkeypatch.setattr(route, "ELEMENTS_PER_CHUNK", elements)
    assert torch.equal(route.select(q, k, rule).bits, whole)


@pytest.mark.parametrize("elements", [1, 3000, 20_000])
def test_the_pieces_of_pooling_do_not_show_in_it(monkeypatch, elements):
    x = torch.randn(3, 300, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    slot_row = torch.full((40 * 8,), -1, dtype=torch.int32)
    slot_row[:300] = torch.randperm(300, generator=torch.Generator().manual_seed(1)).int()
    count = (slot_row.view(40, 8) >= 0).sum(1)
    whole = reference.pool_tiles(x, slot_row, count, "variance")
    monkeypatch.setattr(reference, "ELEMENTS_PER_CHUNK", elements)
    assert torch.equal(reference.pool_tiles(x, slot_row, count, "variance"), whole)
