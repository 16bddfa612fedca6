"""Layout tables: which layout each head uses, from a file or made uniform."""

import json

import pytest

from nox_kernels.errors import FileError, NoxError
from nox_kernels.layout import MENU
from nox_kernels.layout_table import (
    LayoutTable,
    preset_table,
    read_table,
    write_table,
)
from nox_kernels.sequence import TokenGrid

LANDSCAPE = TokenGrid(37, 24, 42)
PORTRAIT = TokenGrid(37, 42, 24)
SQUARE = TokenGrid(37, 24, 24)

NUM_LAYERS, NUM_HEADS = 50, 56


def mixed_indices(step):
    """A [layers][heads] table that uses every candidate."""
    return tuple(
        tuple((layer_idx + step * head_idx) % 13 for head_idx in range(NUM_HEADS))
        for layer_idx in range(NUM_LAYERS)
    )


def make_table(**changes):
    fields = {
        "name": "mixed",
        "candidates": tuple(MENU),
        "landscape": mixed_indices(1),
        "portrait": mixed_indices(5),
        "budget": 0.15,
        "calibration": {"shots": 2, "steps": 4, "anchors": 48, "mean_mass": {"raster": 0.751}},
    }
    return LayoutTable(**{**fields, **changes})


def write_json(path, **changes):
    """A valid file with some top-level values replaced; None as a change is the JSON null."""
    write_table(path, make_table())
    data = json.loads(path.read_text(encoding="utf-8"))
    data.update(changes)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def refusal_of(path):
    with pytest.raises(FileError) as refusal:
        read_table(path)
    message = str(refusal.value)
    assert isinstance(refusal.value, NoxError)
    assert path.name in message
    return message


# ---- heads_of_layer ----


def test_each_orientation_uses_its_own_table():
    table = make_table()
    for layer_idx in (0, 7, 49):
        wide = table.heads_of_layer(layer_idx, LANDSCAPE)
        tall = table.heads_of_layer(layer_idx, PORTRAIT)
        assert list(wide) == [MENU[(layer_idx + head_idx) % 13] for head_idx in range(NUM_HEADS)]
        assert list(tall) == [
            MENU[(layer_idx + 5 * head_idx) % 13] for head_idx in range(NUM_HEADS)
        ]


def test_a_missing_portrait_table_is_the_landscape_one_with_height_and_width_swapped():
    swapped = {
        "raster": "raster",
        "4x8x4": "4x4x8",
        "4x4x8": "4x8x4",
        "8x4x4": "8x4x4",
        "2x8x8": "2x8x8",
        "8x8x2": "8x2x8",
        "8x2x8": "8x8x2",
        "1x8x16": "1x16x8",
        "1x16x8": "1x8x16",
        "2x4x16": "2x16x4",
        "2x16x4": "2x4x16",
        "16x4x2": "16x2x4",
        "16x2x4": "16x4x2",
    }
    table = make_table(portrait=None)
    for layer_idx in (0, 31):
        wide = table.heads_of_layer(layer_idx, LANDSCAPE)
        tall = table.heads_of_layer(layer_idx, PORTRAIT)
        assert list(tall) == [swapped[name] for name in wide]


def test_a_missing_landscape_table_is_the_portrait_one_with_height_and_width_swapped():
    table = LayoutTable(
        name="tall",
        candidates=("raster", "4x4x8"),
        landscape=None,
        portrait=((0, 1, 1), (1, 1, 0)),
        budget=0.15,
        calibration={},
    )
    assert tuple(table.heads_of_layer(0, PORTRAIT)) == ("raster", "4x4x8", "4x4x8")
    assert tuple(table.heads_of_layer(0, LANDSCAPE)) == ("raster", "4x8x4", "4x8x4")
    assert tuple(table.heads_of_layer(1, SQUARE)) == ("4x8x4", "4x8x4", "raster")


def test_a_swapped_shape_need_not_be_a_candidate():
    table = LayoutTable(
        name="one",
        candidates=("8x8x2",),
        landscape=((0, 0),),
        portrait=None,
        budget=0.15,
        calibration={},
    )
    assert tuple(table.heads_of_layer(0, LANDSCAPE)) == ("8x8x2", "8x8x2")
    assert tuple(table.heads_of_layer(0, PORTRAIT)) == ("8x2x8", "8x2x8")


def test_a_square_clip_counts_as_landscape():
    table = make_table()
    assert table.heads_of_layer(3, SQUARE) == table.heads_of_layer(3, LANDSCAPE)
    assert table.heads_of_layer(3, SQUARE) != table.heads_of_layer(3, PORTRAIT)


def test_duration_does_not_choose_the_table():
    table = make_table()
    assert table.heads_of_layer(9, TokenGrid(107, 24, 42)) == table.heads_of_layer(9, LANDSCAPE)


