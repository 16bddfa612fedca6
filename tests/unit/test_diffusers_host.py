"""Diffusers host: Nox's attention on diffusers' H3, and the model untouched afterwards."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers", minversion="0.40")

from nox_kernels import reference, tiny_h3  # noqa: E402
from nox_kernels.errors import RequestError, SequenceError  # noqa: E402
from nox_kernels.hosts import diffusers as host  # noqa: E402
from nox_kernels.layout_table import preset_table  # noqa: E402
from nox_kernels.request import AttentionRequest, DenseRequest  # noqa: E402
from nox_kernels.sequence import Segment, TokenGrid  # noqa: E402
from nox_kernels.veda.predictor import VedaPredictor  # noqa: E402
from nox_kernels.veda.synthetic import random_bundle, random_plan  # noqa: E402

GRID = TokenGrid(5, 8, 4)
NUM_TEXT, NUM_AUDIO_LATENTS = 7, 12
ANYWHERE = DenseRequest(first_steps=0, blocks=())


@pytest.fixture(scope="module")
def transformer():
    return tiny_h3.make_transformer(seed=3)


@pytest.fixture
def scheduler():
    scheduler = diffusers.MiniMaxH3Scheduler(shift=12.0)
    scheduler.set_timesteps(5)  # four steps
    return scheduler


def packed_arguments(anchors=(), timestep=0.0, audio_timestep=0.1, seed=0):
    """The forward's arguments as diffusers' own pipeline blocks make them."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (
        MiniMaxH3PrepareLayoutStep,
        MiniMaxH3SetTimestepsStep,
    )

    position_ids, token_tags, video, audio, text, num_cond, num_cond_audio = (
        MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.ones(NUM_TEXT, dtype=torch.long),
            GRID.t,
            2 * GRID.h,
            2 * GRID.w,
            NUM_AUDIO_LATENTS,
            (1, 2, 2),
            2,
            2,
            0,
            anchors,
        )
    )
    times, time_idx = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video,
        audio,
        num_cond,
        num_cond_audio,
        NUM_TEXT,
        timestep,
        audio_timestep,
        max(timestep, 0.999),
        1.0,
    )
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, len(video), 96, generator=generator),
        "audio_hidden_states": torch.randn(1, len(audio), 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, NUM_TEXT, 64, generator=generator),
        "timestep": times,
        "timestep_indices": time_idx,
        "token_tags": token_tags,
        "position_ids": position_ids,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


@torch.no_grad()
def forward(transformer, arguments):
    return torch.cat([x.flatten() for x in transformer(**arguments, return_dict=False)])


def relative_error(x, truth):
    return float((x - truth).norm() / truth.norm())


@torch.no_grad()
def run(transformer, arguments, scheduler, request, dense=ANYWHERE, **kwargs):
    with host.nox_attention(transformer, request, dense, scheduler=scheduler, **kwargs) as nox_run:
        return forward(transformer, arguments), nox_run


# ---- numbers ----


def test_exact_attention_through_the_processor_is_diffusers_own(
    transformer, scheduler, monkeypatch
):
    def exact(layer, q, k, v):
        return reference.dense_attention(q, k, v).float().transpose(0, 1).flatten(1)

    monkeypatch.setattr(host, "attend_layer", exact)
    arguments = packed_arguments()
    out, _ = run(transformer, arguments, scheduler, AttentionRequest("sage"))
    assert relative_error(out, forward(transformer, arguments)) < 1e-5


@pytest.mark.parametrize("fused", [False, True])
def test_q_k_v_have_diffusers_bits(transformer, monkeypatch, fused):
    from diffusers.models.transformers import transformer_minimax_h3 as h3

    seen = []

    def keep(q, k, v, **kwargs):
        seen.append((q, k, v))
        return q

    monkeypatch.setattr(h3, "dispatch_attention_fn", keep)
    attn = h3.MiniMaxH3Attention(256, 4, 128)
    if fused:
        attn.fuse_projections()
    hidden = torch.randn(2, 10, 256).bfloat16()
    attn = attn.bfloat16()
    angles = torch.randn(10, 96)
    rotary = (angles.cos(), angles.sin())
    attn(hidden, rotary)
    for ours, theirs in zip(host._project(attn, hidden, rotary), seen[0], strict=True):
        assert torch.equal(ours, theirs)


