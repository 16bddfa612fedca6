"""Damaged and foreign bundle files: each is refused in one sentence that names the fault."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from nox_kernels.errors import FileError
from nox_kernels.veda.bundle import read_bundle

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 4, 128
FP8 = torch.float8_e4m3fn
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3fn": FP8}
NAN, INF = float("nan"), float("inf")
NINES = "9" * 5000  # Python's int() refuses to read so many digits
NESTED = "[" * 100_000 + "]" * 100_000


# ---- a sound file, and its parts ----


def make_plan(grid=(37, 24, 42), *, layers=NUM_LAYERS, heads=NUM_HEADS, **changes):
    plan = {
        "geometry": "16x9_t37",
        "grid": list(grid),
        "shapes": ["8x4x4", "2x8x8", "4x8x4"],
        "head_shape": [[h % 2 for h in range(heads)] for _ in range(layers)],
        "provenance": {"search": "by hand"},
    }
    return plan | changes


def make_metadata(dtype="float32", **changes):
    """Metadata of a sound file; None as a change removes the key."""
    metadata = {
        "format": "miowtion-veda-predictor-v1",
        "num_layers": str(NUM_LAYERS),
        "num_heads": str(NUM_HEADS),
        "head_dim": str(HEAD_DIM),
        "dtype": dtype,
        "keep_ratio": "0.1",
        "second_order_rank": "4",
        "count_term": "1",
        "plans": json.dumps({"wide": make_plan()}),
    }
    metadata |= changes
    return {key: value for key, value in metadata.items() if value is not None}


def make_tensors(dtype="float32", *, layers=NUM_LAYERS, heads=NUM_HEADS, rank=4):
    shapes = {}
    for i in range(layers):
        shapes[f"layers.{i}.proj_q"] = (heads, 3 * HEAD_DIM, HEAD_DIM)
        shapes[f"layers.{i}.proj_k"] = (heads, 3 * HEAD_DIM, HEAD_DIM)
        shapes[f"layers.{i}.so_q"] = (heads, HEAD_DIM, rank)
        shapes[f"layers.{i}.so_k"] = (heads, HEAD_DIM, rank)
        shapes[f"layers.{i}.count_gain"] = (heads,)
    tensors = {key: torch.ones(shape).to(DTYPES[dtype]) for key, shape in shapes.items()}
    if dtype == "float8_e4m3fn":
        tensors |= {f"{key}.__scale": torch.full((heads,), 0.5) for key in shapes}
    return tensors


def saved(tmp_path, metadata=None, tensors=None, dtype="float32"):
    path = tmp_path / "odd.bin"
    save_file(tensors or make_tensors(dtype), str(path), metadata or make_metadata(dtype))
    return path


def refusal_of(path):
    """The refusal without the file's name; it must be one sentence that starts with it."""
    with pytest.raises(FileError) as refusal:
        read_bundle(path)
    message = str(refusal.value)
    assert message.startswith(path.name)
    assert message.isprintable(), message  # no line break, nothing that moves a cursor
    # Every loader of the project ends with this remedy where a download may be at fault.
    sentence = message.removesuffix(" Download it again.")
    assert re.findall(r"[.!?](?=\s|$)", sentence) == ["."], message
    assert sentence.endswith(".")
    assert len(message) < 1000, "nobody reads a sentence of this length"
    # What the folder is called says nothing about the fault.
    return message.replace(str(path.parent), "").removeprefix(path.name)


def assert_fault_named(message, fault):
    assert re.search(fault, message, re.IGNORECASE), message


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_file_that_the_damage_is_done_to_is_sound(tmp_path, dtype):
    bundle = read_bundle(saved(tmp_path, dtype=dtype))
    assert bundle.info.second_order_rank == 4
    assert bundle.info.count_term is True


# ---- bytes ----

FOREIGN = r"is not a safetensors file"
CUT = r"is truncated: it has [0-9,]+ bytes"
PLACE = r"damaged safetensors file \(it does not say where a tensor is\)"


def header_length(raw):
    return int.from_bytes(raw[:8], "little")


