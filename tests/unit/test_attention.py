"""One layer: plans, head groups, and what the op promises."""

import subprocess
import sys

import pytest
import torch

from nox_kernels import ops, route
from nox_kernels.attention import attend_layer
from nox_kernels.errors import RequestError
from nox_kernels.layout import MENU, make_layout
from nox_kernels.layout_table import LayoutTable, preset_table
from nox_kernels.plan import make_plan
from nox_kernels.reference import dense_attention
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.schedule import Schedule
from tests.cases import CASES, Case, keep_tiles, mean_scores, relative_error

CASE = Case("four heads", num_heads=4)


def percent_to_sigma(percent):
    return 12 * (1 - percent) / (1 + 11 * (1 - percent))


def plan_of(request, case=CASE, table=None, dense=None, num_layers=4):
    dense = dense or DenseRequest()
    sigmas = [percent_to_sigma(step / 4) for step in range(5)]
    return make_plan(
        request,
        dense,
        case.sequence,
        table or preset_table("uniform", num_layers, case.num_heads),
        Schedule.resolve(sigmas, dense, percent_to_sigma),
        num_layers=num_layers,
        num_heads=case.num_heads,
        device="cpu",
    )


def mixed_table(num_layers=4, num_heads=4):
    rows = tuple(
        tuple((layer_idx + head) % len(MENU) for head in range(num_heads))
        for layer_idx in range(num_layers)
    )
    return LayoutTable("mixed", MENU, rows, None)


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
@pytest.mark.parametrize(
    "table", [preset_table("raster", 4, 4), preset_table("uniform", 4, 4), mixed_table()]
)
def test_full_budget_equals_sage_in_every_layout(table, precision):
    sage = plan_of(AttentionRequest("sage", precision=precision))
    full = plan_of(AttentionRequest("sparse", keep_ratio=1.0, precision=precision), table=table)
    q, k, v = CASE.make_inputs()
    for layer_idx in range(4):
        for sigma in (1.0, 0.5):
            ours, theirs = (
                plan.layer(layer_idx, plan.decide(layer_idx, sigma).kind) for plan in (full, sage)
            )
            assert torch.equal(attend_layer(ours, q, k, v), attend_layer(theirs, q, k, v))


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
@pytest.mark.parametrize("name", ["raster", "4x8x4", "4x4x8"])
def test_an_all_ones_selection_over_sparse_tiles_is_as_exact_as_dense(name, precision):
    q, k, v = CASE.make_inputs()
    truth = dense_attention(q, k, v)
    layout = make_layout(CASE.sequence, name)
    images = ops.pack_tiles(
        q, k, v, layout.slot_row, layout.valid_count, precision=precision, pooling="mean"
    )
    out = ops.tile_attention(
        images,
        route.keep_all(layout, 4).bits,
        layout.slot_row,
        layout.num_rows,
        dtype=torch.float32,
    )[0]
    dense = attend_layer(plan_of(AttentionRequest(precision=precision)).dense_layer, q, k, v)
    dense_error = relative_error(dense.unflatten(1, (4, 128)).transpose(0, 1), truth)
    assert relative_error(out.transpose(0, 1), truth) <= 1.05 * dense_error
    if (name, precision) == ("raster", "accurate"):  # the dense layer's own tile images
        assert torch.equal(out.to(q.dtype).flatten(1), dense)


def test_all_candidates_kept_by_a_mask_equals_dense_bit_for_bit():
    # one level under the plan's shortcut: the selection is built from scores and a full budget
    q, k, v = CASE.make_inputs()
    layout = make_layout(CASE.sequence, "raster")
    images = ops.pack_tiles(
        q, k, v, layout.slot_row, layout.valid_count, precision="accurate", pooling="mean"
    )
    scores = mean_scores(images)
    selection = keep_tiles(scores, layout, layout.num_kv_tiles)
    assert torch.equal(selection.bits, route.keep_all(layout, 4).bits)


