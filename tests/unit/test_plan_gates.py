"""Dense gates: which layers and steps stay dense, from text and from a run's sigmas."""

import pytest
import torch

from nox_kernels.errors import NoxError, RequestError
from nox_kernels.layout_table import preset_table
from nox_kernels.plan import make_plan
from nox_kernels.request import AttentionRequest, DenseRequest, parse_blocks
from nox_kernels.schedule import Schedule
from nox_kernels.sequence import t2va_sequence


def shifted(t):
    """Sigma of H3's schedule (shift 12) at time t in 0..1."""
    return 12.0 * t / (1.0 + 11.0 * t)


def percent_to_sigma(percent):
    """As the host's flow sampling answers it."""
    return shifted(1.0 - min(max(percent, 0.0), 1.0))


def simple_sigmas(num_steps, denoise=1.0):
    """num_steps + 1 sigmas down to 0; a denoise below 1 is the tail of a longer schedule."""
    total = int(num_steps / denoise)
    return [shifted(i / total) for i in range(num_steps, -1, -1)]


def resolve(sigmas, **dense):
    return Schedule.resolve(sigmas, DenseRequest(**dense), percent_to_sigma)


def dense_steps(sigmas, **dense):
    """Indices of the steps that may not be sparse."""
    schedule = resolve(sigmas, **dense)
    return [i for i, sigma in enumerate(sigmas[:-1]) if schedule.dense_reason(sigma) is not None]


# ---- parse_blocks ----


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("0", (0,)),
        ("0,3-5", (0, 3, 4, 5)),
        ("0, 3-5", (0, 3, 4, 5)),
        (" 0 , 49 ", (0, 49)),
        ("", ()),
        ("   ", ()),
        ("7-7", (7,)),
        ("0-49", tuple(range(50))),
    ],
)
def test_blocks_are_numbers_and_ranges(text, blocks):
    assert parse_blocks(text) == blocks


@pytest.mark.parametrize(
    "text", ["x", "5-3", "-1", "1-", "1.5", "0 3", "1-2-3", "0,x", "0;3", "0-99999999"]
)
def test_text_that_names_no_blocks_is_refused_in_one_sentence(text):
    with pytest.raises(RequestError) as refusal:
        parse_blocks(text)
    message = str(refusal.value)
    assert isinstance(refusal.value, NoxError)
    assert message.strip()
    assert "\n" not in message
    assert text.split(",")[-1] in message


# ---- step_of ----


def test_the_eight_step_schedule_is_the_published_one():
    published = [1.0, 0.988, 0.973, 0.952, 0.923, 0.878, 0.8, 0.632, 0.0]
    assert simple_sigmas(8) == pytest.approx(published, abs=5e-4)


@pytest.mark.parametrize("num_steps", [1, 2, 4, 8, 20, 50])
def test_every_sigma_of_the_schedule_is_its_own_step(num_steps):
    sigmas = simple_sigmas(num_steps)
    schedule = resolve(sigmas)
    assert schedule.num_steps == num_steps
    assert [schedule.step_of(sigma) for sigma in sigmas[:-1]] == list(range(num_steps))


@pytest.mark.parametrize("num_steps", [4, 8, 20])
def test_a_sigma_rounded_to_float32_is_still_its_own_step(num_steps):
    sigmas = simple_sigmas(num_steps)
    rounded = torch.tensor(sigmas, dtype=torch.float32).tolist()
    for listed, asked in ((sigmas, rounded), (rounded, sigmas)):
        schedule = resolve(listed)
        assert [schedule.step_of(sigma) for sigma in asked[:-1]] == list(range(num_steps))


def test_an_evaluation_between_two_sigmas_belongs_to_the_earlier_step():
    sigmas = simple_sigmas(8)
    schedule = resolve(sigmas)
    for i in range(8):
        for share in (0.05, 0.5, 0.95):
            between = sigmas[i] + share * (sigmas[i + 1] - sigmas[i])
            assert schedule.step_of(between) == i


