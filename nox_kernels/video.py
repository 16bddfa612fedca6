"""Video: writes one file from frames and sound, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from torch import Tensor

from .errors import NoxError, RequestError
from .sound import Audio, Sound, SoundError, clean_sound, encode_sound, rescue_sound
from .video_format import VideoFormat, check_settings, default_format, frame_rate
from .yuv import to_planes

_BT709 = 1  # FFmpeg's number of BT.709 in all three colour tables: primaries, transfer, matrix
_LIMITED_RANGE = 1  # luma 16..235
_MAX_LENGTH_GAP_S = 0.1


@dataclass(frozen=True)
class WrittenVideo:
    """What was written; width and height are those of the file, after padding."""

    path: str
    width: int
    height: int
    num_frames: int
    warnings: tuple[str, ...]  # one plain sentence each


class NameTakenError(NoxError, FileExistsError):
    """The file exists already; nothing was written."""


@dataclass(frozen=True, eq=False)
class _Clip:
    """The picture half of a file, checked."""

    frames: Tensor  # [F, H, W, C >= 3]
    rate: Fraction  # frames per second
    format: VideoFormat
    crf: float
    preset: str
    dither: bool
    metadata: dict[str, str]
    progress: Callable[[int, int], None] | None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the file."""
        return self.format.video.size_for(*self.frames.shape[1:3])