@pytest.mark.parametrize("slices", [(1, 1, 1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("mode", ["sage", "sparse"])
def test_head_slices_give_the_bits_of_the_whole(mode, slices):
    plan = plan_of(AttentionRequest(mode, keep_ratio=0.2), table=mixed_table())
    layer = plan.layer(2, mode)
    q, k, v = CASE.make_inputs()
    parts, start = [], 0
    for count in slices:
        part = slice(start, start + count)
        parts.append(attend_layer(layer.slice_heads(start, count), q[part], k[part], v[part]))
        start += count
    assert torch.equal(torch.cat(parts, 1), attend_layer(layer, q, k, v))


def test_sparse_differs_from_sage_and_lower_budgets_keep_less():
    case = Case("fifteen video tiles", width=320, height=256, num_frames=39)
    q, k, v = case.make_inputs()
    sage = attend_layer(plan_of(AttentionRequest("sage"), case).dense_layer, q, k, v)
    shares, outs = [], []
    for percent in (10, 40, 80):
        layer = plan_of(AttentionRequest("sparse", keep_ratio=percent / 100), case).layer(
            1, "sparse"
        )
        shares.append(layer.kept_share)
        outs.append(attend_layer(layer, q, k, v))
    assert shares[0] < shares[1] < shares[2] < 1.0
    assert all(not torch.equal(out, sage) for out in outs)


def test_kept_share_is_the_share_of_bits_in_the_selection():
    q, k, v = CASE.make_inputs()
    layer = plan_of(AttentionRequest("sparse", keep_ratio=0.2)).layer(1, "sparse")
    (group,) = layer.groups
    images = ops.pack_tiles(
        q,
        k,
        v,
        group.layout.slot_row,
        group.layout.valid_count,
        precision="accurate",
        pooling="mean",
    )
    scores = mean_scores(images)
    mask = route.keep_best(scores, group.rule).mask(group.layout.num_kv_tiles)
    pairs = 4 * group.layout.num_query_tiles * group.layout.num_real_kv_tiles
    assert layer.kept_share == pytest.approx(int(mask.sum()) / pairs)


def test_two_runs_give_the_same_bits():
    q, k, v = CASE.make_inputs()
    layer = plan_of(AttentionRequest("sparse", keep_ratio=0.2)).layer(1, "sparse")
    assert torch.equal(attend_layer(layer, q, k, v), attend_layer(layer, q, k, v))


def test_strided_and_contiguous_inputs_agree():
    q, k, v = CASE.make_inputs()
    layer = plan_of(AttentionRequest("sparse", keep_ratio=0.2)).layer(1, "sparse")
    assert not q.is_contiguous()
    again = attend_layer(layer, q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(attend_layer(layer, q, k, v), again)


def test_the_output_keeps_dtype_and_packed_order():
    for case in CASES:
        q, k, v = case.make_inputs()
        out = attend_layer(plan_of(AttentionRequest(), case).dense_layer, q, k, v)
        assert out.dtype == case.dtype
        assert out.shape == (case.sequence.num_rows, case.num_heads * 128)


def test_decisions_follow_step_block_and_kernel():
    native = DenseRequest(blocks=(0, 3), kernel="native")
    sparse = plan_of(AttentionRequest("sparse", keep_ratio=0.2), dense=native)
    first, later = 1.0, percent_to_sigma(0.5)
    assert (sparse.decide(1, first).kind, sparse.decide(1, first).reason) == (
        "native",
        "first steps",
    )
    assert (sparse.decide(3, later).kind, sparse.decide(3, later).reason) == (
        "native",
        "dense block",
    )
    assert sparse.decide(1, later).kind == "sparse"
    sage = plan_of(AttentionRequest("sage"), dense=native)
    assert sage.decide(3, later).kind == "native"
    assert sage.decide(1, later).kind == "sage"
    assert plan_of(AttentionRequest("sage")).decide(0, first).reason == "mode sage"
    assert plan_of(AttentionRequest("sparse", keep_ratio=1.0)).decide(1, later).kind == "sage"


def test_dense_rows_are_tiled_as_each_precision_needs():
    layouts = {
        precision: plan_of(AttentionRequest(precision=precision)).dense_layer.groups[0].layout.name
        for precision in ("accurate", "faithful")
    }
    assert layouts == {"accurate": "raster", "faithful": "packed"}


def test_a_block_beyond_the_model_is_refused():
    with pytest.raises(RequestError, match=r"block 7 does not exist.*0 to 3"):
        plan_of(AttentionRequest("sparse"), dense=DenseRequest(blocks=(0, 7)))


def test_a_table_of_another_size_is_refused_by_name():
    with pytest.raises(RequestError, match=r"mixed.*5 layers of 4 heads.*4 layers of 4"):
        plan_of(AttentionRequest("sparse"), table=mixed_table(5))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"mode": "turbo"}, "turbo"),
        ({"keep_ratio": 0.0}, "0 %"),
        ({"keep_ratio": 1.01}, "101 %"),
        ({"precision": "fast"}, "fast"),
    ],
)
def test_a_wrong_request_is_one_sentence(kwargs, words):
    with pytest.raises(RequestError, match=words):
        AttentionRequest(**{"mode": "sparse", **kwargs})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"first_steps": -2},
        {"last_steps": -1},
        {"start_percent": 0.9, "end_percent": 0.2},
        {"end_percent": 1.5},
        {"kernel": "flash"},
    ],
)
def test_a_wrong_dense_request_is_refused(kwargs):
    with pytest.raises(RequestError):
        DenseRequest(**kwargs)


