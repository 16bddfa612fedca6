"""Demo and command line: the files of a small run, and refusals in one sentence."""

import json
import re

import pytest
import torch

av = pytest.importorskip("av")
pytest.importorskip("diffusers", minversion="0.40")
pytest.importorskip("matplotlib")

from nox_kernels import demo, pipeline, tiny_h3  # noqa: E402
from nox_kernels.__main__ import main  # noqa: E402
from nox_kernels.layout import QUERY_TILE  # noqa: E402
from nox_kernels.request import AttentionRequest  # noqa: E402

# 37 x 3 x 3 tokens: six video KV tiles, so that 15 % keeps one of them and 50 % three.
SMALL = ["--width", "96", "--height", "96", "--steps", "2", "--seed", "7"]


def run(out, *arguments):
    assert main(["demo", "--out", str(out), *SMALL, *arguments]) == 0
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def summary(folder):
    return run(folder)


def decode(path):
    """Frames [F, H, W, 3] and samples [C, L] of a file."""
    with av.open(str(path)) as container:
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
    with av.open(str(path)) as container:
        chunks = [torch.from_numpy(f.to_ndarray()) for f in container.decode(audio=0)]
    return torch.stack(frames), torch.cat(chunks, dim=1)


# ---- a run ----


@pytest.mark.parametrize("mode", demo.MODES)
def test_every_mode_has_a_video_with_sound(folder, summary, mode):
    frames, samples = decode(folder / f"{mode}.mp4")
    assert frames.shape == (124, 96, 96, 3)
    assert frames.float().std() > 10
    assert samples.shape[0] == 2
    assert abs(samples.shape[1] / 32000 - 124 / 24) < 0.1
    assert samples.std() > 1e-3


def test_the_side_by_side_clip_shows_all_modes_and_has_sound(folder, summary):
    frames, samples = decode(folder / "side-by-side.mp4")
    assert len(frames) == 124
    assert frames.shape[2] == 3 * 96
    assert samples.std() > 1e-3
    place, clip = frames[:, -96:, 96:192].float(), decode(folder / "veda.mp4")[0].float()
    assert (place - clip).abs().mean() < 4  # of 255: both are coded
    assert frames[:, -90:, -90:].float().mean() < 4  # no sixth clip


def test_no_other_file_is_left(folder, summary):
    assert sorted(path.name for path in folder.iterdir()) == sorted(demo.FILES)


def test_differences_to_dense_are_small_and_ordered(summary):
    for stream in ("frames", "audio"):
        error = {
            mode: facts[f"{stream}_mean_abs_difference"] for mode, facts in summary["modes"].items()
        }
        assert error["dense"] == 0
        assert 0 < error["sage"] < error["sparse-50"] < error["sparse-15"] < 0.1
        assert error["sage"] < error["veda"] < 0.1


def test_kept_shares_follow_the_budgets(summary):
    shares = {m: f["kept_share_of_routed_calls"] for m, f in summary["modes"].items()}
    assert shares["dense"] is None
    assert shares["sage"] is None
    assert 0 < shares["sparse-15"] < shares["sparse-50"] < 1
    # 37 x 3 x 3 tokens would fill 3 tiles, so every row keeps its own alone; the 4 global tiles
    # are dense both ways. Heads cut the video into 10 tiles (4x8x4) or 5 (8x4x4).
    of_tens, of_fives = ((n * (1 + 4) + 4 * (n + 4)) / (n + 4) ** 2 for n in (10, 5))
    assert of_tens < shares["veda"] < of_fives


def test_calls_are_counted_by_reason(summary):
    calls = {
        mode: {(call["kind"], call["reason"]): call["count"] for call in facts["calls"]}
        for mode, facts in summary["modes"].items()
    }
    sparse_gates = {("sage", "first steps"): 4, ("sage", "dense block"): 1}
    sparse = {**sparse_gates, ("sparse", "sparse"): 3}
    assert calls == {
        "dense": {},
        "sage": {("sage", "mode sage"): 8},
        "sparse-15": sparse,
        "sparse-50": sparse,
        "veda": {**sparse_gates, ("veda", "veda"): 3},
    }


def test_the_summary_says_what_ran_where(summary):
    assert summary["is_synthetic"]
    assert "noise" in summary["note"]
    assert summary["device"] == "cpu"
    assert summary["modes"]["dense"]["computed_by"] == ["diffusers' own attention"]
    for facts in summary["modes"].values():
        assert len(facts["step_seconds"]) == summary["num_steps"] == 2
        assert facts["first_step_seconds"] == facts["step_seconds"][0]
        assert facts["other_step_seconds"] == facts["step_seconds"][1]