def test_sage_is_close_to_dense_but_not_equal(transformer, scheduler):
    arguments = packed_arguments()
    out, _ = run(transformer, arguments, scheduler, AttentionRequest("sage"))
    error = relative_error(out, forward(transformer, arguments))
    assert 1e-4 < error < 0.05


def test_a_bfloat16_model_keeps_its_dtype(scheduler):
    transformer = tiny_h3.make_transformer(seed=3).bfloat16()
    arguments = packed_arguments()
    out, nox_run = run(transformer, arguments, scheduler, AttentionRequest("sage"))
    assert out.dtype == torch.bfloat16
    assert nox_run.calls == {("sage", "mode sage"): 4}
    assert relative_error(out.float(), forward(transformer, arguments).float()) < 0.05


@pytest.mark.parametrize("layout", ["windows", "raster"])
def test_sparse_at_full_budget_has_the_bits_of_sage(transformer, scheduler, layout):
    arguments = packed_arguments()
    sage, _ = run(transformer, arguments, scheduler, AttentionRequest("sage"))
    full, _ = run(
        transformer, arguments, scheduler, AttentionRequest("sparse", 1.0, layout), ANYWHERE
    )
    assert torch.equal(full, sage)


def test_smaller_budgets_are_further_from_dense(transformer, scheduler):
    arguments = packed_arguments(timestep=0.5)
    dense = forward(transformer, arguments)
    errors, shares = [], []
    for ratio in (0.2, 0.6, 1.0):
        out, nox_run = run(transformer, arguments, scheduler, AttentionRequest("sparse", ratio))
        errors.append(relative_error(out, dense))
        shares.append(nox_run.log.kept_share_of_all_calls)
    assert errors == sorted(errors, reverse=True)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_items_of_a_batch_do_not_mix(transformer, scheduler):
    first, second = packed_arguments(seed=1), packed_arguments(seed=2)
    both = dict(first)
    for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
        both[name] = torch.cat((first[name], second[name]))
    request = AttentionRequest("sparse", 0.2)
    with torch.no_grad(), host.nox_attention(transformer, request, ANYWHERE, scheduler=scheduler):
        alone = transformer(**second, return_dict=False)[0]
        batched = transformer(**both, return_dict=False)[0]
    # a batched product may round elsewhere, which INT8 and the selection magnify
    assert relative_error(batched[1:], alone) < 0.02


# ---- the packed sequence ----


def packed(arguments):
    return host.packed_sequence(
        arguments["position_ids"],
        arguments["video_indices"],
        arguments["audio_indices"],
        arguments["text_indices"],
        arguments["timestep"][arguments["timestep_indices"]],
    )


@pytest.mark.parametrize("timestep", [0.0, 0.9, 0.9995])
@pytest.mark.parametrize("anchors", [(), ("first",), ("first", "last")])
def test_segments_come_from_the_forwards_arguments(anchors, timestep):
    sequence = packed(packed_arguments(anchors, timestep))
    num_cond = len(anchors) * GRID.h * GRID.w
    audio_start = NUM_TEXT + num_cond
    video_start = audio_start + 2 * NUM_AUDIO_LATENTS
    expected = [Segment(0, NUM_TEXT, "text")]
    for row in range(NUM_TEXT, audio_start, GRID.h * GRID.w):
        frame = TokenGrid(1, GRID.h, GRID.w)
        expected.append(Segment(row, row + frame.num_tokens, "cond", frame))
    expected.append(Segment(audio_start, video_start, "audio"))
    expected.append(Segment(video_start, video_start + GRID.num_tokens, "video", GRID))
    assert sequence.segments == tuple(expected)
    assert sequence.token_grid == GRID


