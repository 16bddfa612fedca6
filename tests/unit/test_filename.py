"""File name tokens: what the page would have filled in, and what it must leave alone."""

import itertools
import os
from datetime import datetime

import pytest

from nodes import filename

NOW = datetime(2026, 3, 4, 5, 6, 7)
PROMPT = {
    "3": {
        "class_type": "KSampler",
        "inputs": {"seed": 123, "cfg": 1.0, "denoise": 0.5, "model": ["9", 0]},
        "_meta": {"title": "My sampler"},
    },
    "5": {"class_type": "EmptyH3", "inputs": {"width": ["8", 0], "name": 'a/b\\c:"d', "on": True}},
    "8": {"class_type": "PrimitiveInt", "inputs": {"value": 1344}, "_meta": {"title": "Width"}},
    "9": {"class_type": "Loader", "inputs": {"unet_name": "h3.safetensors"}},
    "12:4": {"class_type": "KSampler", "inputs": {"seed": 777}, "_meta": {"title": "Inner"}},
}
WORKFLOW = {
    "nodes": [
        {"id": 3, "type": "KSampler", "properties": {"Node name for S&R": "Main"}},
        {"id": 9, "type": "Loader", "title": "Big loader"},
        {"id": 12, "type": "graph-a"},
    ],
    "definitions": {
        "subgraphs": [
            {
                "id": "graph-a",
                "nodes": [{"id": 4, "type": "KSampler", "properties": {"Node name for S&R": "In"}}],
            }
        ]
    },
}


def resolve(prefix, prompt=PROMPT, workflow=WORKFLOW):
    return filename.resolve_prefix(prefix, prompt, workflow, NOW)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("yyyy-MM-dd", "2026-03-04"),
        ("yy-M-d", "26-3-4"),
        ("hhmmss", "050607"),
        ("h.m.s", "5.6.7"),
        ("yyyy.MM", "2026.03"),
        ("yyyy/MM/dd", "2026/03/04"),
        ("hh:mm", "05_06"),
        ("yyy", "yyy"),
    ],
)
def test_a_date_reads_as_on_the_page(pattern, expected):
    assert resolve(f"video/%date:{pattern}%_x") == f"video/{expected}_x"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("KSampler.seed", "123"),
        ("My sampler.seed", "123"),
        ("Main.seed", "123"),
        ("3.seed", "123"),
        ("Main.cfg", "1"),
        ("Main.denoise", "0.5"),
        ("In.seed", "777"),
        ("Inner.seed", "777"),
        ("12:4.seed", "777"),
        ("Big loader.unet_name", "h3.safetensors"),
        ("EmptyH3.on", "true"),
    ],
)
def test_a_node_is_found_by_each_of_its_names(token, expected):
    assert resolve(f"a_%{token}%_b") == f"a_{expected}_b"


def test_the_page_name_wins_over_a_class_name():
    workflow = {"nodes": [{"id": 9, "properties": {"Node name for S&R": "KSampler"}}]}
    prompt = {
        "3": {"class_type": "KSampler", "inputs": {"seed": 1}},
        "9": {"class_type": "Other", "inputs": {"seed": 2}},
    }
    assert resolve("%KSampler.seed%", prompt, workflow) == "2"


def test_a_wired_input_gives_the_value_of_its_primitive_node():
    assert resolve("%EmptyH3.width%") == "1344"


def test_links_in_a_circle_end():
    prompt = {"1": {"class_type": "A", "inputs": {"value": ["1", 0]}}}
    assert resolve("%A.value%", prompt) == "%A.value%"


def test_a_subgraph_that_holds_itself_ends():
    node = {"id": 1, "type": "g"}
    workflow = {"nodes": [node], "definitions": {"subgraphs": [{"id": "g", "nodes": [node]}]}}
    assert resolve("%KSampler.seed%", PROMPT, workflow) == "123"


def test_a_primitive_node_of_the_page_gives_its_value():
    node = {"id": 50, "type": "PrimitiveNode", "title": "Seed", "widgets_values": [77, "fixed"]}
    workflow = {"nodes": [node]}
    assert resolve("%Seed.value%_%Seed.other%", PROMPT, workflow) == "77_%Seed.other%"
    assert resolve("%Seed.value%", PROMPT, {"nodes": [node | {"widgets_values": None}]}) == (
        "%Seed.value%"
    )


