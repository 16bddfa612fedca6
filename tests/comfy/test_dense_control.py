"""Nox Dense Steps and Blocks: which steps and blocks stay dense, told by bits and by the report."""

import comfy_graphs as graphs
import pytest
from comfy_graphs import attention, dense_control, latent_graph, probe, sigma_shift

# On the small canvas 1 % skips one of two candidates.
SPARSE = attention("sparse", budget=1, layout="raster")


def run(host, *patches, **settings):
    result = host.run(latent_graph(*patches, **settings))
    assert result.status == "success", result.error
    return result


def test_before_and_after_nox_attention_are_the_same(host):
    control = dense_control(first_steps=2, blocks="1-2")
    after = run(host, SPARSE, control)
    before = run(host, control, SPARSE)
    assert after.digest == before.digest
    assert after.report == before.report
    assert "4 of 16 attention calls sparse" in after.report
    assert "12 dense (8 in the first steps, 4 in dense blocks)" in after.report


def test_the_last_of_two_wins(host):
    one, two = dense_control(first_steps=3), dense_control(first_steps=0, blocks="3")
    alone = run(host, SPARSE, two)
    for patches in [(SPARSE, one, two), (one, SPARSE, two), (one, two, SPARSE)]:
        assert run(host, *patches).digest == alone.digest
    assert run(host, SPARSE, two, one).digest == run(host, SPARSE, one).digest != alone.digest


def test_without_it_the_defaults_apply_again(host):
    plain = run(host, SPARSE)
    assert run(host, SPARSE, dense_control()).digest == plain.digest
    assert run(host, SPARSE, dense_control(first_steps=3)).digest != plain.digest
    assert run(host, SPARSE).digest == plain.digest


@pytest.mark.parametrize("patches", [(), (attention("dense"),)], ids=["alone", "mode dense"])
def test_without_nox_attention_it_warns_that_it_does_nothing(host, patches):
    result = run(host, dense_control(first_steps=2), *patches)
    assert result.log == [
        "Nox Dense Steps and Blocks does nothing here: no Nox H3 Attention in mode sage, sparse or "
        "veda is on this model."
    ]
    assert result.digest == run(host).digest


def test_all_steps_dense_equals_sage_and_on_the_native_kernel_no_nox_at_all(host):
    every_step = {"first_steps": 50}
    sage = run(host, SPARSE, dense_control(**every_step))
    assert sage.digest == run(host, attention("sage")).digest
    native = run(host, SPARSE, dense_control(**every_step, kernel="native"))
    assert native.digest == run(host).digest
    assert "0 of 16 attention calls sparse; 16 native (16 in the first steps)" in native.report


def test_the_native_kernel_serves_the_dense_part_of_mode_sage_too(host):
    result = run(host, attention("sage"), dense_control(first_steps=1, kernel="native"))
    assert (
        "9 of 16 attention calls INT8; 7 native (4 in the first steps, 3 in dense blocks)"
        in result.report
    )


def test_every_block_named_is_dense_in_every_step(host):
    result = run(host, SPARSE, dense_control(first_steps=0, blocks="0-3", kernel="native"))
    assert result.digest == run(host).digest
    assert "16 native (16 in dense blocks)" in result.report


@pytest.mark.parametrize(
    ("steps", "denoise", "num_dense"), [(4, 1.0, 1), (8, 1.0, 2), (20, 1.0, 4), (4, 0.3, 0)]
)
def test_auto_first_steps_cover_a_fifth_of_the_schedule(host, steps, denoise, num_dense):
    result = run(host, SPARSE, dense_control(blocks=""), steps=steps, denoise=denoise)
    num_calls, num_dense_calls = 4 * steps, 4 * num_dense
    wanted = f"{num_calls - num_dense_calls} of {num_calls} attention calls sparse"
    assert wanted in result.report
    assert (f"{num_dense_calls} dense (" in result.report) == bool(num_dense)


@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        ({"start_percent": 0.5}, "8 outside the window"),
        ({"end_percent": 0.5}, "4 outside the window"),
        ({"start_percent": 0.25, "end_percent": 0.5}, "8 outside the window"),
        ({"last_steps": 1}, "4 in the last steps"),
        ({"first_steps": 1, "last_steps": 2}, "4 in the first steps, 8 in the last steps"),
    ],
)
def test_window_and_last_steps_are_what_they_say(host, values, reasons):
    # four steps start at 0, 25, 50 and 75 % of the schedule
    control = dense_control(**{"first_steps": 0, "blocks": ""} | values)
    assert f"({reasons})" in run(host, SPARSE, control).report


def test_a_sampler_that_evaluates_twice_a_step_keeps_the_same_sigmas_dense(host):
    # heun evaluates at sigma 0, then twice at 1, 2 and 3: one of seven is the first step's
    result = run(host, SPARSE, dense_control(blocks=""), sampler="heun")
    assert "24 of 28 attention calls sparse" in result.report
    assert "4 dense (4 in the first steps)" in result.report


def test_two_conditions_keep_the_same_steps_dense(host):
    result = run(host, SPARSE, dense_control(blocks=""), negative="blurred")
    assert "24 of 32 attention calls sparse" in result.report
    assert "8 dense (8 in the first steps)" in result.report


def test_a_later_sigma_shift_counts_as_if_it_came_first(host):
    control = dense_control(first_steps=0, start_percent=0.4, blocks="")
    before = run(host, sigma_shift(), SPARSE, control)
    after = run(host, SPARSE, control, sigma_shift())
    assert (after.digest, after.report) == (before.digest, before.report)
    assert after.digest != run(host, SPARSE, control).digest


def test_a_step_that_raises_is_in_the_report_of_no_later_run(host):
    failing = probe(label="raises", fail_at=2)
    assert host.run(latent_graph(failing, SPARSE)).status == "error"
    assert "of 16 attention calls" in run(host, SPARSE, canvas=graphs.SMALL).report