def write_video(
    path: str | os.PathLike[str],
    frames: Tensor,
    audio: Audio | None = None,
    *,
    fps: float | Fraction = 24,
    video_format: VideoFormat | None = None,
    crf: float = 18,
    preset: str = "medium",
    dither: bool = False,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WrittenVideo:
    """Write frames and sound as one file; an existing file is never touched.

    Args:
        path: target, in a folder that exists.
        frames: [F, H, W, C >= 3] float in 0..1 on any device, read one frame at a time;
            only the first three channels (RGB) are used.
        audio: sound of the clip; None, and what no file can hold, gives a file without an audio
            stream.
        fps: frames per second.
        video_format: the kind of file; None for MP4 with H.264 and AAC. The path should end like it.
        crf: the encoder's quality, 0 (largest file) .. 51 (smallest); formats without one ignore it.
        preset: the encoder's speed, one of PRESETS; formats without one ignore it.
        dither: hide the bands of smooth gradients under a fine fixed pattern.
        metadata: text tags of the container, written as they are.
        progress: called with (frames done, F) after each frame.

    Returns:
        The file's facts, with a sentence for everything that was not taken as given.

    Raises:
        RequestError: frames or numbers that cannot become a video.
        NameTakenError: path exists.
        NoxError: the file could not be written; no part of it stays behind.
    """
    _check_frames(frames)
    check_settings(crf, preset)
    video_format = video_format or default_format()
    clip = _Clip(
        frames,
        frame_rate(fps),
        video_format,
        crf,
        preset,
        dither,
        dict(metadata or {}),
        progress,
    )
    target = os.path.abspath(os.fspath(path))
    _check_target(target)
    fault = video_format.why_no_picture(crf=crf, preset=preset, rate=clip.rate, size=clip.size)
    if fault is not None:
        raise NoxError(fault)
    warnings: list[str] = []
    sound = clean_sound(audio, video_format.audio, warnings)
    _compare_sizes(clip, warnings)
    _compare_lengths(clip, sound, warnings)

    part = os.path.join(os.path.dirname(target), f".nox-{uuid.uuid4().hex}.part")
    sound_error: SoundError | None = None
    try:
        with _plain_errors(target):
            try:
                num_bad_frames = _encode(part, clip, sound)
            except SoundError as err:
                sound_error = err
                num_bad_frames = _encode(part, clip, None)
            publish(part, target)
    finally:
        with contextlib.suppress(OSError):  # after publish there is nothing left to remove
            os.unlink(part)
    if sound_error is not None:
        warnings.append(rescue_sound(target, sound_error.sound, str(sound_error)))
    if num_bad_frames:
        warnings.append(
            f"{num_bad_frames} of {len(frames)} frames hold invalid pixels (NaN or infinite); "
            "those pixels were saved as black."
        )
    height, width = clip.size
    return WrittenVideo(target, width, height, len(frames), tuple(warnings))


def _check_frames(frames: Tensor) -> None:
    shape = tuple(getattr(frames, "shape", ()))
    if len(shape) != 4 or min(shape) < 1 or shape[3] < 3:
        raise RequestError(
            "A video needs at least one RGB frame, as a batch [frames, height, width, channels]; "
            f"this one has shape {list(shape)}."
        )
    if not frames.is_floating_point():
        raise RequestError(f"Frames must be numbers in 0..1 (float), these are {frames.dtype}.")


def _check_target(target: str) -> None:
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise NoxError(f"The video cannot be saved because the folder {folder} does not exist.")
    if os.path.lexists(target):
        raise NameTakenError(f"{target} exists already and was left as it is; choose another name.")


def _compare_sizes(clip: _Clip, warnings: list[str]) -> None:
    height, width = clip.frames.shape[1:3]
    if (height, width) == clip.size:
        return
    # Cropping is no way out: H.264, H.265 and AV1 count it in whole colour samples, MP4's own
    # is ignored by players, and another pixel aspect would stretch the picture.
    added = [
        f"{new - old} at the {edge}"
        for edge, old, new in zip(("bottom", "right"), (height, width), clip.size, strict=True)
        if new != old
    ]
    warnings.append(
        f"The frames are {width}x{height}, which {clip.format.name} cannot hold: lines of pixels at "
        f"the edge were repeated ({', '.join(added)}), and the video is "
        f"{clip.size[1]}x{clip.size[0]}."
    )


def _compare_lengths(clip: _Clip, sound: Sound | None, warnings: list[str]) -> None:
    video_s = float(len(clip.frames) / clip.rate)
    if sound is not None and abs(sound.seconds - video_s) > _MAX_LENGTH_GAP_S:
        warnings.append(
            f"The sound is {sound.seconds:.2f} s long and the picture {video_s:.2f} s "
            f"({len(clip.frames)} frames at {float(clip.rate):g} fps); both were saved whole."
        )


def _encode(part: str, clip: _Clip, sound: Sound | None) -> int:
    """Write the file `part`; returns the number of frames with a non-finite pixel."""
    import av

    num_bad_frames = 0
    with av.open(
        part,
        "w",
        format=clip.format.container,
        container_options=dict(clip.format.container_options),
        metadata_errors="replace",
    ) as container:
        container.metadata.update(clip.metadata)  # the header is written with the first packet
        stream = _add_video_stream(container, clip)
        # Sound first, kept as packets (AAC: 32 kB a second): a failure then costs no picture.
        audio = clip.format.audio
        sound_packets = deque(encode_sound(container, sound, audio) if sound is not None else ())
        for frame_idx, frame in enumerate(clip.frames):
            picture, all_finite = _to_yuv(frame, frame_idx, clip)
            num_bad_frames += not all_finite
            container.mux(stream.encode(picture))
            now_s = frame_idx / clip.rate
            while sound_packets and sound_packets[0].pts * sound_packets[0].time_base <= now_s:
                container.mux(sound_packets.popleft())
            if clip.progress is not None:
                clip.progress(frame_idx + 1, len(clip.frames))
        container.mux(stream.encode(None))
        container.mux(list(sound_packets))
    return num_bad_frames


def _add_video_stream(container, clip: _Clip):
    video = clip.format.video
    options = video.encoder_options(clip.crf, clip.preset, len(clip.frames))
    stream = container.add_stream(video.encoder, rate=clip.rate, options=options)
    video.prepare(stream.codec_context, *clip.size, clip.rate)
    return stream


def _to_yuv(frame: Tensor, frame_idx: int, clip: _Clip) -> tuple[object, bool]:
    """Limited-range BT.709 picture of frame [H, W, C], and whether every pixel was finite."""
    import av

    # A CPU's float32 frame is not copied.
    rgb = np.ascontiguousarray(frame[..., :3].detach().float().cpu().numpy())
    lowest, highest = rgb.min(), rgb.max()  # NaN where there is one
    all_finite = bool(np.isfinite(lowest) and np.isfinite(highest))
    if not all_finite:
        rgb = np.nan_to_num(rgb, nan=0.0, posinf=0.0, neginf=0.0)
    if not all_finite or lowest < 0 or highest > 1:
        rgb = rgb.clip(0.0, 1.0)
    height, width = clip.size
    if rgb.shape[:2] != (height, width):
        lines = ((0, height - rgb.shape[0]), (0, width - rgb.shape[1]), (0, 0))
        rgb = np.pad(rgb, lines, mode="edge")

    pixels = clip.format.video.pixels
    picture = av.VideoFrame(width, height, pixels.name)
    planes = to_planes(rgb, pixels, dither=clip.dither)
    for plane, samples in zip(picture.planes, planes, strict=True):
        line_bytes = samples.shape[1] * samples.itemsize
        lines = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
        lines[:, :line_bytes] = samples.view(np.uint8)
    # ProRes takes the tags from here, the others from the stream.
    picture.colorspace, picture.color_range = _BT709, _LIMITED_RANGE
    with contextlib.suppress(AttributeError):  # PyAV 16 has no such tags of a frame
        picture.color_primaries = picture.color_trc = _BT709
    picture.pts = frame_idx
    picture.time_base = 1 / clip.rate
    return picture, all_finite


def publish(part: str, target: str) -> None:
    """Give the finished file its name, unless somebody else took it meanwhile."""
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    # Creating exclusively reserves the name on every file system; hard links do not exist on all.
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError as err:
        raise NameTakenError(f"{target} was created meanwhile and was left as it is.") from err
    try:
        os.replace(part, target)
    except OSError:
        os.unlink(target)  # our own empty reservation
        raise
    _flush_folder(os.path.dirname(target))


def _flush_folder(folder: str) -> None:
    """Bring the new name to the disk too, where folders can be flushed: not on Windows."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and run again",
    errno.EDQUOT: "your disk quota is used up; free some space and run again",
    errno.EFBIG: "the file would be larger than the file system allows",
    errno.EACCES: "the folder is not writable; check its permissions",
    errno.EPERM: "the folder is not writable; check its permissions",
    errno.EROFS: "the disk is read-only; choose another output folder",
    errno.ENAMETOOLONG: "the file name is too long; shorten filename_prefix",
}


@contextlib.contextmanager
def _plain_errors(target: str) -> Iterator[None]:
    """Turn what FFmpeg or the file system raises into one sentence."""
    import av

    try:
        yield
    except NoxError:
        raise
    except (OSError, av.error.FFmpegError) as err:
        reason = _REASONS.get(err.errno or 0) or f"{err.strerror or err}"
        raise NoxError(f"The video could not be saved as {target}: {reason}.") from err