@pytest.mark.parametrize("portrait", [mixed_indices(5), None])
@pytest.mark.parametrize(("num_layers", "num_heads"), [(49, 56), (50, 55), (56, 50), (1, 1)])
def test_a_model_of_another_size_is_refused_by_name(num_layers, num_heads, portrait):
    table = make_table(portrait=portrait)
    table.check_model(50, 56)
    with pytest.raises(NoxError) as refusal:
        table.check_model(num_layers, num_heads)
    for named in ("mixed", "50", "56", str(num_layers), str(num_heads)):
        assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("grid", "name"), [(LANDSCAPE, "4x8x4"), (SQUARE, "4x8x4"), (PORTRAIT, "4x4x8")]
)
def test_the_uniform_table_gives_every_head_one_shape_per_orientation(grid, name):
    table = preset_table("uniform", NUM_LAYERS, NUM_HEADS)
    assert table.name == "uniform"
    for layer_idx in (0, 25, 49):
        assert tuple(table.heads_of_layer(layer_idx, grid)) == (name,) * NUM_HEADS


@pytest.mark.parametrize("grid", [LANDSCAPE, SQUARE, PORTRAIT])
def test_the_raster_table_leaves_every_head_in_natural_order(grid):
    table = preset_table("raster", 4, 3)
    assert tuple(table.heads_of_layer(3, grid)) == ("raster",) * 3
    with pytest.raises(NoxError, match="raster"):
        table.check_model(5, 3)


@pytest.mark.parametrize(
    ("layer_idx", "landscape", "portrait"),
    [
        (0, "8x8x2", "8x2x8"),
        (5, "8x8x2", "8x2x8"),
        (6, "2x8x8", "2x8x8"),
        (19, "2x8x8", "2x8x8"),
        (20, "8x4x4", "8x4x4"),
        (49, "8x4x4", "8x4x4"),
    ],
)
def test_bands_v0_changes_shape_at_blocks_6_and_20(layer_idx, landscape, portrait):
    table = preset_table("bands-v0", NUM_LAYERS, NUM_HEADS)
    assert table.heads_of_layer(layer_idx, LANDSCAPE) == (landscape,) * NUM_HEADS
    assert table.heads_of_layer(layer_idx, PORTRAIT) == (portrait,) * NUM_HEADS
    assert table.calibration == {}


@pytest.mark.parametrize("num_layers", [4, 49, 51])
def test_bands_v0_is_refused_by_name_on_a_model_of_other_depth(num_layers):
    with pytest.raises(NoxError, match=f"bands-v0 is for a model of 50 layers.*{num_layers}"):
        preset_table("bands-v0", num_layers, NUM_HEADS)


# ---- file ----


@pytest.mark.parametrize("portrait", [mixed_indices(5), None])
def test_a_table_comes_back_from_its_file(tmp_path, portrait):
    table = make_table(portrait=portrait)
    path = tmp_path / "mixed.json"
    write_table(path, table)
    back = read_table(path)
    assert back.name == "mixed"
    assert tuple(back.candidates) == tuple(table.candidates)
    assert back.landscape == table.landscape
    assert back.portrait == table.portrait
    assert back.budget == table.budget
    assert back.calibration == table.calibration
    for grid in (LANDSCAPE, PORTRAIT):
        assert back.heads_of_layer(20, grid) == table.heads_of_layer(20, grid)


def test_a_path_may_be_a_string(tmp_path):
    path = str(tmp_path / "mixed.json")
    write_table(path, make_table())
    assert read_table(path).landscape == mixed_indices(1)


def test_a_table_of_a_smaller_model_comes_back_too(tmp_path):
    path = tmp_path / "uniform.json"
    write_table(path, preset_table("uniform", 3, 4))
    back = read_table(path)
    assert tuple(back.heads_of_layer(2, LANDSCAPE)) == ("4x8x4",) * 4
    assert tuple(back.heads_of_layer(2, PORTRAIT)) == ("4x4x8",) * 4


def test_the_file_holds_the_documented_fields(tmp_path):
    path = tmp_path / "mixed.json"
    write_table(path, make_table())
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["format"] == "nox-layout-table-v1"
    assert data["model"] == "minimax-h3"
    assert data["num_layers"] == 50
    assert data["num_heads"] == 56
    assert data["tile"] == {"query": 128, "key": 64}
    assert data["order"] == "complete-first:t,h,w"
    assert data["candidates"] == list(MENU)
    assert data["tables"]["landscape"] == [list(row) for row in mixed_indices(1)]
    assert data["tables"]["portrait"] == [list(row) for row in mixed_indices(5)]
    assert data["budget"] == 0.15
    assert data["calibration"]["anchors"] == 48
    assert path.stat().st_size < 40_000