def test_a_reference_soundtrack_before_the_audio_is_a_condition():
    arguments = packed_arguments()
    row_time = arguments["timestep"][arguments["timestep_indices"]]
    row_time[NUM_TEXT : NUM_TEXT + 6] = 1.0  # clean: given, not made
    arguments["timestep"], arguments["timestep_indices"] = row_time.unique(return_inverse=True)
    kinds = [segment.kind for segment in packed(arguments).segments]
    assert kinds == ["text", "cond_audio", "audio", "video"]


def test_rows_that_are_not_a_grid_are_refused():
    arguments = packed_arguments()
    arguments["position_ids"][-3:, 2] += 1.0
    with pytest.raises(SequenceError, match="grid"):
        packed(arguments)


def test_a_sequence_that_does_not_end_with_video_is_refused():
    arguments = packed_arguments()
    arguments["video_indices"], last = arguments["video_indices"].split((GRID.num_tokens - 1, 1))
    arguments["text_indices"] = torch.cat((arguments["text_indices"], last))
    with pytest.raises(SequenceError, match="end with the video"):
        packed(arguments)


def test_two_packed_sequences_in_one_context_get_their_own_plans(transformer, scheduler):
    request = AttentionRequest("sparse", 0.2)
    plain, keyed = packed_arguments(), packed_arguments(("first",))
    alone = [run(transformer, x, scheduler, request)[0] for x in (plain, keyed)]
    with host.nox_attention(transformer, request, ANYWHERE, scheduler=scheduler):
        together = [forward(transformer, x) for x in (plain, keyed, plain)]
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])
    assert torch.equal(together[2], alone[0])


# ---- decisions ----


def test_steps_come_from_sigmas_not_from_counting(transformer, scheduler):
    dense = DenseRequest(first_steps=1, blocks=())
    request = AttentionRequest("sparse", 0.2)
    times = scheduler.timesteps.tolist()
    with host.nox_attention(transformer, request, dense, scheduler=scheduler) as nox_run:
        for time in (times[2], times[0], times[3], times[0]):  # out of order, one repeated
            forward(transformer, packed_arguments(timestep=time))
    assert nox_run.calls == {("sage", "first steps"): 8, ("sparse", "sparse"): 8}


@pytest.mark.parametrize(("num_steps", "num_dense"), [(4, 1), (8, 2), (20, 4)])
def test_auto_first_steps_are_a_fifth_of_the_schedule(transformer, num_steps, num_dense):
    scheduler = diffusers.MiniMaxH3Scheduler(shift=12.0)
    scheduler.set_timesteps(num_steps + 1)
    nox_run = host.NoxRun(
        transformer, AttentionRequest("sparse"), DenseRequest(), None, None, scheduler
    )
    nox_run.check()
    reasons = []
    for time in scheduler.timesteps.tolist():
        nox_run.begin_forward(packed_arguments(timestep=time))
        decision = nox_run.decide(1, torch.zeros(1, nox_run.sequence.num_rows, 256), 128)
        reasons.append(decision.reason)
    assert reasons == ["first steps"] * num_dense + ["sparse"] * (num_steps - num_dense)


def test_a_new_schedule_inside_the_context_is_seen(transformer, scheduler):
    dense = DenseRequest(first_steps=2, blocks=())
    time = float(scheduler.timesteps[2])
    arguments = packed_arguments(timestep=time)
    request = AttentionRequest("sparse", 0.2)
    with host.nox_attention(transformer, request, dense, scheduler=scheduler) as nox_run:
        forward(transformer, arguments)
        scheduler.set_timesteps(2)  # one step: every sigma belongs to it
        forward(transformer, arguments)
    assert nox_run.calls == {("sparse", "sparse"): 4, ("sage", "first steps"): 4}