def test_two_evaluations_a_step_at_both_ends_count_0_1_1_2_2():
    # Heun evaluates at sigma[i] and at sigma[i + 1]; its last step only once.
    sigmas = simple_sigmas(8)
    schedule = resolve(sigmas)
    asked = [s for i in range(7) for s in (sigmas[i], sigmas[i + 1])] + [sigmas[7]]
    assert [schedule.step_of(s) for s in asked] == [0, *[i for i in range(1, 8) for _ in "ab"]]


def test_two_evaluations_a_step_at_start_and_middle_count_0_0_1_1():
    sigmas = simple_sigmas(8)
    schedule = resolve(sigmas)
    asked = [s for i in range(7) for s in (sigmas[i], (sigmas[i] * sigmas[i + 1]) ** 0.5)]
    assert [schedule.step_of(s) for s in asked] == [i for i in range(7) for _ in "ab"]


def test_a_sigma_outside_the_schedule_is_the_first_or_last_step():
    schedule = resolve(simple_sigmas(8, denoise=0.3))
    assert schedule.step_of(1.0) == 0
    assert schedule.step_of(100.0) == 0
    assert schedule.step_of(0.0) == 7
    assert schedule.step_of(1e-9) == 7


def test_the_tolerance_is_a_ten_thousandth():
    sigmas = simple_sigmas(8)
    schedule = resolve(sigmas)
    assert schedule.step_of(sigmas[3] - 0.5e-4) == 3
    assert schedule.step_of(sigmas[3] + 0.5e-4) == 3
    assert schedule.step_of(sigmas[3] + 2e-4) == 2
    assert schedule.step_of(sigmas[3] - 2e-4) == 3


def test_the_schedule_accepts_sigmas_of_a_tensor():
    sigmas = torch.tensor(simple_sigmas(4)).tolist()
    assert tuple(resolve(tuple(sigmas)).sigmas) == pytest.approx(simple_sigmas(4), abs=1e-6)


# ---- dense_reason ----


@pytest.mark.parametrize(("num_steps", "num_dense"), [(4, 1), (8, 2), (20, 4)])
def test_automatic_first_steps_cover_the_first_fifth_of_the_percent_scale(num_steps, num_dense):
    # Dense while sigma > percent_to_sigma(0.2) + 1e-4.
    assert dense_steps(simple_sigmas(num_steps)) == list(range(num_dense))


@pytest.mark.parametrize(("num_steps", "num_dense"), [(5, 1), (10, 2), (20, 4)])
def test_a_step_exactly_at_the_automatic_limit_is_sparse(num_steps, num_dense):
    # The step at 20 percent has the limit's own sigma, here a rounding error above it.
    sigmas = [sigma + 5e-5 for sigma in simple_sigmas(num_steps)]
    assert sigmas[num_dense] > percent_to_sigma(0.2)
    assert dense_steps(sigmas) == list(range(num_dense))


@pytest.mark.parametrize("num_steps", [4, 8, 20])
def test_a_partial_denoise_has_no_automatic_dense_step(num_steps):
    assert dense_steps(simple_sigmas(num_steps, denoise=0.3)) == []


def test_automatic_first_steps_follow_the_run_and_not_a_fixed_shift():
    # Shift 1: sigma = t, so 8 steps have sigmas 1.0, 0.875 above 0.8.
    sigmas = [i / 8 for i in range(8, -1, -1)]
    schedule = Schedule.resolve(sigmas, DenseRequest(), lambda percent: 1.0 - percent)
    reasons = [schedule.dense_reason(sigma) is not None for sigma in sigmas[:-1]]
    assert reasons == [True, True, False, False, False, False, False, False]


@pytest.mark.parametrize("first_steps", [0, 1, 3, 8, 50])
def test_first_steps_are_counted_from_the_first_executed_step(first_steps):
    for denoise in (1.0, 0.3):
        sigmas = simple_sigmas(8, denoise)
        assert dense_steps(sigmas, first_steps=first_steps) == list(range(min(first_steps, 8)))


def test_last_steps_are_dense():
    assert dense_steps(simple_sigmas(8), first_steps=0, last_steps=2) == [6, 7]
    assert dense_steps(simple_sigmas(8), first_steps=3, last_steps=2) == [0, 1, 2, 6, 7]
    assert dense_steps(simple_sigmas(8), last_steps=2) == [0, 1, 6, 7]
    assert dense_steps(simple_sigmas(8), first_steps=0, last_steps=50) == list(range(8))


