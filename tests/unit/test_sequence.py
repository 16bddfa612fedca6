"""Sequence: token counts, canvases and segment lists of H3's packed sequence."""

import pytest

from nox_kernels.errors import NoxError, SequenceError
from nox_kernels.layout import raster_layout
from nox_kernels.route import num_kept
from nox_kernels.sequence import (
    Segment,
    Sequence,
    TokenGrid,
    canvas,
    num_audio_rows,
    num_latent_frames,
    snap_num_frames,
    t2va_sequence,
    token_grid,
)

# The official geometries: every canvas of one token count per frame, then per duration
# T, frames F, audio rows, video rows, rows without the prompt for 0, 1 and 2 keyframes,
# KV tiles, query tiles, budget at 15 %.
CANVASES = {
    1008: [(1344, 768), (768, 1344), (1536, 672), (672, 1536), (2016, 512), (512, 2016)],
    864: [(1152, 768), (768, 1152)],
    768: [(1024, 768), (768, 1024)],
    576: [(768, 768)],
}
GEOMETRIES = [
    (1008, 32, 107, 356, 32256, 32612, 34636, 36660, 504, 252, 76),
    (1008, 37, 124, 414, 37296, 37710, 39734, 41758, 583, 292, 88),
    (1008, 42, 141, 470, 42336, 42806, 44830, 46854, 662, 331, 100),
    (1008, 47, 158, 526, 47376, 47902, 49926, 51950, 741, 371, 112),
    (1008, 52, 175, 584, 52416, 53000, 55024, 57048, 819, 410, 123),
    (1008, 57, 192, 640, 57456, 58096, 60120, 62144, 898, 449, 135),
    (1008, 62, 209, 696, 62496, 63192, 65216, 67240, 977, 489, 147),
    (1008, 67, 226, 754, 67536, 68290, 70314, 72338, 1056, 528, 159),
    (1008, 72, 243, 810, 72576, 73386, 75410, 77434, 1134, 567, 171),
    (1008, 77, 260, 866, 77616, 78482, 80506, 82530, 1213, 607, 182),
    (1008, 82, 277, 924, 82656, 83580, 85604, 87628, 1292, 646, 194),
    (1008, 87, 294, 980, 87696, 88676, 90700, 92724, 1371, 686, 206),
    (1008, 92, 311, 1036, 92736, 93772, 95796, 97820, 1449, 725, 218),
    (1008, 97, 328, 1094, 97776, 98870, 100894, 102918, 1528, 764, 230),
    (1008, 102, 345, 1150, 102816, 103966, 105990, 108014, 1607, 804, 242),
    (1008, 107, 362, 1206, 107856, 109062, 111086, 113110, 1686, 843, 253),
    (864, 37, 124, 414, 31968, 32382, 34118, 35854, 500, 250, 75),
    (864, 72, 243, 810, 62208, 63018, 64754, 66490, 972, 486, 146),
    (864, 102, 345, 1150, 88128, 89278, 91014, 92750, 1377, 689, 207),
    (768, 37, 124, 414, 28416, 28830, 30374, 31918, 444, 222, 67),
    (768, 72, 243, 810, 55296, 56106, 57650, 59194, 864, 432, 130),
    (768, 102, 345, 1150, 78336, 79486, 81030, 82574, 1224, 612, 184),
    (576, 37, 124, 414, 21312, 21726, 22886, 24046, 333, 167, 50),
    (576, 72, 243, 810, 41472, 42282, 43442, 44602, 648, 324, 98),
    (576, 102, 345, 1150, 58752, 59902, 61062, 62222, 918, 459, 138),
]

# Aspect ratio -> canvas (width, height).
RATIOS = [
    ((16, 9), (1344, 768)),
    ((9, 16), (768, 1344)),
    ((21, 9), (1536, 672)),
    ((9, 21), (672, 1536)),
    ((3, 2), (1152, 768)),
    ((2, 3), (768, 1152)),
    ((4, 3), (1024, 768)),
    ((3, 4), (768, 1024)),
    ((5, 4), (960, 768)),
    ((4, 5), (768, 960)),
    ((1, 1), (768, 768)),
    ((4, 1), (2016, 512)),
    ((1, 4), (512, 2016)),
]


def segment_list(*parts):
    """Segments from (kind, rows) pairs, laid end to end from row 0."""
    segments, start = [], 0
    for kind, rows in parts:
        segments.append(Segment(start, start + rows, kind))
        start += rows
    return tuple(segments)


