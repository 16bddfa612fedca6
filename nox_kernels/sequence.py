"""Sequence: which packed rows are text, conditions, audio and video."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import SequenceError

KINDS = ("text", "cond", "cond_audio", "ref_img", "ref_audio", "audio", "video")

FPS = 24
TOKEN_PIXELS = 32  # a video token covers 32 x 32 pixels of one latent frame
SHORT_EDGE = 768  # of H3's official canvases
MAX_PIXELS = 768 * 1344


class TokenGrid(NamedTuple):
    """Token counts of a video segment: latent frames, rows and columns."""

    t: int
    h: int
    w: int

    @property
    def num_tokens(self) -> int:
        """All tokens of the grid."""
        return self.t * self.h * self.w

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"


class Segment(NamedTuple):
    """Contiguous packed rows [start, stop) of one kind.

    `grid` is the token grid of visual rows, t-major, then h, then w; None for other rows, and where
    the host does not tell.
    """

    start: int
    stop: int
    kind: str
    grid: TokenGrid | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the segment."""
        return self.stop - self.start


@dataclass(frozen=True)
class Sequence:
    """One packed sequence: its segments in row order and the token grid of its video.

    The video is always the last segment, t-major, then h, then w, so that token (t, h, w) is
    packed row `video_start + (t * H + h) * W + w`.

    Raises:
        SequenceError: Segments leave a gap, or the last one is not a video of the grid's size.
    """

    segments: tuple[Segment, ...]
    token_grid: TokenGrid

    def __post_init__(self):
        row = 0
        for segment in self.segments:
            if segment.kind not in KINDS:
                raise SequenceError(
                    f"Segment kind {segment.kind!r} is unknown; known: {', '.join(KINDS)}."
                )
            if segment.start != row or segment.stop < segment.start:
                raise SequenceError(
                    f"Segments must follow each other without a gap; {segment.kind} has rows "
                    f"{segment.start} to {segment.stop}, expected to start at {row}."
                )
            if segment.grid is not None and segment.grid.num_tokens != segment.num_rows:
                raise SequenceError(
                    f"A {segment.kind} segment has {segment.num_rows} rows, but a {segment.grid} "
                    f"token grid needs {segment.grid.num_tokens}."
                )
            row = segment.stop
        kinds = [segment.kind for segment in self.segments]
        if kinds.count("video") != 1 or kinds[-1] != "video":
            raise SequenceError(
                f"The last segment must be the only video, got {', '.join(kinds) or 'none'}."
            )
        if self.num_video < 1 or self.video.num_rows != self.token_grid.num_tokens:
            raise SequenceError(
                f"The video segment has {self.video.num_rows} rows, but a {self.token_grid} token "
                f"grid needs {self.token_grid.num_tokens}."
            )

    @property
    def num_rows(self) -> int:
        """S, all packed rows."""
        return self.segments[-1].stop

    @property
    def video(self) -> Segment:
        """The target video."""
        return self.segments[-1]

    @property
    def video_start(self) -> int:
        """First packed row of the target video."""
        return self.video.start

    @property
    def num_video(self) -> int:
        """Rows of the target video."""
        return self.video.num_rows

    @property
    def has_conditions(self) -> bool:
        """Keyframes or visual references are in it."""
        return any(segment.kind in ("cond", "ref_img") for segment in self.segments)

    @cached_property
    def is_audio(self) -> Tensor:
        """[S] bool: rows that carry target audio, the only output stream beside the video."""
        rows = torch.zeros(self.num_rows, dtype=torch.bool)
        for segment in self.segments:
            if segment.kind == "audio":
                rows[segment.start : segment.stop] = True
        return rows

    @cached_property
    def key(self) -> tuple:
        """A hashable identity, for caches."""
        return (self.segments, self.token_grid)


def snap_num_frames(num_frames: int) -> int:
    """The next legal frame count, 17 k + 5: H3 renders no other."""
    return 5 if num_frames <= 5 else num_frames + (5 - num_frames) % 17