def test_a_missing_portrait_table_is_written_as_null(tmp_path):
    path = tmp_path / "mixed.json"
    write_table(path, make_table(portrait=None))
    assert json.loads(path.read_text(encoding="utf-8"))["tables"]["portrait"] is None


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("format", "nox-layout-table-v2", "nox-layout-table-v2"),
        ("format", None, "format"),
        ("model", "other-model", "other-model"),
        ("order", "inline:h,w,t", "inline:h,w,t"),
        ("tile", {"query": 96, "key": 64}, "96"),
        ("tile", {"query": 128, "key": 32}, "32"),
        ("tile", {"query": 128}, "tile"),
        ("tile", 128, "tile"),
        ("num_layers", 49, "49"),
        ("num_heads", 55, "55"),
        ("candidates", [*MENU[:-1], "5x5x5"], "5x5x5"),
        ("candidates", [*MENU[:-1], "hexagons"], "hexagons"),
        ("candidates", "raster", "candidates"),
        ("tables", [], "tables"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path, key, value, named):
    assert named in refusal_of(write_json(tmp_path / "odd.json", **{key: value}))


@pytest.mark.parametrize("orientation", ["landscape", "portrait"])
@pytest.mark.parametrize("value", [13, -1, 99, 1.5, "1", None])
def test_an_index_that_is_no_candidate_is_refused(tmp_path, orientation, value):
    tables = {
        "landscape": [list(row) for row in mixed_indices(1)],
        "portrait": [list(row) for row in mixed_indices(5)],
    }
    tables[orientation][17][23] = value
    assert orientation in refusal_of(write_json(tmp_path / "odd.json", tables=tables))


@pytest.mark.parametrize("orientation", ["landscape", "portrait"])
@pytest.mark.parametrize("damage", ["a layer less", "a head less", "a head more", "flat", "text"])
def test_a_table_of_the_wrong_shape_is_refused(tmp_path, orientation, damage):
    tables = {
        "landscape": [list(row) for row in mixed_indices(1)],
        "portrait": [list(row) for row in mixed_indices(5)],
    }
    rows = tables[orientation]
    if damage == "a layer less":
        rows.pop()
    elif damage == "a head less":
        rows[49].pop()
    elif damage == "a head more":
        rows[0].append(0)
    else:
        tables[orientation] = [0] * 50 if damage == "flat" else "raster"
    assert orientation in refusal_of(write_json(tmp_path / "odd.json", tables=tables))


def test_a_file_without_any_table_is_refused(tmp_path):
    tables = {"landscape": None, "portrait": None}
    message = refusal_of(write_json(tmp_path / "odd.json", tables=tables))
    assert "landscape" in message
    assert "portrait" in message


@pytest.mark.parametrize("budget", [0, -0.1, 1.5, "0.15", None, float("nan")])
def test_a_budget_outside_0_to_1_is_refused(tmp_path, budget):
    assert "budget" in refusal_of(write_json(tmp_path / "odd.json", budget=budget))


@pytest.mark.parametrize(
    "key",
    [
        "format",
        "model",
        "num_layers",
        "num_heads",
        "tile",
        "order",
        "candidates",
        "tables",
        "budget",
    ],
)
def test_a_missing_key_is_refused_by_name(tmp_path, key):
    path = write_json(tmp_path / "odd.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    del data[key]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert key in refusal_of(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"[1, 2, 3]", b"null", b"{}", b"\x93\xff\x00\xfe safetensors", b"\x00" * 64],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    refusal_of(path)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = write_json(tmp_path / "odd.json")
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole[: int(len(whole) * share)])
    refusal_of(path)


def test_an_orientation_that_is_misspelt_is_refused_by_name(tmp_path):
    tables = {"landscape": [[0] * 56] * 50, "portait": [[0] * 56] * 50}
    assert "'portait'" in refusal_of(write_json(tmp_path / "odd.json", tables=tables))


def test_a_key_given_twice_is_refused(tmp_path):
    path = write_json(tmp_path / "odd.json")
    text = path.read_text(encoding="utf-8").replace('"budget"', '"budget": 0.2, "budget"')
    path.write_text(text, encoding="utf-8")
    assert "a key is given twice" in refusal_of(path)


@pytest.mark.parametrize("key", ["format", "candidates", "budget", "calibration", "num_layers"])
def test_what_a_file_holds_is_quoted_in_short(tmp_path, key):
    value = "x\n" * 50_000 if key != "candidates" else ["x\n" * 50_000]
    message = refusal_of(write_json(tmp_path / "odd.json", **{key: value}))
    assert key.rstrip("s") in message
    assert len(message) < 400
    assert message.isprintable()
