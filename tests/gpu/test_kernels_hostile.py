"""The kernels under hostile use: far offsets, dirty memory, streams, graphs, threads, sanitizer."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from nox_kernels import driver, reference
from nox_kernels.attention import attend_layer
from nox_kernels.layer_plan import LayerPlan, Tiles
from nox_kernels.layout import raster_layout
from nox_kernels.sequence import t2va_sequence
from tests.cases import relative_error
from tests.gpu.kernels_case import LAYOUTS, all_bits, attend, dense, fused, needs_kernel, pack

pytestmark = needs_kernel
ROOT = Path(__file__).parents[2]


def rows_sequence(num_rows):
    """A packed sequence of any length: the smallest clip behind as much text as it takes."""
    smallest = t2va_sequence(64, 64, 5, 1)
    return t2va_sequence(64, 64, 5, num_rows - smallest.num_rows + 1)


def sampled_error(out, qkv, heads, num_samples=24):
    q, k, v = (x[heads].float() for x in qkv)
    num_rows = q.shape[1]
    rows = torch.cat(
        (torch.arange(8), torch.randint(num_rows, (num_samples,)), num_rows - 1 - torch.arange(8))
    ).to(q.device)
    truth = reference.dense_attention(q[:, rows], k, v).transpose(0, 1)
    return relative_error(out[rows][:, heads], truth)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["accurate", "faithful"])
@pytest.mark.parametrize("num_rows", [99_864, 99_865, 199_728, 199_729])
def test_rows_beyond_the_32_bit_walls(num_rows, precision):
    # int32 and uint32 wrap at these rows of a fused buffer of 56 heads
    everything = fused(num_rows, 56)
    qkv = [x[54:] for x in everything]
    layout = LAYOUTS[precision](rows_sequence(num_rows)).to("cuda")
    limit = {"accurate": 0.020, "faithful": 0.045}[precision]
    assert sampled_error(dense(qkv, layout, precision), qkv, slice(0, 2)) < limit


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [99_865, 199_729])
def test_whole_calls_beyond_the_walls(num_rows):
    # 56 contiguous heads: the images, the output and the head strides pass 2^31 bytes
    qkv = [x.contiguous() for x in fused(num_rows, 56)]
    layout = raster_layout(rows_sequence(num_rows)).to("cuda")
    out = dense(qkv, layout, "accurate")
    assert sampled_error(out, qkv, slice(54, 56)) < 0.020
    assert not out.isnan().any()


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
@pytest.mark.parametrize("num_rows", [1_000, 1_024, 1_025, 1_151])
def test_every_element_is_written(num_rows, precision):
    qkv = fused(num_rows, 3)
    layout = LAYOUTS[precision](rows_sequence(num_rows)).to("cuda")
    clean = dense(qkv, layout, precision)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        dirty = dense(qkv, layout, precision)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(dirty, clean)
    assert not clean.isnan().any()


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_any_strides_and_alignment_give_the_same_bits(precision):
    num_rows, num_heads = 1_100, 3
    layout = LAYOUTS[precision](rows_sequence(num_rows)).to("cuda")
    qkv = fused(num_rows, num_heads)
    expected = dense([x.contiguous() for x in qkv], layout, precision)
    assert torch.equal(dense(qkv, layout, precision), expected)
    odd = torch.empty(num_rows, 3 * num_heads * 128 + 1, device="cuda", dtype=torch.bfloat16)
    odd = odd[:, 1:].unflatten(1, (3, num_heads, 128))
    for part, x in enumerate(qkv):
        odd[:, part] = x.transpose(0, 1)
    unaligned = [odd[:, part].transpose(0, 1) for part in range(3)]
    assert torch.equal(dense(unaligned, layout, precision), expected)
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    assert torch.equal(dense(scattered, layout, precision), expected)


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_twenty_repeats_have_the_same_bits(precision):
    num_rows = 5_003
    layout = LAYOUTS[precision](rows_sequence(num_rows)).to("cuda")
    qkv = fused(num_rows, 56)
    first = dense(qkv, layout, precision)
    for _ in range(20):
        assert torch.equal(dense(qkv, layout, precision), first)


def test_work_follows_a_side_stream_with_a_late_producer():
    layout = raster_layout(rows_sequence(1_000)).to("cuda")
    source = fused(1_000, 4)
    expected = dense(source, layout, "accurate")
    late = [torch.zeros_like(x) for x in source]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, source, strict=True):
            x.copy_(y)
        out = dense(late, layout, "accurate")
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("precision", ["accurate", "faithful"])
def test_a_graph_replays_on_changed_inputs(precision):
    layout = LAYOUTS[precision](rows_sequence(1_000)).to("cuda")
    held = [x.clone() for x in fused(1_000, 4)]
    bits = all_bits(layout, 4)
    dense(held, layout, precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(pack(held, layout, precision), bits, layout)[0]
    for seed in (1, 2):
        fresh = fused(1_000, 4, seed)
        if seed == 2:  # the flag of a head is found anew: INT8 cannot hold this one
            fresh[2][1, 501, 7] = 1500.0
        for x, y in zip(held, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, dense(fresh, layout, precision))


def _layer(num_rows, num_heads, precision="accurate"):
    layout = raster_layout(rows_sequence(num_rows))
    group = Tiles.on("cuda", layout, None).group(tuple(range(num_heads)))
    return LayerPlan((group,), precision)


def test_a_compiled_block_has_no_graph_break():
    layer = _layer(1_000, 4)
    q, k, v = fused(1_000, 4)

    def block(q, k, v):
        return attend_layer(layer, q * 1.0, k, v) + 1.0

    explained = torch._dynamo.explain(block)(q, k, v)
    assert explained.graph_break_count == 0, explained.break_reasons
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), block(q, k, v))


def test_eight_threads_may_call_first():
    qkv, layout = fused(1_000, 4), raster_layout(rows_sequence(1_000)).to("cuda")
    expected = dense(qkv, layout, "accurate")
    driver._drivers.clear()  # as a new process
    results, start = {}, threading.Barrier(8)

    def work(idx):
        start.wait()
        results[idx] = dense(qkv, layout, "accurate")
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(idx,)) for idx in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(out, expected) for out in results.values())


def test_a_whole_layer_takes_no_more_than_64_mb_over_torch():
    layer = _layer(20_000, 56)
    q, k, v = fused(20_000, 56)

    def peak_bytes(call):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    image_bytes = 3 * q.numel()  # half of bf16 Q, K and V, which the caller may drop by then
    assert peak_bytes(lambda: attend_layer(layer, q, k, v)) < image_bytes + 2 * q.numel() + (
        64 << 20
    )


SANITIZED = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.gpu.kernels_case import dense, fused
from tests.gpu.test_kernels_hostile import rows_sequence
from tests.gpu.kernels_case import LAYOUTS
for num_rows in (1000, 1153):
    for precision in ("accurate", "faithful"):
        qkv = fused(num_rows, 2)
        qkv[2][1, 501, 7] = 1500.0
        layout = LAYOUTS[precision](rows_sequence(num_rows)).to("cuda")
        dense(qkv, layout, precision)
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs NVIDIA's compute-sanitizer"
)
def test_compute_sanitizer_finds_nothing_on_ragged_sizes(tool):
    answer = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *("--kernel-regex", "kns=nox_"),
            *(sys.executable, "-c", SANITIZED.format(root=str(ROOT))),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert answer.returncode == 0, (answer.stdout + answer.stderr)[-3000:]
