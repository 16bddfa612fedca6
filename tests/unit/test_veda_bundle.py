"""Veda bundles: what a file says, what its numbers mean, and that saving changes nothing."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nox_kernels.errors import RequestError
from nox_kernels.layout import TileShape
from nox_kernels.sequence import TokenGrid
from nox_kernels.veda.budget import Budget
from nox_kernels.veda.bundle import Bundle, dequantise, quantise, read_bundle, write_bundle
from nox_kernels.veda.predictor import VedaPredictor
from nox_kernels.veda.synthetic import random_bundle, random_plan

ROOT = Path(__file__).parents[2]

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 4, 128
FP8 = torch.float8_e4m3fn
TINY = 2.0**-126  # the smallest normal float32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3fn": FP8}

# The twelve grids of the released bundle: four ratios at T 37, 72 and 102.
RATIOS = {"16x9": (24, 42), "9x16": (42, 24), "4x3": (24, 32), "1x1": (24, 24)}
CANVASES = {"16x9": "1344x768", "9x16": "768x1344", "4x3": "1024x768", "1x1": "768x768"}
FRAMES_OF = {37: 124, 72: 243, 102: 345}
RELEASED = {
    f"{ratio}_t{t}": TokenGrid(t, *extent) for ratio, extent in RATIOS.items() for t in FRAMES_OF
}


# ---- files built without the project's writer ----


def make_plan(
    grid, shapes=("8x4x4", "2x8x8"), *, layers=NUM_LAYERS, heads=NUM_HEADS, head_shape=None
):
    """Plan JSON; by default heads alternate between the first two shapes."""
    if head_shape is None:
        kinds = min(2, len(shapes))
        head_shape = [[(i + h) % kinds for h in range(heads)] for i in range(layers)]
    return {
        "geometry": "{}x{}x{}".format(*grid),
        "grid": list(grid),
        "shapes": list(shapes),
        "head_shape": head_shape,
        "provenance": {"search": "by hand"},
    }


def released_plans():
    return {name: {**make_plan(grid), "geometry": name} for name, grid in RELEASED.items()}


def make_metadata(plans=None, **changes):
    """Metadata of a small ratio bundle; None as a change removes the key."""
    metadata = {
        "format": "miowtion-veda-predictor-v1",
        "num_layers": str(NUM_LAYERS),
        "num_heads": str(NUM_HEADS),
        "head_dim": str(HEAD_DIM),
        "dtype": "float32",
        "keep_ratio": "0.1",
        "plans": json.dumps(plans or {"wide": make_plan((37, 24, 42))}),
    }
    metadata.update(changes)
    return {key: value for key, value in metadata.items() if value is not None}


def make_tensors(
    dtype="float32",
    *,
    layers=NUM_LAYERS,
    heads=NUM_HEADS,
    rank=0,
    count_term=False,
    scalar_gain=False,
):
    """Random tensors of a bundle; fp8 ones get random scales, so that no scale is 1."""
    rng = torch.Generator().manual_seed(7)
    shapes = {}
    for i in range(layers):
        shapes[f"layers.{i}.proj_q"] = (heads, 3 * HEAD_DIM, HEAD_DIM)
        shapes[f"layers.{i}.proj_k"] = (heads, 3 * HEAD_DIM, HEAD_DIM)
        if rank:
            shapes[f"layers.{i}.so_q"] = (heads, HEAD_DIM, rank)
            shapes[f"layers.{i}.so_k"] = (heads, HEAD_DIM, rank)
        if count_term:
            shapes[f"layers.{i}.count_gain"] = (heads,)
    tensors = {}
    for key, shape in shapes.items():
        x = torch.randn(shape, generator=rng)
        if dtype != "float8_e4m3fn":
            tensors[key] = x.to(DTYPES[dtype])
            continue
        tensors[key] = (60 * x).clamp(-448, 448).to(FP8)
        scale_shape = () if scalar_gain and len(shape) == 1 else (heads,)
        tensors[f"{key}.__scale"] = 1e-3 + torch.rand(scale_shape, generator=rng)
    return tensors


def save(path, metadata=None, tensors=None):
    save_file(tensors or make_tensors(), str(path), metadata=metadata or make_metadata())
    return path


def read_saved(tmp_path, metadata=None, tensors=None):
    return read_bundle(save(tmp_path / "small.safetensors", metadata, tensors))


def info_of(tmp_path, plans=None, **changes):
    return read_saved(tmp_path, make_metadata(plans, **changes)).info


def bits(x):
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


# ---- metadata ----


def test_a_ratio_bundle_is_read_key_by_key(tmp_path):
    info = info_of(tmp_path)
    assert info.name == "small.safetensors"
    assert (info.num_layers, info.num_heads, info.head_dim) == (2, 4, 128)
    assert info.dtype == "float32"
    assert info.target_budget == Budget("ratio", 0.1)
    assert info.condition_budget is None
    assert info.tile_conditions is False
    assert info.second_order_rank == 0
    assert info.count_term is False
    assert [plan.name for plan in info.plans] == ["wide"]


def test_a_path_may_be_a_string(tmp_path):
    path = save(tmp_path / "small.safetensors")
    assert read_bundle(str(path)).info.name == "small.safetensors"


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_newer_families_are_read_from_one_file(tmp_path, dtype):
    metadata = make_metadata(
        dtype=dtype,
        keep_ratio=None,
        target_budget_kind="tiles",
        target_budget_value="32",
        ref_budget_kind="ratio",
        ref_budget_value="0.25",
        tile_conditions="true",
        second_order_rank="8",
        count_term="1",
    )
    tensors = make_tensors(dtype, rank=8, count_term=True)
    bundle = read_saved(tmp_path, metadata, tensors)
    info = bundle.info
    assert info.dtype == dtype
    assert info.target_budget == Budget("tiles", 32.0)
    assert info.condition_budget == Budget("ratio", 0.25)
    assert info.tile_conditions is True
    assert info.second_order_rank == 8
    assert info.count_term is True
    assert set(bundle.tensors) == set(tensors)


@pytest.mark.parametrize(("rank", "count_term"), [(4, False), (0, True)])
def test_a_second_order_term_and_a_count_term_need_not_come_together(tmp_path, rank, count_term):
    metadata = make_metadata(second_order_rank=str(rank), count_term=str(int(count_term)))
    info = read_saved(tmp_path, metadata, make_tensors(rank=rank, count_term=count_term)).info
    assert (info.second_order_rank, info.count_term) == (rank, count_term)


@pytest.mark.parametrize("rank", [1, 128])
def test_a_rank_may_reach_the_head_dim(tmp_path, rank):
    metadata = make_metadata(second_order_rank=str(rank))
    assert read_saved(tmp_path, metadata, make_tensors(rank=rank)).info.second_order_rank == rank


def test_a_file_without_a_dtype_is_float32(tmp_path):
    bundle = read_saved(tmp_path, make_metadata(dtype=None))
    assert bundle.info.dtype == "float32"
    assert all(x.dtype == torch.float32 for x in bundle.tensors.values())


def test_a_no_that_is_written_out_means_the_same_as_an_absent_key(tmp_path):
    info = info_of(tmp_path, tile_conditions="false", second_order_rank="0", count_term="0")
    assert (info.tile_conditions, info.second_order_rank, info.count_term) == (False, 0, False)
    assert info.condition_budget is None


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({"keep_ratio": "0.1"}, ("ratio", 0.1)),
        ({"keep_ratio": "1"}, ("ratio", 1.0)),
        ({"target_budget_kind": "tiles", "target_budget_value": "32.0"}, ("tiles", 32.0)),
        ({"target_budget_kind": "tiles", "target_budget_value": "1.5"}, ("tiles", 1.5)),
        ({"target_budget_kind": "ratio", "target_budget_value": "0.2"}, ("ratio", 0.2)),
        ({"target_budget_kind": "ratio", "target_budget_value": "1.5"}, ("ratio", 1.5)),
    ],
)
def test_a_target_budget_wins_over_the_keep_ratio(tmp_path, changes, budget):
    # The default metadata carries keep_ratio 0.1 too.
    got = info_of(tmp_path, **changes).target_budget
    assert got == Budget(*budget)
    assert isinstance(got.value, float)


def test_a_target_budget_does_without_a_keep_ratio(tmp_path):
    changes = {"keep_ratio": None, "target_budget_kind": "ratio", "target_budget_value": "0.3"}
    assert info_of(tmp_path, **changes).target_budget == Budget("ratio", 0.3)


def test_provenance_and_unknown_keys_are_kept_and_change_nothing(tmp_path):
    provenance = {
        "source": "runs/17",
        "source_weights": "leap0.5",
        "step": "600",
        "training_step": "600",
        "schedule": "t2va-8",
        "num_steps": "8",
        "variant": "t2va",
        "teacher_adapter": "turbo \u6d4b\u8bd5",
    }
    unknown = {"mood": "good", "keep_ratio_v9": "-1", "budget": "nan", "": "empty"}
    metadata = make_metadata(**provenance) | unknown
    info = read_saved(tmp_path, metadata).info
    assert info.metadata == metadata
    plain = info_of(tmp_path)
    assert info.target_budget == plain.target_budget
    assert info.plans == plain.plans


def test_what_a_file_says_cannot_be_changed_by_accident(tmp_path):
    info = info_of(tmp_path)
    with pytest.raises(AttributeError):
        info.num_layers = 50


# ---- plans ----


def test_a_plan_is_read_field_by_field(tmp_path):
    head_shape = [[2, 0, 0, 2], [1, 1, 1, 1]]
    plan = make_plan((37, 24, 42), ("8x4x4", "2x8x8", "4x8x4"), head_shape=head_shape)
    plan |= {"geometry": "16x9_t37", "provenance": {"mass": [0.61, 0.63], "by": "search"}}
    (got,) = info_of(tmp_path, {"wide": plan}).plans
    assert got.name == "wide"
    assert got.geometry == "16x9_t37"
    assert got.grid == TokenGrid(37, 24, 42)
    assert isinstance(got.grid, TokenGrid)
    assert got.shapes == (TileShape(8, 4, 4), TileShape(2, 8, 8), TileShape(4, 8, 4))
    assert all(isinstance(shape, TileShape) for shape in got.shapes)
    assert got.head_shape == ((2, 0, 0, 2), (1, 1, 1, 1))
    assert got.provenance == {"mass": [0.61, 0.63], "by": "search"}


@pytest.mark.parametrize(
    ("row", "groups"),
    [
        ([0, 1, 1, 0], (("8x4x4", (0, 3)), ("2x8x8", (1, 2)))),
        ([1, 0, 0, 1], (("8x4x4", (1, 2)), ("2x8x8", (0, 3)))),
        ([2, 1, 1, 2], (("2x8x8", (1, 2)), ("4x8x4", (0, 3)))),
        ([2, 2, 2, 2], (("4x8x4", (0, 1, 2, 3)),)),
        ([2, 0, 2, 2], (("8x4x4", (1,)), ("4x8x4", (0, 2, 3)))),
    ],
)
def test_heads_group_by_shape_in_the_order_of_the_shapes(tmp_path, row, groups):
    plan = make_plan((37, 24, 42), ("8x4x4", "2x8x8", "4x8x4"), head_shape=[[1, 1, 1, 1], row])
    (got,) = info_of(tmp_path, {"wide": plan}).plans
    expected = tuple((TileShape.parse(name), heads) for name, heads in groups)
    assert tuple((shape, tuple(heads)) for shape, heads in got.groups(1)) == expected
    assert tuple(got.groups(0)[0][1]) == (0, 1, 2, 3)


def test_every_shape_of_128_tokens_is_accepted(tmp_path):
    powers = [2**i for i in range(8)]
    names = [f"{t}x{h}x{128 // (t * h)}" for t in powers for h in powers if t * h <= 128]
    assert len(names) == 36
    plans = {
        f"p{i}": make_plan((2 + 5 * i, 24, 42), (names[2 * i], names[2 * i + 1])) for i in range(18)
    }
    got = {str(shape) for plan in info_of(tmp_path, plans).plans for shape in plan.shapes}
    assert got == set(names)


def test_a_plan_may_list_more_than_two_shapes_as_long_as_no_layer_mixes_three(tmp_path):
    head_shape = [[0, 1, 1, 0], [2, 3, 2, 3]]
    names = ("8x4x4", "2x8x8", "4x8x4", "8x8x2", "1x8x16")
    (got,) = info_of(
        tmp_path, {"wide": make_plan((37, 24, 42), names, head_shape=head_shape)}
    ).plans
    assert [str(shape) for shape in got.shapes] == list(names)


def test_a_released_grid_gets_its_own_plan(tmp_path):
    info = info_of(tmp_path, released_plans())
    assert {plan.name for plan in info.plans} == set(RELEASED)
    for name, grid in RELEASED.items():
        plan = info.plan_for(grid)
        assert (plan.name, plan.geometry, plan.grid) == (name, name, grid)


@pytest.mark.parametrize(
    "grid", [(36, 24, 42), (42, 24, 42), (37, 24, 41), (37, 42, 42), (37, 15, 27), (102, 32, 24)]
)
def test_a_grid_near_a_released_one_gets_no_plan(tmp_path, grid):
    assert info_of(tmp_path, released_plans()).plan_for(TokenGrid(*grid)) is None


@pytest.mark.parametrize("grid", [(37, 42, 24), (72, 24, 42), (42, 37, 24)])
def test_neither_the_mirrored_ratio_nor_another_duration_is_stood_in_for(tmp_path, grid):
    assert info_of(tmp_path).plan_for(TokenGrid(*grid)) is None


def frames_named_after(sentence, canvas, canvases):
    """The numbers between the last mention of one canvas and that of the next."""
    found = {name: list(re.finditer(rf"(?<!\d){name}(?!\d)", sentence)) for name in canvases}
    assert all(found.values()), sentence
    start = found[canvas][-1].end()
    stops = [matches[-1].start() for matches in found.values() if matches[-1].start() > start]
    part = sentence[start : min(stops, default=len(sentence))]
    return {int(number) for number in re.findall(r"\d+", part)}


@pytest.mark.parametrize(
    ("grid", "canvas", "frames"),
    [
        ((37, 15, 27), "864x480", "124 frames"),  # the odd rows and columns of a draft
        ((42, 24, 42), "1344x768", "141 frames"),
        ((107, 24, 24), "768x768", "362 frames"),
    ],
)
def test_an_unknown_geometry_is_answered_with_what_is_known(tmp_path, grid, canvas, frames):
    sentence = info_of(tmp_path, released_plans()).unknown_geometry(TokenGrid(*grid))
    assert canvas in sentence
    assert frames in sentence
    assert "mode sparse" in sentence
    assert "\n" not in sentence
    for known in CANVASES.values():
        assert re.search(rf"(?<!\d){known}(?!\d)", sentence)
    for count in FRAMES_OF.values():
        assert re.search(rf"(?<!\d){count}(?!\d)", sentence)


def test_each_known_canvas_is_named_with_its_own_frame_counts(tmp_path):
    plans = {
        "a": make_plan((37, 24, 42)),
        "b": make_plan((72, 24, 24)),
        "c": make_plan((102, 24, 42)),
        "d": make_plan((42, 24, 24)),
        "e": make_plan((72, 42, 24)),
    }
    sentence = info_of(tmp_path, plans).unknown_geometry(TokenGrid(37, 15, 27))
    expected = {"1344x768": {124, 345}, "768x768": {141, 243}, "768x1344": {243}}
    for canvas, frames in expected.items():
        assert frames_named_after(sentence, canvas, expected) == frames, sentence
    assert "1024x768" not in sentence


# ---- model ----


@pytest.mark.parametrize(
    "counts", [(50, 56, 128), (2, 56, 128), (50, 4, 128), (2, 4, 64), (4, 2, 128), (3, 4, 128)]
)
def test_a_model_of_another_size_is_refused_with_both_sets_of_counts(tmp_path, counts):
    info = info_of(tmp_path)
    with pytest.raises(RequestError) as refusal:
        info.check_model(*counts)
    numbers = set(map(int, re.findall(r"\d+", str(refusal.value))))
    assert set(counts) <= numbers
    assert {NUM_LAYERS, NUM_HEADS, HEAD_DIM} <= numbers
    assert "\n" not in str(refusal.value)


def test_a_model_of_the_same_size_is_accepted(tmp_path):
    assert info_of(tmp_path).check_model(NUM_LAYERS, NUM_HEADS, HEAD_DIM) is None


# ---- tensors ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_read_exactly_as_they_are_in_the_file(tmp_path, dtype):
    tensors = make_tensors(dtype, rank=4, count_term=True)
    metadata = make_metadata(dtype=dtype, second_order_rank="4", count_term="1")
    got = read_saved(tmp_path, metadata, tensors).tensors
    assert set(got) == set(tensors)
    for key, x in tensors.items():
        assert same_bits(got[key], x), key


def decoded(code):
    """The number behind an e4m3fn code, from its bits."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_every_finite_code_is_dequantised_by_its_heads_scale_and_rounded_once_to_bfloat16():
    codes = [code for code in range(256) if code & 127 != 127]
    scale = torch.tensor([1.0, 0.3, 2.0**-10, 1.7e-5])
    values = torch.tensor(codes, dtype=torch.uint8).view(FP8).expand(4, 1, 254).contiguous()
    got = dequantise({"layers.0.proj_q": values, "layers.0.proj_q.__scale": scale})
    assert list(got) == ["layers.0.proj_q"]
    exact = torch.tensor([decoded(code) for code in codes], dtype=torch.float32)
    expected = (exact[None, None] * scale[:, None, None]).to(torch.bfloat16)
    assert same_bits(got["layers.0.proj_q"], expected)


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25, 0.5, 1.0, 2.0])])
def test_a_gain_per_head_takes_one_scale_or_one_per_head(scale):
    values = torch.tensor([1.0, -2.0, 3.0, 448.0]).to(FP8)
    got = dequantise({"layers.0.count_gain": values, "layers.0.count_gain.__scale": scale})
    expected = (torch.tensor([1.0, -2.0, 3.0, 448.0]) * scale).to(torch.bfloat16)
    assert same_bits(got["layers.0.count_gain"], expected)