def test_a_value_makes_no_folder():
    assert resolve("%EmptyH3.name%") == "a_b_c__d"


@pytest.mark.parametrize(
    "prefix",
    ["%width%x%height%", "%year%-%month%-%day%", "%hour%%minute%%second%", "%Nobody.seed%",
     "%KSampler.nothing%", "%KSampler.model%x", "100%", "%", "%%", "a%b"],
)  # fmt: skip
def test_core_tokens_and_unknown_ones_stay_as_typed(prefix):
    # KSampler.model is a wire to a node without a value.
    assert resolve(prefix) == prefix


def test_characters_that_windows_forbids_become_underscores():
    assert resolve('a<b>c:d"e|f?g*h\ti\x00j') == "a_b_c_d_e_f_g_h_i_j"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("CON/x", "_CON/x"),
        ("a/aux.b/lpt1/x", "a/_aux.b/_lpt1/x"),
        ("a./b ./c. ./x", "a_/b__/c___/x"),
        ("con", "con"),  # a number and an ending follow
        ("console/x", "console/x"),
        ("./a/x", "./a/x"),
    ],
)
def test_folders_that_windows_cannot_make_get_another_name(prefix, expected):
    assert resolve(prefix) == expected


def test_both_slashes_stay_separators():
    assert resolve("video\\day/clip") == "video/day/clip"


def test_resolving_leaves_the_check_of_the_folder_to_why_not():
    assert resolve("..\\..\\x") == "../../x"


def test_nothing_known_about_the_graph_still_gives_a_name():
    assert resolve("%date:yyyy%_%A.b%", None, None) == "2026_%A.b%"


def test_no_result_holds_a_forbidden_character():
    tokens = ("%date:hh:mm%", "%EmptyH3.name%", "%A:b.c%", "C:\\x", "\x1f")
    for first, second in itertools.product(tokens, repeat=2):
        assert not set('<>:"|?*\x1f') & set(resolve(first + second))


@pytest.mark.parametrize(
    "prefix", ["video/Nox_H3", "clip", "a/b/%date:yyyy-MM-dd%", "b\\c", "ä/雪", "a:b"]
)
def test_a_prefix_inside_the_output_folder_is_fine(prefix):
    assert filename.why_not(prefix) is None


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("", "no name at its end"),
        ("   ", "no name at its end"),
        ("video/", "no name at its end"),
        ("video/.", "no name at its end"),
        ("../../evil", "leaves ComfyUI's output folder"),
        ("a/../../evil", "leaves ComfyUI's output folder"),
        ("/etc/evil", "leaves ComfyUI's output folder"),
        ("\\evil", "leaves ComfyUI's output folder"),
        ("C:/evil", "leaves ComfyUI's output folder"),
        ("x" * 250, "250 bytes"),
        ("雪" * 80, "240 bytes"),
        ("\ud800", "no file name can hold"),
    ],
)
def test_a_prefix_that_names_no_file_there_is_refused_in_a_sentence(prefix, words):
    assert words in filename.why_not(prefix)


def test_a_folder_that_can_be_made_is_fine(tmp_path):
    assert filename.why_no_folder("a/b/%date:yyyy%/x", str(tmp_path)) is None
    assert filename.why_no_folder("a\\b\\x", str(tmp_path / "not yet")) is None
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "a").write_text("a file")
    for prefix in ("a/x", "a/b/x", "a\\x"):
        fault = filename.why_no_folder(prefix, str(tmp_path))
        assert f"below {tmp_path / 'a'} because it is a file" in fault


def test_links_that_lead_out_of_the_folder_or_nowhere_are_named(tmp_path):
    root, other = tmp_path / "output", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (root / "out").symlink_to(other, target_is_directory=True)
    (root / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(root, target_is_directory=True)
    assert "a link that leaves the folder" in filename.why_no_folder("out/x", str(root))
    assert "it is a link to nowhere" in filename.why_no_folder("lost/x", str(root))
    assert filename.why_no_folder("a/x", str(tmp_path / "linked")) is None


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_named(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    assert "is not writable" in filename.why_no_folder("closed/a/x", str(tmp_path))