def test_native_dense_layers_run_diffusers_own_processor(transformer, scheduler, caplog):
    dense = DenseRequest(first_steps=0, blocks=(0, 2), kernel="native")
    _, nox_run = run(
        transformer, packed_arguments(), scheduler, AttentionRequest("sparse", 0.2), dense
    )
    assert nox_run.calls == {("native", "dense block"): 2, ("sparse", "sparse"): 2}


def test_a_dtype_that_no_kernel_takes_is_left_to_diffusers_and_counted(scheduler, caplog):
    transformer = tiny_h3.make_transformer(seed=3).double()
    arguments = packed_arguments()
    out, nox_run = run(transformer, arguments, scheduler, AttentionRequest("sage"))
    assert torch.equal(out, forward(transformer, arguments))
    ((kind, reason),) = nox_run.calls
    assert kind == "native"
    assert "float64" in reason
    assert len(caplog.records) == 1


def test_calls_that_need_gradients_are_left_to_diffusers(transformer, scheduler):
    arguments = packed_arguments()
    with host.nox_attention(transformer, AttentionRequest("sage"), scheduler=scheduler) as nox_run:
        transformer(**arguments)
    assert set(nox_run.calls) == {("native", "the call needs gradients")}


def test_the_kernel_that_computed_is_known(transformer, scheduler):
    _, nox_run = run(transformer, packed_arguments(), scheduler, AttentionRequest("sage"))
    assert [kernel.device_type for kernel in nox_run.kernels] == ["cpu"]


# ---- leaving no trace ----


def test_the_transformer_is_untouched_afterwards(transformer, scheduler):
    arguments = packed_arguments()
    processors, before = dict(transformer.attn_processors), forward(transformer, arguments)
    run(transformer, arguments, scheduler, AttentionRequest("sparse", 0.2))
    after = transformer.attn_processors
    assert processors.keys() == after.keys()
    assert all(after[name] is processors[name] for name in processors)
    assert not transformer._forward_pre_hooks
    assert not transformer._forward_hooks
    assert torch.equal(forward(transformer, arguments), before)


def test_an_error_inside_the_context_restores_the_processors(transformer, scheduler):
    processors = dict(transformer.attn_processors)
    with (
        pytest.raises(ZeroDivisionError),
        host.nox_attention(transformer, AttentionRequest("sage"), scheduler=scheduler),
    ):
        raise ZeroDivisionError
    assert all(
        x is y
        for x, y in zip(transformer.attn_processors.values(), processors.values(), strict=True)
    )


def test_refiner_blocks_are_never_touched(transformer, scheduler):
    refiners = [block.attn.get_processor() for block in transformer.token_refiner.refiner_blocks]
    with host.nox_attention(transformer, AttentionRequest("sage"), scheduler=scheduler):
        inside = [b.attn.get_processor() for b in transformer.token_refiner.refiner_blocks]
        layers = [block.attn.get_processor() for block in transformer.transformer_blocks]
    assert all(x is y for x, y in zip(inside, refiners, strict=True))
    assert all(isinstance(layer, host.NoxH3AttnProcessor) for layer in layers)


def test_mode_dense_installs_nothing(transformer, scheduler):
    processors = dict(transformer.attn_processors)
    with host.nox_attention(transformer, AttentionRequest("dense"), scheduler=scheduler) as nox_run:
        assert dict(transformer.attn_processors) == processors
        assert not transformer._forward_pre_hooks
    assert not nox_run.calls


# ---- refusals ----


def test_another_model_is_refused_in_one_sentence(scheduler):
    with (
        pytest.raises(
            RequestError, match=r"MiniMaxH3Transformer3DModel, this model is a Linear\.$"
        ),
        host.nox_attention(torch.nn.Linear(1, 1), AttentionRequest("sage"), scheduler=scheduler),
    ):
        pass


def test_a_dense_block_beyond_the_model_is_refused_at_the_door(transformer, scheduler):
    with (
        pytest.raises(RequestError, match="blocks 0 to 3"),
        host.nox_attention(
            transformer, AttentionRequest("sparse"), DenseRequest(blocks=(4,)), scheduler=scheduler
        ),
    ):
        pass