def test_a_file_may_give_its_fp8_gains_one_scale_in_all(tmp_path):
    tensors = make_tensors("float8_e4m3fn", count_term=True, scalar_gain=True)
    metadata = make_metadata(dtype="float8_e4m3fn", count_term="1")
    bundle = read_saved(tmp_path, metadata, tensors)
    assert bundle.tensors["layers.1.count_gain.__scale"].shape == ()
    got = dequantise(bundle.tensors)["layers.1.count_gain"]
    expected = tensors["layers.1.count_gain"].float() * tensors["layers.1.count_gain.__scale"]
    assert same_bits(got, expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_fp8_stay_as_they_are(dtype):
    tensors = make_tensors(dtype, rank=4, count_term=True)
    got = dequantise(tensors)
    assert set(got) == set(tensors)
    for key, x in tensors.items():
        assert same_bits(got[key], x), key


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantising_leaves_the_bundle_as_it_was(tmp_path, dtype):
    bundle = read_saved(tmp_path, make_metadata(dtype=dtype), make_tensors(dtype))
    before = {key: x.clone() for key, x in bundle.tensors.items()}
    dequantise(bundle.tensors)
    assert set(bundle.tensors) == set(before)
    assert all(same_bits(bundle.tensors[key], x) for key, x in before.items())


# ---- writer rule of fp8 ----


def planted(num_heads=4):
    return torch.zeros(num_heads, 3 * HEAD_DIM, HEAD_DIM)


def quantised(x):
    got = quantise({"layers.0.proj_q": x})
    assert set(got) == {"layers.0.proj_q", "layers.0.proj_q.__scale"}
    values, scale = got["layers.0.proj_q"], got["layers.0.proj_q.__scale"]
    assert (values.dtype, scale.dtype) == (FP8, torch.float32)
    assert (values.shape, scale.shape) == (x.shape, x.shape[:1])
    return values, scale


def test_a_head_is_scaled_so_that_its_largest_weight_is_448():
    x = planted()
    x[0, 5, 6], x[0, 0, 1] = 0.4375, 0.05
    x[1, 383, 127], x[1, 0, 1] = -0.4375, -0.05
    x[2, 1, 1] = 448.0
    x[3, 0, 0] = -7 * 2.0**20
    values, scale = quantised(x)
    assert scale.tolist() == [2.0**-10, 2.0**-10, 1.0, 2.0**14]
    assert values[0, 5, 6].item() == 448
    assert values[0, 0, 1].item() == 52  # 51.2, between 48 and 52
    assert values[1, 383, 127].item() == -448
    assert values[1, 0, 1].item() == -52
    back = dequantise(quantise({"layers.0.proj_q": x}))["layers.0.proj_q"]
    assert back[0, 0, 1].item() == 0.05078125
    assert back[0, 5, 6].item() == 0.4375


@pytest.mark.parametrize(("ratio", "code"), [(50, 48), (54, 56), (-50, -48), (17, 16)])
def test_a_weight_halfway_between_two_codes_goes_to_the_even_one(ratio, code):
    x = planted()
    x[:, 0, 0], x[:, 0, 1] = 28.0, ratio * 2.0**-4  # scale 2^-4
    values, _ = quantised(x)
    assert values[:, 0, 1].tolist() == [code] * 4


def test_a_head_of_zeros_stays_zero():
    x = planted()
    x[1, 0, 0] = 1.0
    values, scale = quantised(x)
    assert scale[0].item() == TINY
    assert bits(values[0]).count_nonzero() == 0
    back = dequantise(quantise({"layers.0.proj_q": x}))["layers.0.proj_q"]
    assert not back.isnan().any()
    assert back[0].count_nonzero() == 0


def test_a_scale_never_falls_below_the_smallest_normal_number():
    x = planted()
    x[0, 0, 0], x[1, 0, 0], x[2, 0, 0], x[3, 0, 0] = 1e-36, 1e-40, 448 * TINY, 896 * TINY
    values, scale = quantised(x)
    assert scale.tolist() == [TINY, TINY, TINY, 2 * TINY]
    assert not values.float().isnan().any()


def test_random_weights_follow_the_writer_rule_bit_for_bit():
    x = torch.randn(8, 384, 128, generator=torch.Generator().manual_seed(3))
    x *= 10.0 ** torch.arange(-6, 2)[:, None, None]  # heads of very different size
    values, scale = quantised(x)
    largest = x.abs().amax(dim=(1, 2))
    assert torch.equal(scale, largest / 448)
    assert same_bits(values, (x / scale[:, None, None]).to(FP8))
    assert values.float().abs().amax(dim=(1, 2)).tolist() == [448.0] * 8


def test_a_gain_per_head_survives_fp8_within_its_rounding():
    gain = torch.tensor([0.0, 1.0, -0.7, 1e-3])
    got = quantise({"layers.0.count_gain": gain})
    assert set(got) == {"layers.0.count_gain", "layers.0.count_gain.__scale"}
    assert got["layers.0.count_gain"].dtype == FP8
    assert got["layers.0.count_gain.__scale"].shape in ((), (4,))
    back = dequantise(got)["layers.0.count_gain"].float()
    torch.testing.assert_close(back, gain, rtol=0.07, atol=1e-6)


# ---- saving ----


def assert_saving_keeps_every_byte(path):
    """Load, save, load, save: both copies equal the file."""
    original = path.read_bytes()
    for name in ("once.safetensors", "twice.safetensors"):
        copy = path.with_name(name)
        write_bundle(copy, read_bundle(path))
        assert copy.read_bytes() == original
        path = copy


def newest_kinds(dtype):
    """Metadata and tensors that use everything both newer families know."""
    metadata = make_metadata(
        released_plans(),
        dtype=dtype,
        target_budget_kind="tiles",
        target_budget_value="32.0",
        ref_budget_kind="tiles",
        ref_budget_value="32",
        tile_conditions="true",
        second_order_rank="4",
        count_term="1",
        source="runs/17",
        step="600",
        unknown='kept \u6d4b\u8bd5 \U0001f3ac\t\u0001\u007f "quoted" \\ / \u2028',
    )
    return metadata, make_tensors(dtype, rank=4, count_term=True, scalar_gain=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_of_the_safetensors_library_is_saved_byte_for_byte(tmp_path, dtype):
    assert_saving_keeps_every_byte(save(tmp_path / "theirs.safetensors", *newest_kinds(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_file_of_the_library_is_saved_byte_for_byte(tmp_path, dtype):
    metadata = make_metadata(dtype=None if dtype == "float32" else dtype)
    path = save(tmp_path / "theirs.safetensors", metadata, make_tensors(dtype))
    assert_saving_keeps_every_byte(path)


def made_bundle(dtype, **changes):
    plans = [
        random_plan("wide", TokenGrid(37, 24, 42), ("8x4x4", "2x8x8"), num_layers=2, num_heads=4),
        random_plan("tall", TokenGrid(37, 42, 24), ("8x4x4", "2x8x8"), num_layers=2, num_heads=4),
    ]
    options = {"num_layers": 2, "num_heads": 4, "dtype": dtype, "seed": 5} | changes
    return random_bundle(plans, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "target_budget": Budget("tiles", 12.5),
            "condition_budget": Budget("ratio", 0.25),
            "tile_conditions": True,
            "second_order_rank": 4,
            "count_term": True,
        },
    ],
    ids=["plain", "everything"],
)
def test_a_made_bundle_is_saved_byte_for_byte(tmp_path, dtype, changes):
    path = tmp_path / "ours.safetensors"
    write_bundle(path, made_bundle(dtype, **changes))
    assert_saving_keeps_every_byte(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_made_bundle_comes_back_from_its_file(tmp_path, dtype):
    bundle = made_bundle(
        dtype,
        target_budget=Budget("tiles", 12.5),
        condition_budget=Budget("ratio", 0.25),
        tile_conditions=True,
        second_order_rank=4,
        count_term=True,
    )
    path = tmp_path / "ours.safetensors"
    write_bundle(str(path), bundle)
    back = read_bundle(path)
    for field in (
        *("num_layers", "num_heads", "head_dim", "dtype", "target_budget", "condition_budget"),
        *("tile_conditions", "second_order_rank", "count_term", "plans"),
    ):
        assert getattr(back.info, field) == getattr(bundle.info, field), field
    assert set(back.tensors) == set(bundle.tensors)
    for key, x in bundle.tensors.items():
        assert same_bits(back.tensors[key], x), key


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_safetensors_library_reads_a_saved_bundle(tmp_path, dtype):
    bundle = made_bundle(dtype, second_order_rank=4, count_term=True)
    path = tmp_path / "ours.safetensors"
    write_bundle(path, bundle)
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == set(bundle.tensors)
        for key, x in bundle.tensors.items():
            assert same_bits(file.get_tensor(key), x), key
        metadata = file.metadata()
    assert metadata["format"] == "miowtion-veda-predictor-v1"
    assert metadata["dtype"] == dtype
    assert (metadata["num_layers"], metadata["num_heads"], metadata["head_dim"]) == (
        "2",
        "4",
        "128",
    )
    assert metadata["second_order_rank"] == "4"
    assert metadata["count_term"] == "1"
    plan = json.loads(metadata["plans"])["tall"]
    assert plan["grid"] == [37, 42, 24]
    assert len(plan["head_shape"]) == 2


def test_a_header_of_another_form_settles_after_one_save(tmp_path):
    path = save(tmp_path / "theirs.safetensors")
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    # Other spacing and order, metadata last: legal, yet no library writes it.
    header = dict(sorted(header.items(), reverse=True))
    text = json.dumps(header, indent=1).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    once = tmp_path / "settled.safetensors"
    write_bundle(once, read_bundle(path))
    assert_saving_keeps_every_byte(once)
    back, theirs = read_bundle(once), read_bundle(path)
    assert back.info.metadata == theirs.info.metadata
    assert all(same_bits(back.tensors[key], x) for key, x in theirs.tensors.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_tensors_in_memory_does_not_reach_the_file(tmp_path, dtype):
    bundle = read_saved(tmp_path, *newest_kinds(dtype))
    plain, odd = tmp_path / "plain.safetensors", tmp_path / "odd.safetensors"
    write_bundle(plain, bundle)
    write_bundle(odd, Bundle(bundle.info, dict(reversed(bundle.tensors.items()))))
    assert odd.read_bytes() == plain.read_bytes()


MAKE_PROGRAM = """
import sys
from nox_kernels.sequence import TokenGrid
from nox_kernels.veda.budget import Budget
from nox_kernels.veda.bundle import write_bundle
from nox_kernels.veda.synthetic import random_bundle, random_plan

shapes = ("8x4x4", "2x8x8", "4x8x4")
plans = [
    random_plan(name, grid, shapes, num_layers=2, num_heads=4, seed=9)
    for name, grid in {"a": TokenGrid(37, 24, 42), "b": TokenGrid(72, 24, 24)}.items()
]
bundle = random_bundle(
    plans, num_layers=2, num_heads=4, dtype=sys.argv[1], seed=3, second_order_rank=4,
    count_term=True, tile_conditions=True, condition_budget=Budget("tiles", 32.0),
)
write_bundle(sys.argv[2], bundle)
"""

COPY_PROGRAM = """
import sys
from nox_kernels.veda.bundle import read_bundle, write_bundle

write_bundle(sys.argv[2], read_bundle(sys.argv[1]))
"""


def run_program(program, *arguments):
    """Run Python in a process of its own; -R gives it hashes of its own too."""
    done = subprocess.run(
        [sys.executable, "-R", "-c", program, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_processes_write_the_same_bytes(tmp_path, dtype):
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for path in paths:
        run_program(MAKE_PROGRAM, dtype, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_two_processes_copy_the_same_bytes(tmp_path):
    theirs = save(tmp_path / "theirs.safetensors", *newest_kinds("float8_e4m3fn"))
    for name in ("first", "second"):
        copy = tmp_path / f"{name}.safetensors"
        run_program(COPY_PROGRAM, theirs, copy)
        assert copy.read_bytes() == theirs.read_bytes()


def test_a_bundle_may_be_saved_over_the_file_it_came_from(tmp_path):
    # In a process of its own: tensors that map a file which is cut to zero end it by a signal.
    path = save(tmp_path / "theirs.safetensors", *newest_kinds("bfloat16"))
    before = path.read_bytes()
    run_program(COPY_PROGRAM, path, path)
    assert path.read_bytes() == before


# ---- what is read stays ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_predictor_does_not_change_with_its_file(tmp_path, dtype):
    # such as an update or an interrupted download over it, while ComfyUI runs
    path = tmp_path / "odd.safetensors"
    save(path, make_metadata(dtype=dtype), make_tensors(dtype))
    bundle = read_bundle(path)
    predictor = VedaPredictor.from_bundle(bundle)
    tensors = {name: tensor.clone() for name, tensor in bundle.tensors.items()}
    weights = {name: weight.clone() for name, weight in predictor.named_parameters()}
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x55" * (size // 2))
    for name, tensor in tensors.items():
        assert same_bits(bundle.tensors[name], tensor)
    for name, weight in predictor.named_parameters():
        assert torch.equal(weight, weights[name])


def test_a_changed_bundle_is_written_as_it_is_now(tmp_path):
    path = tmp_path / "odd.safetensors"
    save(path, make_metadata(source="somebody"), make_tensors())
    bundle = read_bundle(path)
    changed = replace(bundle.info, target_budget=Budget("tiles", 2.5))
    write_bundle(path, Bundle(changed, bundle.tensors))
    again = read_bundle(path).info
    assert again.target_budget == Budget("tiles", 2.5)
    assert again.metadata["source"] == "somebody"
    assert (again.plans, again.dtype) == (changed.plans, changed.dtype)


@pytest.mark.parametrize("odd", ["a\nb\nc\x1b[31m", "\u202e", "x" * 5000])
def test_free_text_is_fit_for_a_log_line(tmp_path, odd):
    metadata = make_metadata({odd: make_plan((37, 24, 42))}, source=odd, step=odd)
    path = tmp_path / "odd.safetensors"
    save(path, metadata, make_tensors())
    info = read_bundle(path).info
    for shown in (info.plans[0].label, info.provenance):
        assert shown.isprintable()
        assert len(shown) < 110
    assert info.plans[0].name == odd


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tile_conditions": True}, "ref_budget_kind is missing"),
        ({"condition_budget": Budget("tiles", 2.0)}, "contradict"),
        ({"target_budget": Budget("tiles", 0.0)}, "above 0"),
        ({"num_layers": 3}, "layers"),
    ],
)
def test_a_bundle_that_cannot_be_is_not_written(tmp_path, change, fault):
    path = tmp_path / "odd.safetensors"
    save(path, make_metadata(), make_tensors())
    bundle = read_bundle(path)
    before = path.read_bytes()
    with pytest.raises(RequestError, match=fault):
        write_bundle(path, Bundle(replace(bundle.info, **change), bundle.tensors))
    assert path.read_bytes() == before


def test_a_budget_that_was_replaced_leaves_no_trace(tmp_path):
    path = tmp_path / "odd.safetensors"
    save(path, make_metadata(), make_tensors())
    bundle = read_bundle(path)
    assert bundle.info.metadata["keep_ratio"] == "0.1"
    changed = replace(bundle.info, target_budget=Budget("ratio", 0.2))
    write_bundle(path, Bundle(changed, bundle.tensors))
    assert "keep_ratio" not in read_bundle(path).info.metadata


@pytest.mark.parametrize("text", ["32.", "+32", "3.2e1", "32." + "0" * 60])
def test_a_budget_may_be_any_decimal(tmp_path, text):
    changes = {"target_budget_kind": "tiles", "target_budget_value": text}
    assert info_of(tmp_path, **changes).target_budget == Budget("tiles", 32.0)
