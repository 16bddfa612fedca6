"""Mode veda from request to output: plans, warnings, gates, and what is computed."""

import pytest
import torch

from nox_kernels import ops, route
from nox_kernels.attention import attend_layer, route_group
from nox_kernels.errors import RequestError
from nox_kernels.layout import TileShape, veda_layout
from nox_kernels.layout_table import preset_table
from nox_kernels.plan import Decision, make_plan
from nox_kernels.reference import dense_attention
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import Segment, Sequence, TokenGrid, t2va_sequence
from nox_kernels.veda.budget import Budget
from nox_kernels.veda.predictor import VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan
from tests.cases import relative_error

NUM_LAYERS, NUM_HEADS = 3, 4
SIZES = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}
SEQUENCE = t2va_sequence(320, 256, 39, 21)  # 12 x 8 x 10 tokens
KEYFRAME = t2va_sequence(320, 256, 39, 21, num_keyframes=1)
OTHER = t2va_sequence(256, 256, 39, 21)


def percent_to_sigma(percent):
    return 12 * (1 - percent) / (1 + 11 * (1 - percent))


def make_predictor(**settings):
    shapes = ("4x8x4", "2x8x8", "8x4x4")
    plan = random_plan("landscape", SEQUENCE.token_grid, shapes, **SIZES, seed=1)
    return VedaPredictor.from_bundle(random_bundle((plan,), **SIZES, **settings))


PREDICTOR = make_predictor()


def plan_of(sequence=SEQUENCE, predictor=PREDICTOR, dense=None, num_steps=20, **request):
    dense = dense or DenseRequest()
    sigmas = tuple(percent_to_sigma(step / num_steps) for step in range(num_steps + 1))
    return make_plan(
        AttentionRequest(**{"mode": "veda"} | request),
        dense,
        sequence,
        preset_table("uniform", NUM_LAYERS, NUM_HEADS),
        Schedule.resolve(sigmas, dense, percent_to_sigma),
        device="cpu",
        predictor=predictor,
        **SIZES,
    )


def inputs(sequence=SEQUENCE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, NUM_HEADS, sequence.num_rows, 128)
    return torch.randn(shape, generator=generator).bfloat16().unbind(0)