def with_header(raw, header):
    """The same data behind another header: JSON text as bytes, or an object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + header_length(raw) :]


def edited(change):
    """Damage done to the parsed header."""

    def damage(raw):
        header = json.loads(raw[8 : 8 + header_length(raw)])
        change(header)
        return with_header(raw, header)

    return damage


def entry(**fields):
    return edited(lambda header: header["layers.1.proj_k"].update(fields))


def shifted(by):
    def change(header):
        offsets = header["layers.1.proj_k"]["data_offsets"]
        header["layers.1.proj_k"]["data_offsets"] = [offset + by for offset in offsets]

    return edited(change)


def claimed(length):
    return lambda raw: length.to_bytes(8, "little") + raw[8:]


BYTES = {
    "empty": (lambda raw: b"", FOREIGN),
    "cut in the length": (lambda raw: raw[:5], FOREIGN),
    "cut after the length": (lambda raw: raw[:8], FOREIGN),
    "cut in the header": (lambda raw: raw[: 8 + header_length(raw) // 2], CUT),
    "cut after the header": (lambda raw: raw[: 8 + header_length(raw)], CUT),
    "cut in the middle of the data": (lambda raw: raw[: len(raw) // 2], CUT),
    "the last byte missing": (lambda raw: raw[:-1], CUT),
    "a byte too many": (lambda raw: raw + b"\0", r"damaged .*file not fully covered"),
    "text": (lambda raw: b"This is a note, not a model.\n" * 50, FOREIGN),
    "JSON": (lambda raw: json.dumps({"format": "nox-layout-table-v1"}).encode(), FOREIGN),
    "a zip archive": (lambda raw: b"PK\x03\x04\x14\0\0\0\x08\0" + raw, FOREIGN),
    "a git pointer": (
        lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        FOREIGN,
    ),
    "zeros": (lambda raw: bytes(4096), FOREIGN),
    "a header of no length": (claimed(0), FOREIGN),
    "a header longer than the file": (claimed(10**9), FOREIGN),
    "a header of 2 to the 63": (claimed(2**63), FOREIGN),
    "a header of 2 to the 64 less 1": (claimed(2**64 - 1), FOREIGN),
    "a header one byte short": (
        lambda raw: claimed(header_length(raw) - 1)(raw),
        r"damaged .*file not fully covered",
    ),
    "a header that is no JSON": (
        lambda raw: with_header(raw, b"{layers: 2}"),
        r"damaged .*property name",
    ),
    "a header that is no text": (
        lambda raw: with_header(raw, b'{"\xff\xfe": 1}'),
        r"damaged .*codec can't decode",
    ),
    "a header that is a list": (lambda raw: with_header(raw, []), FOREIGN),
    "a header that is null": (lambda raw: with_header(raw, None), FOREIGN),
    "a header nested too deep": (
        lambda raw: with_header(raw, b'{"a":' + NESTED.encode() + b"}"),
        r"damaged .*nested too deeply",
    ),
    "a header with a number too long": (
        lambda raw: with_header(raw, b'{"a":{"data_offsets":[0,' + NINES.encode() + b"]}}"),
        r"damaged .*5000 digits",
    ),
    "no metadata": (edited(lambda header: header.pop("__metadata__")), r"metadata|format"),
    "metadata that is a list": (
        edited(lambda header: header.update(__metadata__=[])),
        r"damaged .*its metadata are not text",
    ),
    "metadata that is a number": (
        edited(lambda header: header["__metadata__"].update(num_layers=2)),
        r"damaged .*its metadata are not text",
    ),
    "metadata that is null": (
        edited(lambda header: header["__metadata__"].update(num_layers=None)),
        r"damaged .*its metadata are not text",
    ),
    "offsets that overlap": (
        shifted(-64),
        r"damaged .*invalid offset for tensor `layers.1.proj_k`",
    ),
    "offsets past the end": (shifted(2**40), CUT),
    "offsets below zero": (shifted(-(2**40)), PLACE),
    "offsets backwards": (entry(data_offsets=[64, 0]), PLACE),
    "offsets that are no numbers": (entry(data_offsets=["0", "64"]), PLACE),
    "one offset": (entry(data_offsets=[0]), PLACE),
    "no offsets": (edited(lambda header: header["layers.1.proj_k"].pop("data_offsets")), PLACE),
    "an entry that is a number": (edited(lambda header: header.update({"extra": 5})), PLACE),
    "an entry without a shape": (
        edited(lambda header: header["layers.1.proj_k"].pop("shape")),
        r"damaged .*missing field `shape`",
    ),
    "a shape larger than its bytes": (
        entry(shape=[NUM_HEADS, 384, 129]),
        r"damaged .*invalid shape",
    ),
    "a shape of astronomical size": (
        entry(shape=[2**40, 2**40, 2**40]),
        r"damaged .*overflow computing buffer size",
    ),
    "a shape below zero": (
        entry(shape=[-NUM_HEADS, -384, 128]),
        r"damaged .*invalid value: integer",
    ),
    "an element type nobody knows": (entry(dtype="F5"), r"damaged .*unknown variant `F5`"),
    "an element type that is a number": (entry(dtype=32), r"damaged .*invalid type: integer `32`"),
}


@pytest.mark.parametrize("case", BYTES)
def test_damaged_bytes_are_refused(tmp_path, case):
    damage, fault = BYTES[case]
    path = saved(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert_fault_named(refusal_of(path), fault)


@pytest.mark.parametrize("share", [0.0005, 0.02, 0.3, 0.75, 0.9999])
def test_a_file_whose_download_stopped_is_refused(tmp_path, share):
    path = saved(tmp_path, dtype="float8_e4m3fn")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert_fault_named(refusal_of(path), CUT)


def test_a_name_given_to_two_tensors_is_refused(tmp_path):
    path = saved(tmp_path)
    raw = path.read_bytes()
    text = raw[8 : 8 + header_length(raw)].decode().replace("layers.1.proj_k", "layers.1.proj_q")
    path.write_bytes(with_header(raw, text.encode()))
    assert_fault_named(refusal_of(path), r"damaged .*a key is given twice")


# ---- path ----


def test_a_path_without_a_file_is_refused(tmp_path):
    missing = refusal_of(tmp_path / "missing.safetensors")
    assert_fault_named(missing, r"exist|not found|no such|no file|not there|missing")


def test_a_folder_is_refused(tmp_path):
    folder = tmp_path / "bundles"
    folder.mkdir()
    assert_fault_named(refusal_of(folder), r"it is not a file")


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("a note")
    refusal_of(tmp_path / "note.txt" / "odd.safetensors")


def test_a_refusal_by_a_string_path_starts_with_the_files_name_too(tmp_path):
    with pytest.raises(FileError, match=r"^missing\.safetensors"):
        read_bundle(str(tmp_path / "missing.safetensors"))


# ---- tensors against metadata ----


def renamed(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def added(key, x):
    return lambda tensors: tensors.update({key: x})


def dropped(key):
    return lambda tensors: tensors.pop(key)


def planted(key, value):
    """One element replaced, by its number or, in fp8, by its code."""

    def damage(tensors):
        x = tensors[key]
        flat = x.reshape(-1)
        if x.dtype == FP8:
            flat = flat.view(torch.uint8)
        flat[-1] = value

    return damage


def reshaped(key, *shape):
    return lambda tensors: tensors.update({key: tensors[key].reshape(shape)})


def cast(dtype, *keys):
    return lambda tensors: tensors.update({key: tensors[key].to(dtype) for key in keys})


def scale(*shape, value=0.5):
    return torch.full(shape, value)


Q, K, SO, GAIN = (f"layers.1.{name}" for name in ("proj_q", "proj_k", "so_k", "count_gain"))
Q_SCALE, GAIN_SCALE = f"{Q}.__scale", f"{GAIN}.__scale"
IN_Q, IN_GAIN = r"layers\.1\.proj_q", r"layers\.1\.count_gain"
IN_Q_SCALE = IN_Q + r".*scale"

TENSORS = {
    # Names.
    "no proj_q": ("float32", dropped(Q), IN_Q),
    "no proj_k": ("bfloat16", dropped("layers.0.proj_k"), r"layers\.0\.proj_k"),
    "no so_k": ("float32", dropped(SO), r"layers\.1\.so_k"),
    "no count_gain": ("float32", dropped(GAIN), IN_GAIN),
    "a tensor too many": ("float32", added("layers.1.proj_v", scale(4)), r"layers\.1\.proj_v"),
    "a layer too many": (
        "float32",
        lambda tensors: tensors.update(make_tensors(layers=3)),
        r"layers\.2|num_layers",
    ),
    "a layer too few": (
        "float32",
        lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith("layers.1.")],
        r"layers\.1|num_layers",
    ),
    "another prefix": ("float32", renamed(Q, f"model.{Q}"), IN_Q),
    "a layer number with a zero before it": (
        "float32",
        renamed(Q, "layers.01.proj_q"),
        IN_Q + r"|layers\.01\.proj_q",
    ),
    "a name with a line break": ("float32", added("odd\nname", scale(4)), r"odd.*name"),
    "a name of endless length": ("float32", added("odd" * 5000, scale(4)), r"odd"),
    "a thousand tensors too many": (
        "float32",
        lambda tensors: tensors.update({f"odd.{i}": scale(1) for i in range(1000)}),
        r"odd\.",
    ),
    # Shapes.
    "a head too many": (
        "float32",
        lambda tensors: tensors.update(make_tensors(heads=NUM_HEADS + 1)),
        r"proj|num_heads",
    ),
    "a head too few": (
        "bfloat16",
        added(Q, torch.ones(NUM_HEADS - 1, 384, 128, dtype=torch.bfloat16)),
        IN_Q,
    ),
    "the feature and the output swapped": ("float32", reshaped(Q, NUM_HEADS, 128, 384), IN_Q),
    "a matrix for all heads": ("float32", reshaped(Q, NUM_HEADS * 384, 128), IN_Q),
    "an axis of one": ("float32", reshaped(Q, 1, NUM_HEADS, 384, 128), IN_Q),
    "two means instead of three features": ("float32", added(Q, torch.ones(4, 256, 128)), IN_Q),
    "another rank": ("float32", added(SO, torch.ones(4, 128, 5)), r"layers\.1\.so_k"),
    "a gain with an axis of one": ("float32", reshaped(GAIN, NUM_HEADS, 1), IN_GAIN),
    "one gain for all heads": ("float32", added(GAIN, torch.tensor(1.0)), IN_GAIN),
    "an empty tensor": ("float32", added(Q, torch.ones(0, 384, 128)), IN_Q),
    # Element types.
    "bfloat16 in a float32 file": ("float32", cast(torch.bfloat16, Q), IN_Q),
    "float32 in a bfloat16 file": ("bfloat16", cast(torch.float32, Q), IN_Q),
    "float16 in a bfloat16 file": ("bfloat16", cast(torch.float16, Q), IN_Q),
    "bfloat16 in an fp8 file": ("float8_e4m3fn", cast(torch.bfloat16, Q), IN_Q),
    "fp8 in a bfloat16 file": ("bfloat16", cast(FP8, Q), IN_Q),
    "the other fp8": ("float8_e4m3fn", cast(torch.float8_e5m2, Q), IN_Q),
    "integers": ("float8_e4m3fn", cast(torch.int8, Q), IN_Q),
    # Scales.
    "no scale": ("float8_e4m3fn", dropped(Q_SCALE), IN_Q_SCALE),
    "no scale of a gain": ("float8_e4m3fn", dropped(GAIN_SCALE), IN_GAIN + r".*scale"),
    "a scale of no tensor": (
        "float8_e4m3fn",
        added("layers.7.proj_q.__scale", scale(4)),
        r"layers\.7\.proj_q.*scale",
    ),
    "a scale of a scale": (
        "float8_e4m3fn",
        added(f"{Q_SCALE}.__scale", scale(4)),
        r"scale\.__scale",
    ),
    "a scale in a float32 file": ("float32", added(Q_SCALE, scale(4)), IN_Q_SCALE),
    "a scale in a bfloat16 file": ("bfloat16", added(Q_SCALE, scale(4)), IN_Q_SCALE),
    "a scale that is no number": ("float8_e4m3fn", planted(Q_SCALE, NAN), IN_Q_SCALE),
    "an endless scale": ("float8_e4m3fn", planted(Q_SCALE, INF), IN_Q_SCALE),
    "a scale that makes weights infinite": (
        "float8_e4m3fn",
        planted(Q_SCALE, 3e38),
        IN_Q_SCALE + r".*infinite",
    ),
    "a scale of zero": ("float8_e4m3fn", planted(Q_SCALE, 0.0), IN_Q_SCALE),
    "a scale below zero": ("float8_e4m3fn", planted(Q_SCALE, -0.5), IN_Q_SCALE),
    "a gain's scale that is no number": (
        "float8_e4m3fn",
        planted(GAIN_SCALE, NAN),
        IN_GAIN + r".*scale",
    ),
    "one scale for a matrix": ("float8_e4m3fn", added(Q_SCALE, torch.tensor(0.5)), IN_Q_SCALE),
    "a list of one scale for a matrix": ("float8_e4m3fn", added(Q_SCALE, scale(1)), IN_Q_SCALE),
    "a scale too few": ("float8_e4m3fn", added(Q_SCALE, scale(3)), IN_Q_SCALE),
    "a scale too many": ("float8_e4m3fn", added(Q_SCALE, scale(5)), IN_Q_SCALE),
    "scales per feature": ("float8_e4m3fn", added(Q_SCALE, scale(4, 384)), IN_Q_SCALE),
    "scales with an axis of one": ("float8_e4m3fn", added(Q_SCALE, scale(4, 1)), IN_Q_SCALE),
    "scales in bfloat16": ("float8_e4m3fn", cast(torch.bfloat16, Q_SCALE), IN_Q_SCALE),
    "scales in float64": ("float8_e4m3fn", cast(torch.float64, Q_SCALE), IN_Q_SCALE),
    # Values.
    "no number in a float32 file": ("float32", planted(Q, NAN), IN_Q),
    "no number in a bfloat16 file": ("bfloat16", planted(Q, NAN), IN_Q),
    "no number among the gains": ("bfloat16", planted(GAIN, NAN), IN_GAIN),
    "an endless weight in a bfloat16 file": ("bfloat16", planted(Q, -INF), IN_Q),
    "code 0x7f in an fp8 file": ("float8_e4m3fn", planted(Q, 0x7F), IN_Q),
    "code 0xff in an fp8 file": ("float8_e4m3fn", planted(Q, 0xFF), IN_Q),
    "code 0x7f among the gains": ("float8_e4m3fn", planted(GAIN, 0x7F), IN_GAIN),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_belong_are_refused(tmp_path, case):
    dtype, damage, fault = TENSORS[case]
    tensors = make_tensors(dtype)
    damage(tensors)
    assert_fault_named(refusal_of(saved(tmp_path, make_metadata(dtype), tensors)), fault)


@pytest.mark.parametrize("said", DTYPES)
@pytest.mark.parametrize("found", DTYPES)
def test_a_file_of_another_dtype_than_it_says_is_refused(tmp_path, said, found):
    path = saved(tmp_path, make_metadata(said), make_tensors(found))
    if said == found:
        read_bundle(path)
    else:
        assert_fault_named(refusal_of(path), r"layers\.\d\.|dtype")


@pytest.mark.parametrize("found", ["bfloat16", "float8_e4m3fn"])
def test_a_file_that_says_no_dtype_must_hold_float32(tmp_path, found):
    path = saved(tmp_path, make_metadata(dtype=None), make_tensors(found))
    assert_fault_named(refusal_of(path), r"layers\.\d\.|dtype|float32")


# ---- metadata ----

TARGET = {"keep_ratio": None, "target_budget_kind": "tiles", "target_budget_value": "32"}
TILED = {"tile_conditions": "true", "ref_budget_kind": "tiles", "ref_budget_value": "32"}

METADATA = {
    "no format": ({"format": None}, r"format"),
    "an empty format": ({"format": ""}, r"format"),
    "a later format": ({"format": "miowtion-veda-predictor-v2"}, r"predictor-v2"),
    "a format with a line break": ({"format": "odd\nformat"}, r"format"),
    "a format of endless length": ({"format": "odd" * 5000}, r"format"),
    "a dtype nobody knows": ({"dtype": "int8"}, r"int8"),
    "a dtype of torch's spelling": ({"dtype": "torch.float32"}, r"torch\.float32"),
    "the other fp8": ({"dtype": "float8_e5m2"}, r"float8_e5m2"),
    "an empty dtype": ({"dtype": ""}, r"dtype"),
    "a dtype with a line break": ({"dtype": "float32\n"}, r"dtype"),
    # Counts.
    "no num_layers": ({"num_layers": None}, r"num_layers"),
    "no num_heads": ({"num_heads": None}, r"num_heads"),
    "no head_dim": ({"head_dim": None}, r"head_dim"),
    "no layers": ({"num_layers": "0"}, r"num_layers"),
    "no heads": ({"num_heads": "0"}, r"num_heads"),
    "layers below zero": ({"num_layers": "-1"}, r"num_layers"),
    "layers with a fraction": ({"num_layers": "5.0"}, r"num_layers"),
    "layers in words": ({"num_layers": "two"}, r"num_layers"),
    "layers left empty": ({"num_layers": ""}, r"num_layers"),
    "a raised two": ({"num_layers": "\u00b2"}, r"num_layers"),
    "layers beyond any memory": ({"num_layers": "999999999999"}, r"num_layers|layer"),
    "layers beyond any number": ({"num_layers": NINES}, r"num_layers|layer"),
    "heads beyond any memory": ({"num_heads": "999999999999"}, r"num_heads|head|proj_q"),
    "heads beyond any number": ({"num_heads": NINES}, r"num_heads|head|proj_q"),
    "a head_dim of zero": ({"head_dim": "0"}, r"head_dim"),
    "a head_dim beyond any number": ({"head_dim": NINES}, r"head_dim|proj_q"),
    "another head_dim": ({"head_dim": "64"}, r"head_dim|proj_q"),
    "another number of layers": ({"num_layers": "3"}, r"num_layers|layer"),
    "another number of heads": ({"num_heads": "5"}, r"num_heads|head|proj_q"),
    # Second order and count.
    "a rank above the head_dim": ({"second_order_rank": "129"}, r"second_order_rank"),
    "a rank below zero": ({"second_order_rank": "-1"}, r"second_order_rank"),
    "a rank in words": ({"second_order_rank": "four"}, r"second_order_rank"),
    "a rank with a fraction": ({"second_order_rank": "4.0"}, r"second_order_rank"),
    "a rank left empty": ({"second_order_rank": ""}, r"second_order_rank"),
    "a rank beyond any number": ({"second_order_rank": NINES}, r"second_order_rank"),
    "another rank": ({"second_order_rank": "5"}, r"second_order_rank|\.so_[qk]"),
    "a rank that nobody mentions": ({"second_order_rank": None}, r"second_order_rank|\.so_[qk]"),
    "a rank of zero with its tensors": ({"second_order_rank": "0"}, r"second_order_rank|\.so_[qk]"),
    "a count term that nobody mentions": ({"count_term": None}, r"count_term|count_gain"),
    "a count term denied": ({"count_term": "0"}, r"count_term|count_gain"),
    "a count term of two": ({"count_term": "2"}, r"count_term"),
    "a count term in words": ({"count_term": "maybe"}, r"count_term"),
    # Budgets.
    "no budget": ({"keep_ratio": None}, r"budget|keep_ratio"),
    "only a budget of conditions": (TILED | {"keep_ratio": None}, r"budget|keep_ratio"),
    "a keep_ratio of zero": ({"keep_ratio": "0"}, r"keep_ratio"),
    "a keep_ratio below zero": ({"keep_ratio": "-0.1"}, r"keep_ratio"),
    "a keep_ratio that is no number": ({"keep_ratio": "nan"}, r"keep_ratio"),
    "an endless keep_ratio": ({"keep_ratio": "inf"}, r"keep_ratio"),
    "a keep_ratio of a million digits": ({"keep_ratio": "1" * 1_000_000 + "x"}, r"keep_ratio"),
    "a keep_ratio with two points": ({"keep_ratio": "1.2.3"}, r"keep_ratio"),
    "a keep_ratio with a grouped digit": ({"keep_ratio": "1_0"}, r"keep_ratio"),
    "a keep_ratio in other digits": ({"keep_ratio": "\uff10.1"}, r"keep_ratio"),
    "a keep_ratio with blanks": ({"keep_ratio": " 0.1 "}, r"keep_ratio"),
    "a keep_ratio in words": ({"keep_ratio": "a tenth"}, r"keep_ratio"),
    "a keep_ratio left empty": ({"keep_ratio": ""}, r"keep_ratio"),
    "a budget kind nobody knows": (TARGET | {"target_budget_kind": "foo"}, r"foo"),
    "a budget kind nobody knows beside a keep_ratio": (
        {"target_budget_kind": "foo", "target_budget_value": "1"},
        r"foo",
    ),
    "an empty budget kind": (TARGET | {"target_budget_kind": ""}, r"target_budget_kind|budget"),
    "a budget kind without a value": (
        {"target_budget_kind": "tiles"},
        r"target_budget_value|target_budget|value",
    ),
    "a budget of zero": (TARGET | {"target_budget_value": "0"}, r"target_budget"),
    "a budget of minus zero": (TARGET | {"target_budget_value": "-0.0"}, r"target_budget"),
    "a budget below zero": (TARGET | {"target_budget_value": "-32"}, r"target_budget"),
    "a budget that is no number": (TARGET | {"target_budget_value": "nan"}, r"target_budget"),
    "an endless budget": (TARGET | {"target_budget_value": "inf"}, r"target_budget"),
    "a budget too large for a float": (TARGET | {"target_budget_value": "1e999"}, r"target_budget"),
    "a budget in words": (TARGET | {"target_budget_value": "many"}, r"target_budget"),
    "a budget left empty": (TARGET | {"target_budget_value": ""}, r"target_budget"),
    "tiled conditions without a budget": ({"tile_conditions": "true"}, r"ref_budget"),
    "tiled conditions without a kind": (TILED | {"ref_budget_kind": None}, r"ref_budget"),
    "tiled conditions without a value": (TILED | {"ref_budget_value": None}, r"ref_budget"),
    "a condition budget nobody knows": (TILED | {"ref_budget_kind": "foo"}, r"ref_budget|foo"),
    "a condition budget of zero": (TILED | {"ref_budget_value": "0"}, r"ref_budget"),
    "a condition budget that is no number": (TILED | {"ref_budget_value": "nan"}, r"ref_budget"),
    "conditions tiled perhaps": ({"tile_conditions": "maybe"}, r"tile_conditions"),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_says_something_impossible_is_refused(tmp_path, case):
    changes, fault = METADATA[case]
    assert_fault_named(refusal_of(saved(tmp_path, make_metadata(**changes))), fault)


def test_a_rank_above_the_head_dim_is_refused_even_if_the_tensors_have_it(tmp_path):
    metadata = make_metadata(second_order_rank="129")
    message = refusal_of(saved(tmp_path, metadata, make_tensors(rank=129)))
    assert_fault_named(message, r"second_order_rank")


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ({"layers": NUM_LAYERS + 1}, r"layers\.2\.|num_layers"),
        ({"layers": NUM_LAYERS - 1}, r"layers\.1\.|num_layers"),
        ({"heads": NUM_HEADS + 1}, r"layers\.0\.|num_heads"),
        ({"heads": NUM_HEADS - 1}, r"layers\.0\.|num_heads"),
    ],
)
def test_metadata_and_plans_that_agree_do_not_excuse_other_tensors(tmp_path, counts, fault):
    changes = {f"num_{name}": str(count) for name, count in counts.items()}
    changes["plans"] = json.dumps({"wide": make_plan(**counts)})
    assert_fault_named(refusal_of(saved(tmp_path, make_metadata(**changes))), fault)


# ---- plans ----


def with_row(row, layer_idx=1):
    """A head_shape whose layer 1 has other entries."""
    rows = [[0, 1, 1, 0] for _ in range(NUM_LAYERS)]
    rows[layer_idx] = row
    return {"head_shape": rows}


GRID, SHAPES, HEADS = r"grid", r"shape", r"head_shape|heads"
ROW = r"head_shape|layer 1"
PLAN = {
    "no grid": ({"grid": None}, GRID),
    "a grid with a zero": ({"grid": [0, 24, 42]}, GRID),
    "a grid below zero": ({"grid": [37, -24, -42]}, GRID),
    "a grid with a float": ({"grid": [37.0, 24, 42]}, GRID),
    "a grid with a truth": ({"grid": [True, 24, 42]}, GRID),
    "a grid with text": ({"grid": ["37", 24, 42]}, GRID),
    "a grid of two numbers": ({"grid": [37, 24]}, GRID),
    "a grid of four numbers": ({"grid": [1, 37, 24, 42]}, GRID),
    "a grid that is text": ({"grid": "37x24x42"}, GRID),
    "a grid that is a number": ({"grid": 37}, GRID),
    "a grid that is an object": ({"grid": {"t": 37, "h": 24, "w": 42}}, GRID),
    "no shapes": ({"shapes": None}, SHAPES),
    "an empty list of shapes": ({"shapes": []}, SHAPES),
    "shapes that are text": ({"shapes": "8x4x4"}, SHAPES),
    "shapes that are an object": ({"shapes": {"8x4x4": 0, "2x8x8": 1}}, SHAPES),
    "a shape of 64 tokens": ({"shapes": ["8x4x4", "4x4x4"]}, r"4x4x4"),
    "a shape of 256 tokens": ({"shapes": ["8x4x4", "8x8x4"]}, r"8x8x4"),
    "a shape of 125 tokens": ({"shapes": ["8x4x4", "5x5x5"]}, r"5x5x5"),
    "a shape of no tokens": ({"shapes": ["8x4x4", "0x8x16"]}, r"0x8x16"),
    "an odd shape that no head uses": ({"shapes": ["8x4x4", "2x8x8", "3x3x3"]}, r"3x3x3"),
    "a shape below zero": ({"shapes": ["8x4x4", "-8x-4x4"]}, r"-8x-4x4"),
    "a shape of two numbers": ({"shapes": ["8x4x4", "8x16"]}, r"8x16"),
    "a shape of four numbers": ({"shapes": ["8x4x4", "2x4x4x4"]}, r"2x4x4x4"),
    "a shape of words": ({"shapes": ["8x4x4", "raster"]}, r"raster"),
    "a shape left empty": ({"shapes": ["8x4x4", ""]}, SHAPES),
    "a shape with a line break": ({"shapes": ["8x4x4", "2x8x8\n"]}, r"2x8x8"),
    "a shape that is a list": ({"shapes": ["8x4x4", [2, 8, 8]]}, SHAPES),
    "a shape that is a number": ({"shapes": ["8x4x4", 128]}, SHAPES),
    "a shape that is null": ({"shapes": ["8x4x4", None]}, SHAPES),
    "a shape beyond any number": ({"shapes": ["8x4x4", f"{NINES}x1x1"]}, SHAPES),
    "no head_shape": ({"head_shape": None}, HEADS),
    "head_shape that is text": ({"head_shape": "01"}, HEADS),
    "head_shape that is flat": ({"head_shape": [0, 1]}, HEADS),
    "head_shape that is an object": (
        {"head_shape": {"0": [0, 1, 1, 0], "1": [0, 1, 1, 0]}},
        HEADS,
    ),
    "a layer too few": ({"head_shape": [[0, 1, 1, 0]]}, HEADS),
    "a layer too many": ({"head_shape": [[0, 1, 1, 0]] * 3}, HEADS),
    "a layer that is text": (with_row("0110"), ROW),
    "a layer that is null": (with_row(None), ROW),
    "a head too few": (with_row([0, 1, 1]), ROW),
    "a head too many": (with_row([0, 1, 1, 0, 0]), ROW),
    "an index past the shapes": (with_row([0, 3, 3, 0]), ROW),
    "an index below zero": (with_row([0, -1, -1, 0]), ROW),
    "an index that is a truth": (with_row([0, True, True, 0]), ROW),
    "an index that is a float": (with_row([0, 1.0, 1.0, 0]), ROW),
    "an index that is text": (with_row([0, "1", "1", 0]), ROW),
    "an index that is null": (with_row([0, None, None, 0]), ROW),
    "an index that is a list": (with_row([0, [1], [1], 0]), ROW),
    "three shapes in one layer": (with_row([0, 1, 2, 0]), r"layer 1.*(three|two|\b[23]\b)"),
}


@pytest.mark.parametrize("case", PLAN)
def test_a_plan_that_cannot_be_followed_is_refused_by_name(tmp_path, case):
    changes, fault = PLAN[case]
    plan = make_plan() | changes
    plan = {key: value for key, value in plan.items() if value is not None}
    plans = json.dumps({"tall": make_plan((37, 42, 24)), "wide": plan})
    message = refusal_of(saved(tmp_path, make_metadata(plans=plans)))
    assert "wide" in message
    assert_fault_named(message, fault)


GOOD = json.dumps({"wide": make_plan()})
PLANS = {
    "no plans": None,
    "plans left empty": "",
    "plans that are no JSON": "wide, tall",
    "plans that end early": GOOD[:-1],
    "plans with something after them": GOOD + "}",
    "plans that are a list": f"[{GOOD}]",
    "plans that are a number": "12",
    "plans that are text": '"wide"',
    "plans that are null": "null",
    "no plan among the plans": "{}",
    "a plan that is a list": '{"wide": []}',
    "a plan that is null": '{"wide": null}',
    "a plan that is text": '{"wide": "16x9_t37"}',
    "a plan that is empty": '{"wide": {}}',
    "plans nested too deep": f'{{"wide": {NESTED}}}',
    "a number too long": GOOD.replace("[37,", f"[{NINES},"),
    "a plan's name with a line break": json.dumps({"wi\nde": make_plan(grid=(0, 1, 1))}),
    "a plan's name of endless length": json.dumps({"plan" * 5000: make_plan(grid=(0, 1, 1))}),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_that_are_none_are_refused(tmp_path, case):
    message = refusal_of(saved(tmp_path, make_metadata(plans=PLANS[case])))
    assert_fault_named(message, r"plan|grid")


def test_two_plans_for_one_grid_are_refused(tmp_path):
    plans = {"first": make_plan(), "second": make_plan(shapes=["8x4x4", "1x8x16"])}
    message = refusal_of(saved(tmp_path, make_metadata(plans=json.dumps(plans))))
    assert "first" in message
    assert "second" in message


def test_one_bad_plan_among_many_good_ones_is_found(tmp_path):
    plans = {f"p{t}": make_plan((t, 24, 42)) for t in range(2, 103, 5)}
    plans["p52"] = make_plan((52, 24, 42), **with_row([0, 1, 2, 0]))
    message = refusal_of(saved(tmp_path, make_metadata(plans=json.dumps(plans))))
    assert "p52" in message


@pytest.mark.parametrize("twice", ['"odd": {"grid"', '"grid": [7, 8, 8], "grid"'])
def test_a_plan_or_a_key_of_it_given_twice_is_refused(tmp_path, twice):
    metadata = make_metadata("float32")
    plan = json.dumps(next(iter(json.loads(metadata["plans"]).values())))
    if twice.startswith('"odd"'):
        metadata["plans"] = f'{{"odd": {plan}, "odd": {plan}}}'
    else:
        metadata["plans"] = f'{{"odd": {plan.replace(chr(34) + "grid" + chr(34), twice)}}}'
    assert_fault_named(refusal_of(saved(tmp_path, metadata)), r"plans.*a key is given twice")


def test_a_key_of_the_metadata_given_twice_is_refused(tmp_path):
    path = saved(tmp_path)
    raw = path.read_bytes()
    text = raw[8 : 8 + header_length(raw)].replace(b'"dtype":"float32"', b'"dtype":"a","dtype":"b"')
    path.write_bytes(with_header(raw, text))
    assert_fault_named(refusal_of(path), r"damaged .*a key is given twice")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert_fault_named(refusal_of(tmp_path / "pipe.safetensors"), r"it is not a file")


def test_a_name_too_long_for_a_file_is_refused(tmp_path):
    refusal_of(tmp_path / ("a" * 300 + ".safetensors"))


def test_a_huge_tensor_of_the_wrong_shape_is_refused_without_being_read(tmp_path):
    path = saved(tmp_path)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + header_length(raw)])
    last = max(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"][1],
    )
    start = header[last]["data_offsets"][0]
    num_elements = 1 << 32  # 16 GiB of float32, of which the file holds a hole
    header[last] |= {"shape": [num_elements], "data_offsets": [start, start + 4 * num_elements]}
    data = with_header(raw, header)
    path.write_bytes(data)
    os.truncate(path, 8 + header_length(data) + start + 4 * num_elements)
    assert_fault_named(refusal_of(path), rf"{re.escape(last)}.*shape|cannot be read")