def test_a_table_of_another_model_is_refused_at_the_door(transformer, scheduler):
    with (
        pytest.raises(RequestError, match="50 layers"),
        host.nox_attention(
            transformer,
            AttentionRequest("sparse"),
            table=preset_table("uniform", 50, 56),
            scheduler=scheduler,
        ),
    ):
        pass


def test_an_unknown_layout_is_refused(transformer, scheduler):
    with (
        pytest.raises(RequestError, match="bands"),
        host.nox_attention(
            transformer, AttentionRequest("sparse", layout="bands"), scheduler=scheduler
        ),
    ):
        pass


def test_a_second_context_is_refused(transformer, scheduler):
    request = AttentionRequest("sage")
    with (
        host.nox_attention(transformer, request, scheduler=scheduler),
        pytest.raises(RequestError, match="another nox_attention"),
        host.nox_attention(transformer, request, scheduler=scheduler),
    ):
        pass


def test_a_scheduler_without_sigmas_is_refused(transformer):
    scheduler = diffusers.MiniMaxH3Scheduler()
    with pytest.raises(RequestError, match="set_timesteps"):
        run(transformer, packed_arguments(), scheduler, AttentionRequest("sage"))


def test_a_block_called_alone_is_refused(transformer, scheduler):
    with host.nox_attention(transformer, AttentionRequest("sage"), scheduler=scheduler):
        forward(transformer, packed_arguments())
        with pytest.raises(SequenceError, match="call the transformer itself"), torch.no_grad():
            transformer.transformer_blocks[0].attn(torch.zeros(1, 4, 256))


# ---- mode veda ----


def make_predictor(transformer, grid, num_layers=None):
    sizes = {
        "num_layers": num_layers or transformer.config.num_layers,
        "num_heads": transformer.config.num_attention_heads,
    }
    plan = random_plan("clip", grid, ("4x8x4", "8x4x4"), **sizes)
    return VedaPredictor.from_bundle(random_bundle((plan,), **sizes, name="clip.safetensors"))


def test_veda_routes_by_the_predictor(transformer, scheduler):
    predictor = make_predictor(transformer, GRID)
    arguments = packed_arguments()
    outs = {}
    for mode in ("sage", "veda"):
        with host.nox_attention(
            transformer,
            AttentionRequest(mode),
            ANYWHERE,
            predictor=predictor,
            scheduler=scheduler,
        ) as nox_run:
            outs[mode] = forward(transformer, arguments)
    assert nox_run.calls == {("veda", "veda"): transformer.config.num_layers}
    assert 0.2 < nox_run.log.kept_share < 1.0
    assert not torch.equal(outs["veda"], outs["sage"])
    assert relative_error(outs["veda"], outs["sage"]) < 0.5


def test_a_clip_that_the_predictor_does_not_know_is_refused_before_the_first_layer(
    transformer, scheduler
):
    predictor = make_predictor(transformer, TokenGrid(7, 8, 4))
    request = AttentionRequest("veda")
    with (
        host.nox_attention(
            transformer, request, ANYWHERE, predictor=predictor, scheduler=scheduler
        ) as nox_run,
        pytest.raises(RequestError, match=r"Veda has no plan for 128x256, 15 frames"),
    ):
        forward(transformer, packed_arguments())
    assert not nox_run.calls


@pytest.mark.parametrize("num_layers", [None, 7])
def test_veda_without_a_predictor_that_fits_is_refused_at_once(transformer, scheduler, num_layers):
    predictor = num_layers and make_predictor(transformer, GRID, num_layers)
    message = "clip.safetensors is for 7 layers" if num_layers else "needs a predictor"
    with (
        pytest.raises(RequestError, match=message),
        host.nox_attention(
            transformer, AttentionRequest("veda"), predictor=predictor, scheduler=scheduler
        ),
    ):
        pass
