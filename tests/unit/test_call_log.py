"""Call log and stopwatch: what ran, how often, and for how long."""

import threading
import time

import pytest
import torch

from nox_kernels.call_log import MAX_EVALUATIONS, CallLog
from nox_kernels.stopwatch import Stopwatch

DENSE, SPARSE = ("sage", "first steps"), ("sparse", "sparse")
CPU = torch.device("cpu")


def test_it_knows_every_layer_of_every_evaluation():
    log = CallLog()
    first = log.begin(0, 2)
    assert log.count(first, 0, DENSE)
    assert not log.count(first, 1, DENSE)
    second = log.begin(1, 2)
    assert log.count(second, 1, SPARSE, 0.2)
    assert [one.calls for one in log.evaluations] == [[DENSE, DENSE], [None, SPARSE]]
    assert log.calls == {DENSE: 2, SPARSE: 1}
    assert log.kept_share == 0.2
    assert log.kept_share_of_all_calls == pytest.approx((2 + 0.2) / 3)


def test_an_evaluation_that_reaches_no_layer_is_none():
    log = CallLog()
    log.begin(0, 2)
    assert (log.num_evaluations, log.evaluations) == (0, [])
    log.count(log.begin(1, 2), 1, DENSE)
    assert (log.num_evaluations, [one.step_idx for one in log.evaluations]) == (1, [1])


def test_a_log_without_calls_has_no_shares():
    assert CallLog().kept_share is None
    assert CallLog().kept_share_of_all_calls is None


def test_it_counts_on_where_it_keeps_no_more_evaluations():
    log = CallLog()
    for step_idx in range(MAX_EVALUATIONS + 3):
        log.count(log.begin(step_idx, 1), 0, DENSE)
    assert len(log.evaluations) == MAX_EVALUATIONS
    assert log.num_evaluations == log.calls[DENSE] == MAX_EVALUATIONS + 3


def test_threads_lose_no_call():
    log = CallLog()

    def work():
        for _ in range(500):
            log.count(log.begin(0, 1), 0, DENSE)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.calls[DENSE] == log.num_evaluations == 4000


def test_times_are_told_by_key_and_scaled():
    watch = Stopwatch()
    for _ in range(3):
        with watch.time("slow", CPU, scale=2.0):
            time.sleep(0.02)
        with watch.time("fast", CPU):
            pass
    watch.read(wait=True)
    assert 40 <= watch.median_ms("slow") < 400
    assert watch.median_ms("fast") < 10
    assert watch.median_ms("never") is None


def test_work_that_fails_leaves_no_time():
    watch = Stopwatch()
    with pytest.raises(ValueError, match="broken"), watch.time("key", CPU):
        raise ValueError("broken")
    assert watch.median_ms("key") is None


def test_one_odd_time_moves_nothing():
    watch = Stopwatch()
    with watch.time("key", CPU):
        time.sleep(0.1)
    for _ in range(4):
        with watch.time("key", CPU):
            pass
    assert watch.median_ms("key") < 50