@pytest.mark.parametrize(
    "row", GEOMETRIES, ids=lambda row: f"{row[0]}-tokens-a-frame-T{row[1]}" if row else None
)
def test_official_geometries_have_the_published_counts(row):
    frame_tokens, t, frames, audio, video, *totals, kv_tiles, query_tiles, budget = row
    assert num_latent_frames(frames) == t
    assert num_audio_rows(frames) == audio
    for width, height in CANVASES[frame_tokens]:
        grid = token_grid(width, height, frames)
        assert grid == TokenGrid(t, height // 32, width // 32)
        assert grid.num_tokens == video
        for num_keyframes, without_prompt in enumerate(totals):
            sequence = t2va_sequence(width, height, frames, 353, num_keyframes)
            assert sequence.num_rows == without_prompt + 353
            assert sequence.num_video == video
            assert sequence.video_start == without_prompt + 353 - video
    layout = raster_layout(t2va_sequence(*CANVASES[frame_tokens][0], frames, 353))
    assert layout.num_video_kv_tiles == kv_tiles
    assert layout.num_video_query_tiles == query_tiles
    assert num_kept(0.15, kv_tiles) == budget


@pytest.mark.parametrize(("ratio", "size"), RATIOS)
def test_canvas_of_a_ratio_is_the_official_one(ratio, size):
    assert canvas(*ratio) == size


@pytest.mark.parametrize(("ratio", "size"), RATIOS)
def test_canvas_depends_on_the_ratio_only(ratio, size):
    assert canvas(ratio[0] * 3, ratio[1] * 3) == size


@pytest.mark.parametrize(
    ("asked", "legal"),
    [(1, 5), (5, 5), (6, 22), (22, 22), (23, 39), (107, 107), (120, 124), (125, 141), (346, 362)],
)
def test_frame_counts_snap_up_to_the_next_legal_one(asked, legal):
    assert snap_num_frames(asked) == legal


def test_every_snapped_count_is_legal_and_the_smallest_one():
    for asked in range(1, 400):
        snapped = snap_num_frames(asked)
        assert snapped % 17 == 5
        assert asked <= snapped < max(asked, 5) + 17


def test_latent_frames_follow_groups_of_five_that_cover_1_4_4_4_4_frames():
    # Count frames by walking the groups: latent frames 0, 5, 10.. cover one frame, others four.
    covered = 0
    for latent_idx in range(200):
        covered += 1 if latent_idx % 5 == 0 else 4
        if latent_idx % 5 == 1:
            assert num_latent_frames(covered) == latent_idx + 1


def test_a_clip_of_up_to_five_frames_has_two_latent_frames():
    assert num_latent_frames(5) == 2


def test_audio_is_forty_latents_a_second_per_channel_rounded_to_the_nearest():
    for group in range(40):
        frames = 17 * group + 5
        # Nearest integer to 5 F / 3 in integers; thirds never tie.
        assert num_audio_rows(frames) == 2 * ((10 * frames + 3) // 6)


@pytest.mark.parametrize(
    ("frames", "num_text", "num_rows"),
    [
        (124, 353, 38063),
        (124, 589, 38299),
        (124, 594, 38304),
        (243, 589, 73975),
        (345, 589, 104555),
        (345, 637, 104603),
    ],
)
def test_published_sequence_lengths_are_met(frames, num_text, num_rows):
    assert t2va_sequence(1344, 768, frames, num_text).num_rows == num_rows


def test_video_of_the_published_short_clip_starts_at_row_767():
    sequence = t2va_sequence(1344, 768, 124, 353)
    assert sequence.video_start == 767
    assert sequence.video == Segment(767, 38063, "video", TokenGrid(37, 24, 42))


def test_text_to_video_has_text_then_audio_then_video():
    sequence = t2va_sequence(1344, 768, 124, 353)
    assert [s[:3] for s in sequence.segments] == [
        (0, 353, "text"),
        (353, 767, "audio"),
        (767, 38063, "video"),
    ]


def test_each_keyframe_adds_its_vision_rows_to_text_and_one_condition_segment():
    # One keyframe: H*W + 8 rows inside text (label 6, two marks), H*W rows of kind cond.
    sequence = t2va_sequence(1344, 768, 124, 300, 2)
    text = 300 + 2 * (1008 + 8)
    assert [(s.kind, s.num_rows) for s in sequence.segments] == [
        ("text", text),
        ("cond", 1008),
        ("cond", 1008),
        ("audio", 414),
        ("video", 37296),
    ]


def test_any_multiple_of_32_is_a_canvas():
    assert token_grid(352, 416, 39) == TokenGrid(12, 13, 11)


def test_the_tail_is_every_row_before_the_video():
    parts = [("text", 11), ("cond", 6), ("cond_audio", 4), ("ref_audio", 6), ("ref_img", 9)]
    parts += [("ref_img", 4), ("audio", 8), ("video", 24)]
    sequence = Sequence(segments=segment_list(*parts), token_grid=TokenGrid(2, 3, 4))
    assert sequence.num_video == 24
    assert sequence.num_rows == 72
    assert sequence.video_start == 48


def test_a_clip_with_no_other_rows_has_an_empty_tail():
    sequence = Sequence(segments=segment_list(("video", 24)), token_grid=TokenGrid(2, 3, 4))
    assert sequence.video_start == 0


def test_segments_know_their_length():
    assert Segment(353, 767, "audio").num_rows == 414


MALFORMED = {
    "a gap": [(0, 10, "text"), (11, 19, "audio"), (19, 43, "video")],
    "an overlap": [(0, 10, "text"), (9, 17, "audio"), (17, 41, "video")],
    "a start after row 0": [(1, 10, "text"), (10, 34, "video")],
    "video before audio": [(0, 10, "text"), (10, 34, "video"), (34, 42, "audio")],
    "video too short": [(0, 10, "text"), (10, 33, "video")],
    "video too long": [(0, 10, "text"), (10, 35, "video")],
    "two video segments": [(0, 24, "video"), (24, 48, "video")],
    "video split in two": [(0, 10, "text"), (10, 22, "video"), (22, 34, "video")],
    "an unknown kind": [(0, 10, "texture"), (10, 34, "video")],
    "no video": [(0, 10, "text"), (10, 34, "audio")],
    "nothing": [],
    "a segment that ends before it starts": [
        (0, 10, "text"),
        (10, 4, "audio"),
        (4, 28, "video"),
    ],
}


@pytest.mark.parametrize("segments", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_segment_list_is_refused(segments):
    with pytest.raises(SequenceError) as refusal:
        Sequence(segments=tuple(Segment(*s) for s in segments), token_grid=TokenGrid(2, 3, 4))
    assert isinstance(refusal.value, NoxError)
    assert str(refusal.value).strip()
    assert "\n" not in str(refusal.value)


def test_the_refusal_of_an_unknown_kind_names_it():
    with pytest.raises(SequenceError, match="texture"):
        Sequence(
            segments=segment_list(("texture", 10), ("video", 24)), token_grid=TokenGrid(2, 3, 4)
        )