def num_latent_frames(num_frames: int) -> int:
    """Latent frames T = 5 k + 2 of a frame count, snapped up first."""
    return (snap_num_frames(num_frames) - 5) // 17 * 5 + 2


def num_frames_of(num_latent_frames: int) -> int:
    """Frames that T latent frames decode to, 17 (T - 2) / 5 + 5."""
    return (num_latent_frames - 2) * 17 // 5 + 5


def num_audio_rows(num_frames: int) -> int:
    """Rows of the target audio: two channels at 40 latents a second."""
    return 2 * round(num_frames * 5 / 3)


def token_grid(width: int, height: int, num_frames: int) -> TokenGrid:
    """Token grid of a canvas in pixels, rounded up to whole tokens as the hosts pad it."""
    return TokenGrid(
        num_latent_frames(num_frames),
        math.ceil(height / TOKEN_PIXELS),
        math.ceil(width / TOKEN_PIXELS),
    )


def leading_run(x: Tensor) -> int:
    """How many leading entries equal the first."""
    return int(torch.unique_consecutive(x, return_counts=True)[1][0])


def grid_of_positions(position: Tensor) -> TokenGrid | None:
    """Token grid of visual rows from their coordinates; None if they do not form one.

    Args:
        position: [N, 3] (t, h, w) coordinates, expected t-major, then h, then w. Steps between
            coordinates may be anything.
    """
    t, h, _ = position.unbind(1)
    frame_rows = leading_run(t)
    width = leading_run(h[:frame_rows])
    grid = TokenGrid(len(t) // frame_rows, frame_rows // width, width)
    if grid.num_tokens != len(t):
        return None
    cells = position.view(*grid, 3)
    axes = torch.meshgrid(cells[:, 0, 0, 0], cells[0, :, 0, 1], cells[0, 0, :, 2], indexing="ij")
    return grid if torch.equal(torch.stack(axes, dim=3), cells) else None


def canvas(ratio_w: float, ratio_h: float) -> tuple[int, int]:
    """H3's official (width, height) in pixels for an aspect ratio.

    The short edge is 768; a canvas over 768 x 1344 pixels shrinks to that area; each edge is
    rounded to 32 (diffusers' H3 pipeline and ComfyUI agree on this rule).
    """
    ratio = ratio_w / ratio_h
    width, height = (
        (SHORT_EDGE * ratio, SHORT_EDGE) if ratio >= 1 else (SHORT_EDGE, SHORT_EDGE / ratio)
    )
    shrink = min(1.0, math.sqrt(MAX_PIXELS / (width * height)))

    def snap(edge: float) -> int:
        return max(TOKEN_PIXELS, round(edge * shrink / TOKEN_PIXELS) * TOKEN_PIXELS)

    return snap(width), snap(height)


def t2va_sequence(
    width: int, height: int, num_frames: int, num_text: int, num_keyframes: int = 0
) -> Sequence:
    """The packed sequence of a text-to-video, or with keyframes image-to-video, request.

    Args:
        width: Canvas width in pixels.
        height: Canvas height in pixels.
        num_frames: Frames at 24 a second, snapped up to 17 k + 5.
        num_text: Prompt tokens, without what keyframes add.
        num_keyframes: First or last frames given. Each adds a frame of condition rows and, to
            the text, its vision rows with 8 rows of label around them.
    """
    num_frames = snap_num_frames(num_frames)
    grid = token_grid(width, height, num_frames)
    frame = TokenGrid(1, grid.h, grid.w)
    lengths = [("text", num_text + num_keyframes * (frame.num_tokens + 8), None)]
    lengths += [("cond", frame.num_tokens, frame)] * num_keyframes
    lengths += [("audio", num_audio_rows(num_frames), None), ("video", grid.num_tokens, grid)]
    segments, row = [], 0
    for kind, num_rows, segment_grid in lengths:
        segments.append(Segment(row, row + num_rows, kind, segment_grid))
        row += num_rows
    return Sequence(tuple(segments), grid)