def test_a_second_run_replaces_its_files_with_the_same_bits(summary, monkeypatch, tmp_path):
    for name in demo.FILES:
        (tmp_path / name).write_text("old")
    (tmp_path / "summary.json").write_text(json.dumps({"made_by": demo.MADE_BY}))
    monkeypatch.setattr(demo, "MODES", {m: demo.MODES[m] for m in ("dense", "sparse-15")})
    again = run(tmp_path)
    for mode, facts in again["modes"].items():
        for stream in ("frames_sha256", "audio_sha256"):
            assert summary["modes"][mode][stream] == facts[stream]
    files = {"dense.mp4", "sparse-15.mp4", "side-by-side.mp4", "route.png", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert all((tmp_path / name).stat().st_size > 1000 for name in files)


def test_sparse_at_full_budget_renders_the_bits_of_sage(summary, monkeypatch, tmp_path):
    monkeypatch.setattr(
        demo,
        "MODES",
        {"dense": demo.MODES["dense"], "sparse-15": AttentionRequest("sparse", 1.0)},
    )
    full = run(tmp_path)["modes"]["sparse-15"]
    assert full["frames_sha256"] == summary["modes"]["sage"]["frames_sha256"]
    assert full["audio_sha256"] == summary["modes"]["sage"]["audio_sha256"]
    assert full["kept_share_of_routed_calls"] is None
    assert not (tmp_path / "route.png").exists()  # no call was sparse


def test_saved_weights_render_what_the_made_ones_do(summary, monkeypatch, tmp_path):
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("saved weights run on the GPU")
    tiny_h3.save_tiny_h3(tmp_path / "model")
    monkeypatch.setattr(demo, "MODES", {m: demo.MODES[m] for m in ("dense", "sage")})
    saved = run(tmp_path / "out", "--model", str(tmp_path / "model"))
    assert saved["is_synthetic"]
    assert saved["model"] == str(tmp_path / "model")
    for mode in ("dense", "sage"):
        assert saved["modes"][mode]["frames_sha256"] == summary["modes"][mode]["frames_sha256"]


# ---- the synthetic model ----


def test_the_tiny_model_is_a_function_of_its_seed():
    first, same, other = (tiny_h3.make_transformer(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["proj_in.weight"], other["proj_in.weight"])


def test_making_the_tiny_model_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    tiny_h3.make_tiny_h3()
    assert torch.equal(torch.get_rng_state(), state)


def test_prompts_differ():
    one, two = tiny_h3.prompt_embeds("a red kite"), tiny_h3.prompt_embeds("a blue kite")
    assert one.shape == two.shape == (1, 3, 64)
    assert torch.equal(one[:, [0, 2]], two[:, [0, 2]])
    assert not torch.equal(one[:, 1], two[:, 1])


def test_one_tile_is_smaller_than_the_small_canvas():
    assert QUERY_TILE < 37 * 3 * 3  # else nothing above could skip a tile


# ---- refusals ----


def refusal(capsys, *arguments):
    """The one sentence that a refused command prints."""
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("nox: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "4"], "between 5 and 14.375"),
        (["--seconds", "15"], "between 5 and 14.375"),
        (["--seconds", "nan"], "between 5 and 14.375"),
        (["--steps", "1"], "between 2 and 1000"),
        (["--width", "100", "--height", "96"], "--width must be a positive multiple of 32"),
        (["--width", "96", "--height", "0"], "--height must be a positive multiple of 32"),
        (["--width", "96"], "neither"),
        (["--prompt", " "], "--prompt is empty"),
        (["--seed", "-1"], "--seed"),
        (["--model", "no/such/folder"], "not a folder|accelerate"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, tmp_path, arguments, words):
    out = tmp_path / "out"
    assert re.search(words, refusal(capsys, "--out", str(out), *arguments))
    assert not out.exists()


def test_a_file_in_place_of_the_folder_is_refused(capsys, tmp_path):
    (tmp_path / "out").write_text("mine")
    assert "is a file, not a folder" in refusal(capsys, "--out", str(tmp_path / "out"))


def test_somebody_elses_files_are_never_replaced(capsys, tmp_path):
    (tmp_path / "dense.mp4").write_text("mine")
    assert "dense.mp4" in refusal(capsys, "--out", str(tmp_path))
    (tmp_path / "summary.json").write_text('{"made_by": "me"}')
    assert "not from a demo" in refusal(capsys, "--out", str(tmp_path))
    assert (tmp_path / "dense.mp4").read_text() == "mine"


def test_a_missing_package_is_named_with_its_remedy(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "PACKAGES", ("av", "no_such_package"))
    line = refusal(capsys, "--out", str(tmp_path / "out"))
    assert "no_such_package" in line
    assert "pip install 'nox-h3[demo]'" in line


def test_what_only_weights_need_is_asked_for_with_weights(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "MODEL_PACKAGES", ("no_such_package",))
    line = refusal(capsys, "--out", str(tmp_path / "out"), "--model", str(tmp_path))
    assert "no_such_package" in line


def test_weights_without_a_text_encoder_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "MODEL_PACKAGES", ())
    monkeypatch.setattr(pipeline, "ENCODER_PACKAGES", ())
    tiny_h3.save_tiny_h3(tmp_path / "model")
    (tmp_path / "model" / tiny_h3.MARKER).unlink()
    line = refusal(capsys, "--out", str(tmp_path / "out"), "--model", str(tmp_path / "model"))
    assert "lacks text_encoder, tokenizer, processor" in line


def test_weights_that_do_not_load_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "MODEL_PACKAGES", ())
    tiny_h3.save_tiny_h3(tmp_path / "model")
    (tmp_path / "model" / "transformer" / "config.json").write_text("{")
    line = refusal(capsys, "--out", str(tmp_path / "out"), "--model", str(tmp_path / "model"))
    assert "transformer does not load" in line


def test_no_command_prints_help(capsys):
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out