def kept_keys(layer, sequence, q, k):
    """[H, S, S] bool: the keys that each row sees."""
    keep = torch.empty(NUM_HEADS, sequence.num_rows, sequence.num_rows, dtype=torch.bool)
    for group in layer.groups:
        heads, layout = list(group.heads), group.layout
        mask = route_group(group, q[heads], k[heads]).mask(layout.num_kv_tiles)
        slot = layout.row_slot
        keep[heads] = mask[:, slot // 128][:, :, slot // 64]
    return keep


# ---- what is computed ----


@pytest.mark.parametrize(("precision", "limit"), [("accurate", 0.020), ("faithful", 0.045)])
def test_veda_matches_float64_over_the_keys_that_it_keeps(precision, limit):
    layer = plan_of(precision=precision).layer(1, "veda")
    assert len(layer.groups) == 2
    q, k, v = inputs()
    keep = kept_keys(layer, SEQUENCE, q, k)
    assert 0.1 < keep.float().mean() < 0.6
    out = attend_layer(layer, q, k, v).unflatten(1, (NUM_HEADS, 128)).transpose(0, 1)
    assert relative_error(out, dense_attention(q, k, v, keep)) < limit


def test_text_and_audio_see_all_and_are_seen_by_all():
    q, k, _ = inputs()
    keep = kept_keys(plan_of().layer(2, "veda"), SEQUENCE, q, k)
    assert keep[:, :, : SEQUENCE.video_start].all()
    assert keep[:, : SEQUENCE.video_start].all()
    assert not keep.all()


def test_each_row_sees_its_own_tile():
    q, k, _ = inputs()
    keep = kept_keys(plan_of(veda_keep_ratio=0.01).layer(0, "veda"), SEQUENCE, q, k)
    assert keep.diagonal(dim1=1, dim2=2).all()


@pytest.mark.parametrize("shape", ["4x4x8", "1x8x16"])
def test_every_tile_kept_through_gather_and_scatter_is_dense_attention(shape):
    # D8 23: two shapes of unequal padded length over one grid
    sequence = t2va_sequence(16 * 32, 8 * 32, 39, 21)
    sequence = Sequence(
        (
            *sequence.segments[:-1],
            Segment(sequence.video_start, sequence.video_start + 1408, "video"),
        ),
        TokenGrid(11, 8, 16),
    )
    layout = veda_layout(sequence, TileShape.parse(shape))
    assert layout.num_video_query_tiles == {"4x4x8": 12, "1x8x16": 11}[shape]
    q, k, v = inputs(sequence)
    images = ops.pack_tiles(
        q, k, v, layout.slot_row, layout.valid_count, precision="accurate", pooling="none"
    )
    bits = route.keep_all(layout, NUM_HEADS).bits
    out = ops.tile_attention(images, bits, layout.slot_row, layout.num_rows, dtype=torch.float32)[0]
    assert relative_error(out.transpose(0, 1), dense_attention(q, k, v)) < 0.020


@pytest.mark.parametrize("slices", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_head_slices_give_the_bits_of_the_whole(slices):
    layer = plan_of().layer(1, "veda")
    q, k, v = inputs()
    parts, start = [], 0
    for count in slices:
        part = slice(start, start + count)
        parts.append(attend_layer(layer.slice_heads(start, count), q[part], k[part], v[part]))
        start += count
    assert torch.equal(torch.cat(parts, 1), attend_layer(layer, q, k, v))


def test_a_whole_budget_is_dense():
    plan = plan_of(veda_keep_ratio=1.0)
    assert plan.decide(1, 0.1) == Decision("sage", "every tile kept")
    assert plan.kept_share == 1.0


def test_the_budget_of_the_request_goes_before_the_predictors_own():
    shares = [plan_of(veda_keep_ratio=ratio).kept_share for ratio in (0.0, 0.1, 0.3, 0.6)]
    assert shares[0] == shares[1] < shares[2] < shares[3] < 1.0


def test_kept_share_is_the_share_of_tile_pairs_in_the_selection():
    plan = plan_of()
    q, k, _ = inputs()
    for layer in plan.routed_layers:
        for group in layer.groups:
            heads, layout = list(group.heads), group.layout
            mask = route_group(group, q[heads], k[heads]).mask(layout.num_kv_tiles)
            pairs = mask.unflatten(2, (-1, 2)).any(3)
            assert pairs.float().mean().item() == pytest.approx(group.kept_share)


# ---- dense steps and blocks ----


def test_auto_keeps_the_first_step_alone_dense():
    plan = plan_of()
    kinds = [plan.decide(1, sigma).kind for sigma in plan.schedule.sigmas[:-1]]
    assert kinds == ["sage"] + ["veda"] * 19
    assert {plan.decide(0, sigma).kind for sigma in plan.schedule.sigmas[:-1]} == {"sage"}


def test_dense_steps_that_are_asked_for_go_before_auto():
    plan = plan_of(dense=DenseRequest(first_steps=3, last_steps=1, blocks=(2,), kernel="native"))
    kinds = [plan.decide(1, sigma).kind for sigma in plan.schedule.sigmas[:-1]]
    assert kinds == ["native"] * 3 + ["veda"] * 16 + ["native"]
    assert plan.decide(2, plan.schedule.sigmas[5]).kind == "native"


# ---- clips that the predictor does not know ----


def test_an_unknown_clip_is_refused_with_what_to_type():
    with pytest.raises(RequestError) as refusal:
        plan_of(OTHER)
    sentence = str(refusal.value)
    assert sentence.startswith("Veda has no plan for 256x256, 39 frames. Nearest: 320x256, 39 ")
    assert "mode sparse" in sentence


def test_an_unknown_clip_may_run_in_mode_sparse_instead():
    plan = plan_of(OTHER, on_unknown_geometry="sparse", keep_ratio=0.2)
    sparse = plan_of(OTHER, mode="sparse", keep_ratio=0.2)
    q, k, v = inputs(OTHER)
    for sigma in plan.schedule.sigmas[:-1]:
        assert plan.decide(1, sigma) == sparse.decide(1, sigma)
    assert torch.equal(
        attend_layer(plan.layer(1, "sparse"), q, k, v),
        attend_layer(sparse.layer(1, "sparse"), q, k, v),
    )
    (warning,) = plan.warnings
    assert warning.startswith("Veda has no plan for 256x256, 39 frames; mode sparse runs instead")


def test_an_unknown_clip_may_be_left_to_the_host():
    plan = plan_of(OTHER, on_unknown_geometry="dense")
    kinds = {plan.decide(idx, s).kind for idx in range(3) for s in plan.schedule.sigmas}
    assert kinds == {"native"}
    (warning,) = plan.warnings
    assert "mode dense runs instead" in warning


def test_a_known_clip_ignores_what_unknown_ones_do():
    for choice in ("error", "sparse", "dense"):
        plan = plan_of(on_unknown_geometry=choice)
        assert plan.veda_plan.name == "landscape"
        assert plan.warnings == ()


def test_a_missing_predictor_or_one_for_another_model_is_refused():
    with pytest.raises(RequestError, match="needs a predictor"):
        plan_of(predictor=None)
    two = {"num_layers": 2, "num_heads": NUM_HEADS}
    plan = random_plan("landscape", SEQUENCE.token_grid, ("4x8x4",), **two)
    other = VedaPredictor.from_bundle(random_bundle((plan,), **two, name="two.safetensors"))
    with pytest.raises(RequestError, match=r"two\.safetensors is for 2 layers of 4 heads"):
        plan_of(predictor=other)


# ---- conditions ----


def test_a_keyframe_is_outside_the_training_of_a_text_to_video_predictor():
    (warning,) = plan_of(KEYFRAME).warnings
    assert "outside its training" in warning


def test_a_predictor_that_tiles_conditions_routes_them_too():
    tiled = make_predictor(
        tile_conditions=True,
        target_budget=Budget("tiles", 2.0),
        condition_budget=Budget("tiles", 1.0),
    )
    plan = plan_of(KEYFRAME, tiled)
    assert plan.warnings == ()
    layer = plan.layer(1, "veda")
    # a frame of 8 x 10 tokens: the least tiles are one or two boxes of 1x8x16 or 1x16x8
    assert {group.layout.num_condition_tiles for group in layer.groups} == {1}
    q, k, _ = inputs(KEYFRAME)
    keep = kept_keys(layer, KEYFRAME, q, k)
    cond = KEYFRAME.segments[1]
    assert cond.kind == "cond"
    # its own block has one tile, which a budget of one keeps for every row
    assert keep[:, :, cond.start : cond.stop].all()
    # but the keyframe's own rows see few tiles of the video
    assert keep[:, cond.start : cond.stop, KEYFRAME.video_start :].float().mean() < 0.5
    whole = plan_of(KEYFRAME, make_predictor(target_budget=Budget("tiles", 2.0)))
    rows = kept_keys(whole.layer(1, "veda"), KEYFRAME, q, k)[:, cond.start : cond.stop]
    assert rows.all()


def test_a_condition_of_unknown_shape_cannot_be_tiled():
    tiled = make_predictor(tile_conditions=True, condition_budget=Budget("tiles", 1.0))
    segments = tuple(
        segment._replace(grid=None) if segment.kind == "cond" else segment
        for segment in KEYFRAME.segments
    )
    with pytest.raises(RequestError, match="do not form a grid"):
        plan_of(Sequence(segments, KEYFRAME.token_grid), tiled)


def with_reference(num_rows):
    """A clip with one visual reference."""
    video = SEQUENCE.token_grid.num_tokens
    stops = [16, 16 + num_rows, 56 + num_rows, 56 + num_rows + video]
    kinds = ("text", "ref_img", "audio", "video")
    starts = [0, *stops[:-1]]
    segments = tuple(map(Segment, starts, stops, kinds))
    return Sequence(segments, SEQUENCE.token_grid)


@pytest.mark.parametrize(
    ("num_rows", "is_routed", "remedy"),
    [
        (2048, False, "turn on route_references"),
        (2048, True, None),
        (200, False, None),
        # too small to be routed, and yet much beside this video
        (900, False, "give fewer or smaller ones"),
        (900, True, "give fewer or smaller ones"),
    ],
)
def test_references_that_cost_much_are_named_with_what_helps(num_rows, is_routed, remedy):
    plan = plan_of(with_reference(num_rows), mode="sparse", route_references=is_routed)
    assert len(plan.warnings) == (remedy is not None)
    if remedy:
        assert remedy in plan.warnings[0]


def test_routing_a_large_reference_computes_less():
    shares = [
        plan_of(with_reference(2048), mode="sparse", route_references=is_routed).kept_share
        for is_routed in (False, True)
    ]
    assert shares[1] < 0.7 * shares[0]