def test_sparse_runs_only_inside_the_window():
    # Four steps start at 0, 25, 50 and 75 percent.
    sigmas = simple_sigmas(4)
    assert dense_steps(sigmas, first_steps=0) == []
    assert dense_steps(sigmas, first_steps=0, start_percent=0.4, end_percent=0.6) == [0, 1, 3]
    assert dense_steps(sigmas, first_steps=0, start_percent=0.1) == [0]
    assert dense_steps(sigmas, first_steps=0, end_percent=0.6) == [3]
    assert dense_steps(sigmas, first_steps=2, end_percent=0.6) == [0, 1, 3]


def test_the_window_is_resolved_against_the_run_and_not_the_step_index():
    # Steps of a 30 % denoise all lie after 60 percent of the scale.
    sigmas = simple_sigmas(4, denoise=0.3)
    assert dense_steps(sigmas, first_steps=0, end_percent=0.6) == [0, 1, 2, 3]
    assert dense_steps(sigmas, first_steps=0, start_percent=0.6) == []


def test_all_evaluations_before_the_second_sigma_share_the_gate_of_the_first_step():
    sigmas = simple_sigmas(8)
    schedule = resolve(sigmas, first_steps=1)
    assert schedule.dense_reason(sigmas[0]) is not None
    assert schedule.dense_reason((sigmas[0] + sigmas[1]) / 2) is not None
    assert schedule.dense_reason(sigmas[1]) is None


def test_the_reason_says_which_gate_it_was():
    sigmas = simple_sigmas(8)
    schedule = resolve(sigmas, first_steps=1, last_steps=1, end_percent=0.6)
    assert "first" in schedule.dense_reason(sigmas[0])
    assert schedule.dense_reason(sigmas[1]) is None
    assert "window" in schedule.dense_reason(sigmas[6])
    assert "last" in resolve(sigmas, last_steps=1).dense_reason(sigmas[7])


def test_a_single_step_run_resolves():
    assert dense_steps(simple_sigmas(1)) == [0]
    assert dense_steps(simple_sigmas(1), first_steps=0) == []
    assert dense_steps(simple_sigmas(1), first_steps=0, last_steps=1) == [0]


# ---- few-step schedules ----


def few_step_warnings(sigmas, keep_ratio=0.15, **dense):
    plan = make_plan(
        AttentionRequest("sparse", keep_ratio),
        DenseRequest(**dense),
        t2va_sequence(256, 256, 22, 16),
        preset_table("uniform", 2, 4),
        resolve(sigmas, **dense),
        num_layers=2,
        num_heads=4,
        device="cpu",
    )
    return [text for text in plan.warnings if "-step run" in text]


@pytest.mark.parametrize(("num_steps", "auto"), [(4, 1), (8, 2)])
def test_a_short_run_without_a_dense_step_says_what_to_type(num_steps, auto):
    (sentence,) = few_step_warnings(simple_sigmas(num_steps), first_steps=0)
    assert f"No step of this {num_steps}-step run is dense." in sentence
    assert f"set first_steps of Nox Dense Steps and Blocks to {auto} (-1 = auto)" in sentence
    assert "type a higher kept %" in sentence


@pytest.mark.parametrize(
    ("sigmas", "values"),
    [
        (simple_sigmas(8), {}),  # auto
        (simple_sigmas(8), {"first_steps": 1}),
        (simple_sigmas(8), {"first_steps": 0, "last_steps": 1}),
        (simple_sigmas(8), {"first_steps": 0, "start_percent": 0.2}),
        (simple_sigmas(20), {"first_steps": 0}),  # long enough
        (simple_sigmas(4, denoise=0.3), {"first_steps": 0}),  # its beginning was another run's
        (simple_sigmas(8), {"first_steps": 0, "keep_ratio": 1.0}),  # skips nothing
    ],
)
def test_a_run_with_steps_to_spare_is_not_warned(sigmas, values):
    assert few_step_warnings(sigmas, **values) == []
