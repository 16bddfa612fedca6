"""The report of a run: its numbers, and what a node, the log and Nox Report say of them."""

import itertools
import json
from dataclasses import replace

import pytest

from nodes import report_text
from nodes.report import Report, Timing
from nox_kernels.call_log import Evaluation
from nox_kernels.request import AttentionRequest

DENSE, SPARSE = ("sage", "first steps"), ("sparse", "sparse")


def report_of(steps, *, mode="sparse", timing=None, **values) -> Report:
    """A report of one evaluation a step; `steps` holds what each block of it ran."""
    calls = {}
    for call in itertools.chain(*steps):
        calls[call] = calls.get(call, 0) + 1
    is_routed = any(kind == "sparse" for kind, _ in calls)
    return Report(
        request=AttentionRequest(mode),
        veda=None,
        calls=calls,
        kept_share=0.188 if is_routed else None,
        kernel="Nox INT8 kernel (sm_90a)",
        is_reference=False,
        evaluations=tuple(Evaluation(idx, list(ran)) for idx, ran in enumerate(steps)),
        num_forwards=len(steps),
        num_steps=len(steps),
        num_layers=len(steps[0]),
        timing=timing or Timing({}, None, 100.0),
        warnings=(),
        **values,
    )


def run_of(num_steps=20, num_dense=4, timing=None) -> Report:
    """H3's 50 blocks, of which the first is dense throughout."""
    dense = [[DENSE] * 50] * num_dense
    sparse = [[("sage", "dense block"), *[SPARSE] * 49]] * (num_steps - num_dense)
    return report_of(dense + sparse, timing=timing)


TIMED = Timing({"sparse": 7.0, "sage": 42.0}, 75.0, 100.0)


def test_the_badge_says_kept_dense_steps_kernel_time_and_saving():
    report = run_of(num_steps=8, num_dense=2, timing=TIMED)
    # 294 sparse calls save 68 ms each, 106 dense ones 33 ms
    assert report.seconds_saved == pytest.approx(294 * 0.068 + 106 * 0.033)
    assert report_text.badge(report) == "sparse 18.8%, 2/8 steps dense.\nINT8 7 ms/call, saved 23 s"


def test_a_step_is_dense_if_none_of_its_calls_was_sparse():
    assert run_of(num_dense=3).dense_steps == [1, 2, 3]
    # two evaluations of one step, of which the second is sparse
    report = report_of([[DENSE], [SPARSE]])
    both = tuple(replace(one, step_idx=0) for one in report.evaluations)
    assert replace(report, evaluations=both).dense_steps == []


def test_attention_is_told_as_a_share_of_the_run():
    report = run_of(num_steps=8, num_dense=2, timing=TIMED)
    assert report.attention_s == pytest.approx(294 * 0.007 + 106 * 0.042)
    assert "of which attention about 6.5 s (7 %)" in report_text.full(report)


def test_what_was_not_measured_is_not_made_up():
    report = report_of(
        [[SPARSE, ("declined", "batch 2")]], timing=Timing({"sparse": 7.0}, None, 9.0)
    )
    assert report.attention_s is None
    assert report.seconds_saved is None
    assert "Saved: unknown" in report_text.full(report)
    assert "saved" not in report_text.line(report)


@pytest.mark.parametrize(
    ("times", "dense_ms", "faster"),
    [
        ({"sparse": 7.0, "sage": 42.0}, 75.0, None),
        ({"sparse": 50.0, "sage": 42.0}, 75.0, "sage"),
        ({"sparse": 43.0, "sage": 42.0}, 75.0, None),  # within what medians vary by
        ({"sparse": 50.0, "sage": 42.0}, 30.0, "dense"),
        ({"veda": 50.0, "sage": 42.0}, None, "sage"),
        ({"sage": 42.0}, 30.0, "dense"),
        ({"sage": 42.0}, None, None),
        ({}, 30.0, None),
    ],
)
def test_a_mode_that_is_slower_than_another_says_so(times, dense_ms, faster):
    timing = Timing(times, dense_ms, 100.0)
    sentence = report_text.too_slow(timing)
    if faster is None:
        assert sentence is None
        return
    assert f"choose mode {faster}." in sentence
    assert ("kept %" in sentence) == (timing.main_kind != "sage")
    report = run_of(timing=timing)
    assert f"slower than {faster}" in report_text.badge(report)
    # the reference is slow in every mode, and another sentence says so
    assert "than" not in report_text.badge(replace(report, is_reference=True))


def test_calls_that_comfyui_took_over_come_first_on_the_node():
    report = report_of([[SPARSE, ("declined", "batch 2")]], timing=TIMED)
    assert report_text.badge(report).endswith("\n1 by ComfyUI: see the log")
    assert "1 left to ComfyUI's own attention (1 batch 2)" in report_text.line(report)


def test_a_budget_of_all_tiles_is_not_said_to_have_skipped_any():
    report = report_of(
        [[("sage", "every tile kept")] * 4], timing=Timing({"sage": 42.0}, 75.0, 9.0)
    )
    assert report_text.badge(report) == "sparse: all 4 calls dense.\nINT8 42 ms/call, saved 0.13 s"


@pytest.mark.parametrize("num_steps", [1, 8, 20, 200])
@pytest.mark.parametrize("sparse_ms", [0.04, 7.3, 123.4, 12345.6])
@pytest.mark.parametrize("dense_ms", [None, 0.05, 75.0, 23456.7])
@pytest.mark.parametrize("is_reference", [True, False])
def test_no_badge_is_wider_than_a_node(num_steps, sparse_ms, dense_ms, is_reference):
    timing = Timing({"sparse": sparse_ms, "sage": 42.0}, dense_ms, 100.0)
    report = replace(run_of(num_steps, num_steps // 2, timing), is_reference=is_reference)
    for text in (report_text.badge(report), report_text.where(num_steps - 1, num_steps, timing)):
        lines = text.split("\n")
        assert 1 <= len(lines) <= 2
        assert all(0 < len(line) <= 30 for line in lines), text


def test_the_tag_is_plain_json():
    tag = run_of(timing=TIMED).as_dict()
    assert json.loads(json.dumps(tag, allow_nan=False)) == tag
    assert tag["dense_steps"] == [1, 2, 3, 4]
    assert (tag["ms_per_call"], tag["host_ms_per_call"]) == ({"sparse": 7.0, "sage": 42.0}, 75.0)