def test_ops_pass_torchs_own_checks():
    case = Case("tiny", width=64, height=64, num_frames=5, num_heads=1)
    q, k, v = case.make_inputs()
    layout = make_layout(case.sequence, "raster")
    args = (q, k, v, layout.slot_row, layout.valid_count, "accurate", "mean")
    torch.library.opcheck(torch.ops.nox.pack_tiles, args)
    images = ops.TileImages(*torch.ops.nox.pack_tiles(*args))
    bits = route.keep_all(layout, 1).bits
    torch.library.opcheck(
        torch.ops.nox.tile_attention,
        (list(images), bits, layout.slot_row, layout.num_rows, torch.bfloat16),
    )


def test_a_compiled_layer_has_no_graph_break_at_our_ops():
    case = Case("tiny", width=64, height=64, num_frames=5)
    layout = make_layout(case.sequence, "raster")

    def layer(q, k, v):
        images = ops.pack_tiles(
            q, k, v, layout.slot_row, layout.valid_count, precision="accurate", pooling="mean"
        )
        bits = route.keep_all(layout, case.num_heads).bits
        return ops.tile_attention(
            images, bits, layout.slot_row, layout.num_rows, dtype=torch.bfloat16
        )[0]

    inputs = case.make_inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), layer(*inputs))


MEMORY_PROGRAM = """
import resource, torch
from nox_kernels.attention import attend_layer
from nox_kernels.layout_table import preset_table
from nox_kernels.plan import make_plan
from nox_kernels.schedule import Schedule
from nox_kernels.request import AttentionRequest, DenseRequest
from nox_kernels.sequence import t2va_sequence

sequence = t2va_sequence(1344, 768, 124, 594)
assert sequence.num_rows == 38304
dense = DenseRequest(first_steps=0, blocks=())
plan = make_plan(
    AttentionRequest("sparse", keep_ratio=0.15), dense, sequence, preset_table("uniform", 1, 4),
    Schedule.resolve((1.0, 0.0), dense, lambda percent: 1 - percent),
    num_layers=1, num_heads=4, device="cpu",
)
buffer = torch.randn(38304, 3, 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
q, k, v = (buffer[:, part].transpose(0, 1) for part in range(3))
out = attend_layer(plan.layer(0, "sparse"), q, k, v)
assert out.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_a_real_sequence_with_four_heads_stays_under_four_gigabytes():
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 4096
