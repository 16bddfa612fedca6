"""Video formats: what a saved file can be, read from the data files in `formats/`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from . import strict_json
from .errors import RequestError, quote
from .yuv import PIXEL_FORMATS, PixelFormat

PRESETS = ("ultrafast", "veryfast", "fast", "medium", "slow", "veryslow")  # x264's words
MAX_CRF = 51
_BT709 = 1  # the number of BT.709 in all three colour tables: primaries, transfer, matrix
_LIMITED_RANGE = 1  # luma 16..235
_ANY_SIZE = 256, 256  # pixels; with the next one, what every encoder takes
_ANY_RATE = Fraction(24)
_SHORT = 2  # frames


@dataclass(frozen=True)
class AudioFormat:
    """The sound of a file.

    Attributes:
        encoder: FFmpeg's word, as are the next two.
        sample_format: What the encoder is fed.
        bit_rate: Bits per second; 0 for an encoder without loss.
        max_channels: More are mixed to stereo.
    """

    encoder: str
    sample_format: str
    bit_rate: int
    max_channels: int


@dataclass(frozen=True)
class PictureFormat:
    """The picture of a file.

    Attributes:
        encoder: FFmpeg's word, as are pixel_format, tag, options and the names of options.
        pixel_format: In which the frames are stored.
        tag: The codec's four letters in the file; "" for the container's own choice.
        min_side: Frames that are narrower or lower are padded: the encoder fails on them, libx265
            by a crash of the process (33 to 48 pixels wide, PyAV 18.1).
        options: Of the encoder. libx264 looks 20 frames ahead instead of 40: it holds 9 MB for each
            at 1920x1088 (tests/bench/bench_save_video.py, 2026-12-07).
        max_threads: Of the encoder, where each costs memory (libx264: 4 MB at 1920x1088); 0 leaves
            their number to it.
        short_options: On top, in clips of one or two frames: with fewer frames than libx265 reorders,
            it hands out times that it never set, and the file cannot be written (PyAV 18.1, at
            random).
        quality_option: The option that takes crf; "" where nothing is lost or the rate is fixed.
        least_quality: The lowest crf that the encoder takes and players play.
        preset_option: The option that takes the preset; "" without one.
        presets: Our word -> the encoder's.
    """

    encoder: str
    pixel_format: str
    tag: str
    min_side: int
    options: Mapping[str, str]
    max_threads: int
    short_options: Mapping[str, str]
    quality_option: str
    least_quality: int
    preset_option: str
    presets: Mapping[str, str]

    @property
    def pixels(self) -> PixelFormat:
        """How the planes lie."""
        return PIXEL_FORMATS[self.pixel_format]

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of a file that holds such frames."""
        shared = self.pixels.shared_rows, self.pixels.shared_columns
        sides = (max(side, self.min_side) for side in (height, width))
        return tuple(-(-side // unit) * unit for side, unit in zip(sides, shared, strict=True))  # type: ignore[return-value]

    def encoder_options(self, crf: float, preset: str, num_frames: int) -> dict[str, str]:
        """All options of a clip."""
        options = dict(self.options)
        if num_frames <= _SHORT:
            options |= self.short_options
        if self.quality_option:
            options[self.quality_option] = f"{max(crf, self.least_quality):g}"
        if self.preset_option:
            options[self.preset_option] = self.presets[preset]
        return options

    def prepare(self, context: Any, height: int, width: int, rate: Fraction) -> None:
        """Set up PyAV's codec context; all four colour tags are written."""
        context.height, context.width = height, width
        context.pix_fmt = self.pixel_format
        context.framerate, context.time_base = rate, 1 / rate
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = _LIMITED_RANGE
        # By slice, as PyAV's default: by frame, x264 holds a frame more for every CPU core.
        context.thread_type = "SLICE"
        if self.max_threads:
            context.thread_count = min(self.max_threads, os.cpu_count() or 1)
        if self.tag:
            context.codec_tag = self.tag


@dataclass(frozen=True)
class VideoFormat:
    """A kind of file.

    Attributes:
        name: As it stands in the menu and in saved workflows.
        suffix: Of the file's name, with its dot.
        container: FFmpeg's word, as are the options' names.
        container_options: For the container alone: macOS' AAC encoder rejects them.
        plays_on_page: Whether browsers play it.
        video: The picture.
        audio: The sound.
    """

    name: str
    suffix: str
    container: str
    container_options: Mapping[str, str]
    plays_on_page: bool
    video: PictureFormat
    audio: AudioFormat

    def why_no_picture(
        self,
        *,
        crf: float,
        preset: str,
        rate: Fraction = _ANY_RATE,
        size: tuple[int, int] = _ANY_SIZE,
    ) -> str | None:
        """Why frames cannot be encoded here, as a sentence, by opening the encoder; None if so.

        Args:
            crf: As in write_video.
            preset: As in write_video.
            rate: Frames per second.
            size: (height, width) of the file.
        """
        fault = self._why_not(
            self.video.encoder, functools.partial(self._try_picture, crf, preset, rate, size)
        )
        if fault is None or (rate, size) == (_ANY_RATE, _ANY_SIZE):
            return fault
        if self.why_no_picture(crf=crf, preset=preset) is not None:
            return fault
        height, width = size  # so it is these that the encoder does not take
        shape = "" if size == _ANY_SIZE else f"{width}x{height} pixels at "
        return (
            f"{self.name} cannot hold {shape}{float(rate):g} frames a second: the encoder "
            f"{self.video.encoder} does not open. Choose another format: H.264 takes every rate, "
            "FFV1 and ProRes take large frames."
        )

    def why_no_sound(self) -> str | None:
        """The same for sound."""
        return self._why_not(self.audio.encoder, self._try_sound)

    def _why_not(self, encoder: str, try_open: Callable[[], None]) -> str | None:
        try:
            import av
        except ImportError as err:
            return f"Videos cannot be saved because PyAV does not load ({err}); run: pip install av"
        if encoder not in av.codecs_available:
            return (
                f"{self.name} cannot be saved because this PyAV was built without the encoder "
                f"{encoder}; install the standard wheel (pip install --force-reinstall av) or "
                "choose another format."
            )
        try:
            try_open()
        except (av.error.FFmpegError, ValueError) as err:
            reason = getattr(err, "strerror", None) or err
            need = "; it needs an NVIDIA GPU that encodes video" if "nvenc" in encoder else ""
            return (
                f"{self.name} cannot be saved here because the encoder {encoder} does not open "
                f"({reason}{need}). Choose another format."
            )
        return None

    def _try_picture(self, crf: float, preset: str, rate: Fraction, size: tuple[int, int]) -> None:
        import av

        context = av.CodecContext.create(self.video.encoder, "w")
        self.video.prepare(context, *size, rate)
        context.options = self.video.encoder_options(crf, preset, _SHORT + 1)
        context.open()

    def _try_sound(self) -> None:
        import av

        context = av.CodecContext.create(self.audio.encoder, "w")
        context.sample_rate, context.layout = 48000, "stereo"
        context.format = self.audio.sample_format
        context.open()


def parse(data: Any) -> VideoFormat:
    """A format file's value. Raises ValueError for one that is no format."""
    try:
        parts = data | {
            "video": PictureFormat(**data["video"]),
            "audio": AudioFormat(**data["audio"]),
        }
        found = VideoFormat(**parts)
    except (KeyError, TypeError) as err:
        raise ValueError(f"its names are not those of a video format ({err})") from err
    for part in (found, found.video, found.audio):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, dict):
                fits = all(isinstance(item, str) for item in value.values())
            elif field.type in ("str", "int", "bool"):
                fits = type(value).__name__ == field.type
            else:
                fits = field.name in ("video", "audio")
            if not fits:
                raise ValueError(f"{field.name} is {quote(value)}")
    if found.video.pixel_format not in PIXEL_FORMATS:
        raise ValueError(f"pixel_format is {quote(found.video.pixel_format)}")
    if found.video.preset_option and tuple(found.video.presets) != PRESETS:
        raise ValueError(f"presets must be {', '.join(PRESETS)}")
    return found


@functools.cache
def formats() -> Mapping[str, VideoFormat]:
    """Every format by its name, in the order of the menu."""
    files = sorted((Path(__file__).parent / "formats").glob("*.json"))
    found = [parse(strict_json.parse(file.read_bytes())) for file in files]
    return {video_format.name: video_format for video_format in found}


def default_format() -> VideoFormat:
    """The one that plays everywhere."""
    return next(iter(formats().values()))


def find(name: str) -> VideoFormat:
    """The format of that name; RequestError if there is none."""
    if name not in formats():
        raise RequestError(
            f"There is no video format {quote(name)}; choose one of: {', '.join(formats())}."
        )
    return formats()[name]


def frame_rate(fps: float | Fraction) -> Fraction:
    """Frames per second as files count them; RequestError for what none can."""
    # The MP4 clock is a 32-bit fraction: outside this window it cannot count frames.
    if not 0.001 <= fps <= 10_000:
        raise RequestError(f"The frame rate must be between 0.001 and 10000 fps, it is {fps}.")
    return Fraction(fps).limit_denominator(100_000)


def check_settings(crf: float, preset: str) -> None:
    """Raise RequestError for numbers and words that no encoder takes."""
    if not 0 <= crf <= MAX_CRF:
        raise RequestError(
            f"crf must be between 0 (best) and {MAX_CRF} (smallest file), it is {crf}."
        )
    if preset not in PRESETS:
        raise RequestError(f"The encoder preset {quote(preset)} is none of {', '.join(PRESETS)}.")
