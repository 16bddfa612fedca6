"""Bench: what it writes is what it measured, and nothing is dropped in silence."""

import json

import pytest
import torch

from nox_kernels.__main__ import main
from nox_kernels.bench import command, contenders, inputs, measure, monitor, quality, timing
from nox_kernels.errors import RequestError
from nox_kernels.reference import dense_attention
from nox_kernels.sequence import TokenGrid

CPU = torch.device("cpu")
ROWS = ["300", "700"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a real run on the CPU."""
    out = tmp_path_factory.mktemp("bench") / "new"
    arguments = ["bench", "--device", "cpu", "--heads", "2", "--repeats", "2", "--out", str(out)]
    assert main([*arguments, "--rows", *ROWS, "--sets", "normal", "strong"]) == 0
    return out


@pytest.fixture(scope="module")
def results(written):
    return json.loads((written / "bench.json").read_text())


def by_name(run):
    return {entry["name"]: entry for entry in run["contenders"]}


def test_every_size_is_measured_and_one_with_every_set(results):
    runs = [(run["num_rows"], run["set"]) for run in results["runs"]]
    assert runs == [(300, "normal"), (700, "normal"), (700, "strong")]
    assert results["skipped"] == []


def test_every_contender_is_measured_or_has_a_reason(results):
    names = [contender.name for contender in contenders.CONTENDERS]
    for run in results["runs"]:
        assert list(by_name(run)) == names
        for entry in run["contenders"]:
            samples = entry["samples"]["device_ms"]
            if entry["reason"] is None:
                assert len(samples) == 2
                assert min(samples) > 0
                assert entry["median_ms"] == pytest.approx(sum(samples) / 2)
            else:
                assert entry["median_ms"] is None
    assert by_name(run)[contenders.CUDNN]["reason"] == "needs an NVIDIA GPU"
    assert by_name(run)["torch flash"]["reason"] is None


def test_errors_are_those_of_the_arithmetic(results):
    for run in results["runs"]:
        entries = by_name(run)
        for name in (contenders.ACCURATE, "nox sparse 15 %", "nox veda 10 %"):
            assert 0.005 < entries[name]["quality"]["error"] < 0.020
        assert 0.020 < entries["nox sage faithful"]["quality"]["error"] < 0.050
        assert 0.0005 < entries["torch flash"]["quality"]["error"] < 0.005
    # what veda skips is an error against dense, none against its own keys
    veda = entries["nox veda 10 %"]
    assert veda["kept_share"] < 0.9
    assert veda["quality"]["dense_error"] > 2 * veda["quality"]["error"]


def test_the_table_names_all_that_is_in_the_json(written, results):
    table = (written / "bench.md").read_text()
    for contender in contenders.CONTENDERS:
        assert contender.name in table
    for run in results["runs"]:
        assert f"## S = {run['num_rows']:,}, set {run['set']}" in table
    for line in table.splitlines():
        if line.startswith("| nox"):
            assert line.count("|") == 17
    assert torch.__version__ in table


def test_the_plot_is_a_picture_and_can_be_drawn_again(written, tmp_path):
    from PIL import Image

    with Image.open(written / "bench.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
    copied = tmp_path / "bench.json"
    copied.write_bytes((written / "bench.json").read_bytes())
    assert main(["bench", "--plot-from", str(copied)]) == 0
    assert (tmp_path / "bench.png").read_bytes() == (written / "bench.png").read_bytes()


def test_a_former_bench_is_not_overwritten(written, capsys):
    before = (written / "bench.json").read_bytes()
    assert main(["bench", "--device", "cpu", "--out", str(written)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (written / "bench.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "3"], "rows at least"),
        (["--heads", "0"], "start at 1"),
        (["--repeats", "0"], "start at 1"),
        (["--sets", "loud"], "known: normal, strong, outlier"),
        (["--plot-from", "nowhere.json"], "is not a bench.json"),
    ],
)
def test_a_wrong_option_gets_one_sentence(arguments, words, tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "new"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_broken_json_is_refused(tmp_path, capsys):
    path = tmp_path / "bench.json"
    for text in ("{", "[]", '{"runs": [{}]}'):
        path.write_text(text)
        assert main(["bench", "--plot-from", str(path)]) == 2
        assert "is not a bench.json" in capsys.readouterr().err


@pytest.mark.parametrize("num_rows", [inputs.MIN_ROWS, 100, 900, *command.ROWS])
def test_a_clip_has_exactly_the_rows_asked_for(num_rows):
    assert inputs.clip_of(num_rows).num_rows == num_rows


def test_the_default_sizes_are_clips_that_h3_renders():
    grids = [inputs.clip_of(num_rows).token_grid for num_rows in command.ROWS]
    assert grids == [TokenGrid(t, 24, 42) for t in (7, 37, 102)]


def test_inputs_are_views_of_one_buffer_and_the_same_each_time():
    for name in inputs.SETS:
        q, k, v = inputs.make_inputs(name, 300, 2, CPU)
        assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.stride() == (128, 3 * 2 * 128, 1)
        again = inputs.make_inputs(name, 300, 2, CPU)
        assert all(torch.equal(x, y) for x, y in zip((q, k, v), again, strict=True))
        if name == "strong":
            assert k[..., 19].float().std() > 4 * k[..., 20].float().std()
        if name == "outlier":
            assert (v == 1504).sum() == 2  # 1500 in bfloat16, a head each
            assert 3 < v[..., 6].float().std() < 5


def test_a_contender_that_fails_keeps_its_reason_and_stops_no_other():
    def dies_at_once(problem):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def dies_later(problem):
        left = [1, 1]  # both calls of the warm-up

        def call():
            left.pop()
            return torch.zeros(1, 1, 100, 128)

        return contenders.Ready(call)

    sage = contenders.CONTENDERS[0]
    lost = contenders.Contender("lost", None, dies_at_once)
    late = contenders.Contender("late", None, dies_later)
    problem = contenders.Problem(
        inputs.clip_of(100), inputs.make_inputs("normal", 100, 1, CPU), print
    )
    entries = measure.measure(problem, timing.Timer(CPU), (lost, late, sage), 2)
    assert entries[0]["reason"] == "out of GPU memory"
    assert entries[1]["reason"] == "IndexError: pop from empty list"
    assert entries[1]["quality"] is None
    assert entries[2]["reason"] is None
    assert len(entries[2]["samples"]["device_ms"]) == 2


def test_slow_calls_run_fewer_times():
    assert timing.num_runs(0.5, 12) == 12
    assert timing.num_runs(2.0, 12) == 3
    assert timing.num_runs(100.0, 12) == 1


def test_sampled_rows_are_few_and_hold_both_ends():
    for num_rows in (2, 50, 64, 38_304):
        rows = quality.sampled_rows(num_rows).tolist()
        assert rows == sorted(set(rows))
        assert len(rows) == min(64, num_rows)
        assert (rows[0], rows[-1]) == (0, num_rows - 1)


def test_both_forms_of_output_are_the_same_rows():
    qkv = inputs.make_inputs("normal", 200, 3, CPU)
    truth = dense_attention(*qkv)
    rows = quality.sampled_rows(200)
    packed = truth.transpose(0, 1).flatten(1)
    for out in (truth[None], packed):
        found = quality.output_rows(out, rows, 3)
        assert torch.allclose(found, quality.float64_rows(qkv, rows), atol=1e-12)
    same = quality.compare(found, truth[:, rows])
    assert same["error"] < 1e-12
    assert same["worst_cosine"] == pytest.approx(1)
    assert quality.compare(found * torch.nan, truth[:, rows])["error"] is None


def test_a_machine_without_a_gpu_has_a_reason_for_no_clocks():
    with monitor.Monitor(CPU) as watched:
        pass
    assert watched.summary() == {"samples": [], "reason": "not a GPU"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(RequestError, match="sees no GPU"):
        command.BenchRequest(device="cuda")
