"""Nox Save Video: one playable file with the workflow inside."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Any

import folder_paths
from comfy.cli_args import args
from comfy.utils import ProgressBar
from comfy_api.latest import InputImpl, io, ui

from ..nox_kernels.errors import NoxError, RequestError
from ..nox_kernels.sound import Audio
from ..nox_kernels.video import NameTakenError, WrittenVideo, write_video
from ..nox_kernels.video_format import (
    PRESETS,
    VideoFormat,
    check_settings,
    default_format,
    find,
    formats,
    frame_rate,
)
from . import report_text, status
from .filename import resolve_prefix, why_no_folder, why_not
from .report_store import NO_RUN, lines_and_reports
from .still import write_still

_OUTPUT, _TEMP = "output", "temp"
_BOTH_INPUTS = (
    "Nox Save Video has both images and a video connected; disconnect one, so that it is clear "
    "which to save."
)
_DEFAULT_PREFIX = "video/Nox_H3"
_UNWIRED = object()
_NO_INPUT = "Nox Save Video has nothing to save; connect either images or a video."


class NoxSaveVideo(io.ComfyNode):
    """Saves IMAGE + AUDIO, or a VIDEO, as one file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Sockets first, then widgets; names and order are part of saved workflows."""
        return io.Schema(
            node_id="NoxSaveVideo",
            display_name="Nox Save Video",
            category="Nox",
            description=(
                "Saves one video file with sound that plays everywhere. The workflow is stored in "
                "the file: drag it onto the canvas to get the graph back."
            ),
            search_aliases=["save video", "export video", "mp4", "video combine"],
            is_output_node=True,
            inputs=[
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="Frames to save. Connect either images or a video, not both.",
                ),
                io.Video.Input(
                    "video",
                    optional=True,
                    tooltip="Video to save, with its own sound and frame rate. Connect either "
                    "images or a video, not both.",
                ),
                io.Audio.Input(
                    "audio",
                    optional=True,
                    tooltip="Sound of the file. Replaces the sound of a connected video.",
                ),
                io.Float.Input(
                    "fps",
                    default=24.0,
                    min=0.01,
                    max=1000.0,
                    step=0.01,
                    tooltip="Frames per second of connected images. MiniMax-H3 makes 24. A "
                    "connected video keeps its own frame rate and ignores this.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default=_DEFAULT_PREFIX,
                    tooltip="Where to save in the output folder; a / makes a folder. May hold "
                    "%date:yyyy-MM-dd% or values of other nodes such as %KSampler.seed%.",
                ),
                io.Combo.Input(
                    "format",
                    options=list(formats()),
                    tooltip="Kind of file. mp4 H.264 plays everywhere; H.265 is smaller and plays "
                    "on newer devices; mkv FFV1 is for archives: large, and the page reads no "
                    "workflow back from it. NVENC needs an NVIDIA "
                    "GPU that encodes video; what does not work here is refused before the run.",
                ),
                io.Int.Input(
                    "crf",
                    default=18,
                    min=0,
                    max=51,
                    tooltip="Picture quality: lower is better and makes a larger file. 18 looks "
                    "like the original, 23 is smaller, 28 and more shows. FFV1 and ProRes ignore "
                    "it.",
                ),
                io.Boolean.Input(
                    "save_metadata",
                    default=True,
                    advanced=True,
                    tooltip="Store the workflow and Nox's run report in the file. Switch off to "
                    "share a video without them.",
                ),
                # Younger than the first saved workflows, so optional: those run as they are.
                io.Combo.Input(
                    "save_to",
                    options=[_OUTPUT, _TEMP],
                    optional=True,
                    tooltip="The output folder keeps the file; the temp folder is emptied when "
                    "ComfyUI starts.",
                ),
                io.Combo.Input(
                    "encoder_preset",
                    options=list(PRESETS),
                    default="medium",
                    optional=True,
                    advanced=True,
                    tooltip="Slower makes a smaller file of the same look. FFV1 and ProRes ignore "
                    "it.",
                ),
                io.Boolean.Input(
                    "dither",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Hide bands in smooth gradients (skies, fog) under a fine fixed "
                    "pattern. Makes a slightly larger file.",
                ),
                io.Boolean.Input(
                    "first_frame_png",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Also save the first frame as PNG beside the video, with the workflow "
                    "inside.",
                ),
            ],
            outputs=[
                io.Video.Output("video", tooltip="The saved file."),
                io.Image.Output(
                    "last_frame", tooltip="The last frame before compression, to continue a clip."
                ),
                io.String.Output("path", tooltip="Full path of the saved file."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        fps,
        filename_prefix,
        format,
        crf,
        save_to=_OUTPUT,
        encoder_preset="medium",
        images=_UNWIRED,
        video=_UNWIRED,
        audio=_UNWIRED,
    ) -> bool | str:
        """Refuse before the run what would fail after it.

        A wired socket arrives as None, its value being unknown yet. filename_prefix is named since
        ComfyUI drops the answer of a check that looks at no input of the graph; what is named here
        ComfyUI checks no more.
        """
        if images is _UNWIRED and video is _UNWIRED:
            return _NO_INPUT
        if images is not _UNWIRED and video is not _UNWIRED:
            return _BOTH_INPUTS
        if filename_prefix is not None:
            fault = _why_not_there(filename_prefix, _OUTPUT if save_to is None else save_to)
            if fault is not None:
                return fault
        if None in (format, crf, encoder_preset):
            return True
        try:
            rate = frame_rate(24 if fps is None or images is _UNWIRED else fps)
            encoding = _Encoding.checked(format, crf, encoder_preset, rate)
        except (RequestError, TypeError) as err:  # a TypeError: what should be a number is none
            return str(err)
        has_sound = audio is not _UNWIRED or video is not _UNWIRED
        return (encoding.format.why_no_sound() if has_sound else None) or True

    @classmethod
    def execute(
        cls,
        fps: float,
        filename_prefix: str,
        format: str,
        crf: int,
        save_metadata: bool = True,
        save_to: str = _OUTPUT,
        encoder_preset: str = "medium",
        dither: bool = False,
        first_frame_png: bool = False,
        images=None,
        video=None,
        audio=None,
    ) -> io.NodeOutput:
        """Write the file; everything worth knowing about it goes onto the node.

        By now the clip has cost its time: what is wrong with the things around its frames is
        replaced, with a sentence, and does not end the run.
        """
        file_warnings: list[str] = []

        def usable(instead: Any, sentence: str, get: Callable[[], Any]) -> Any:
            try:
                return get()
            except Exception as err:  # noqa: BLE001 - what other nodes hand over may raise anything
                file_warnings.append(f"{sentence}: {str(err).rstrip('.')}.")
                return instead

        images, audio, fps = _frames_sound_and_rate(images, video, audio, fps, file_warnings)
        prompt, extra = cls.hidden.prompt or {}, cls.hidden.extra_pnginfo or {}
        lines, reports = lines_and_reports(prompt, cls.hidden.unique_id)
        metadata: dict[str, str] = {}
        if save_metadata and not args.disable_metadata:
            reported = [report.as_dict() for report in reports]
            metadata = usable(
                {},
                "The file holds no workflow",
                lambda: _metadata(prompt, extra, reported, file_warnings),
            )
        place = usable(
            (_DEFAULT_PREFIX, _OUTPUT),
            f"The video was saved under {_DEFAULT_PREFIX} in the output folder instead",
            lambda: _place(filename_prefix, save_to, prompt, extra),
        )
        rate = usable(
            Fraction(24), "The video was saved at 24 fps instead", lambda: frame_rate(fps)
        )
        usual = _Encoding(default_format(), 18, "medium")
        encoding = usable(
            usual,
            f"The video was saved as {usual.format.name} with crf {usual.crf} instead",
            lambda: _Encoding.checked(format, crf, encoder_preset, rate),
        )
        sound = usable(
            None,
            "The video was saved without sound, which could not be read",
            lambda: None if audio is None else Audio(audio["waveform"], audio["sample_rate"]),
        )
        written, subfolder, save_to = _write_next(
            place,
            file_warnings,
            images,
            sound,
            fps=rate,
            video_format=encoding.format,
            crf=encoding.crf,
            preset=encoding.preset,
            dither=dither,
            metadata=metadata,
            progress=ProgressBar(len(images)).update_absolute,
        )
        file_warnings += written.warnings
        if first_frame_png:
            still_path = f"{os.path.splitext(written.path)[0]}.png"
            fault = write_still(still_path, images[0], metadata)
            file_warnings += [fault] if fault is not None else []
        for warning in [line for line in lines if line == NO_RUN] + file_warnings:
            logging.warning("Nox Save Video: %s", warning)
        lines += file_warnings
        # the page draws only the video of what a saver returns
        shown = [*map(report_text.badge, reports), *lines[len(reports) :]]
        status.show(cls.hidden.unique_id, "\n".join(shown))
        return io.NodeOutput(
            # The file rather than the tensors: it holds no memory, it is exactly what was saved,
            # core's saver copies it without another loss, and it carries the `nox` tag on.
            InputImpl.VideoFromFile(written.path),
            images[-1:, ..., :3].clone(),  # a view would keep the whole clip alive
            written.path,
            ui=_preview(written, subfolder, save_to, encoding.format, images, lines),
        )


_FOLDERS = {
    _OUTPUT: folder_paths.get_output_directory,
    _TEMP: folder_paths.get_temp_directory,
}


def _frames_sound_and_rate(images, video, audio, fps, warnings: list[str]):
    """(IMAGE, AUDIO or None, frames per second) of whichever input is connected."""
    if images is not None and video is not None:
        raise RequestError(_BOTH_INPUTS)
    if images is None and video is None:
        raise RequestError(_NO_INPUT)
    if images is None:
        parts = video.get_components()
        images, fps = parts.images, parts.frame_rate
        audio = parts.audio if audio is None else audio
        colours = video.get_color_space() if hasattr(video, "get_color_space") else "sRGB"
        if colours != "sRGB":
            warnings.append(
                f"The connected video is {colours} (HDR) and was saved as ordinary BT.709 without "
                "a conversion, so its colours look flat; ComfyUI's own Save Video keeps HDR."
            )
    if images.shape[-1] == 1:  # grey
        images = images.expand(-1, -1, -1, 3)
    return images, audio, fps


def _place(filename_prefix: str, save_to: str, prompt, extra) -> tuple[str, str]:
    """(prefix without tokens, save_to); RequestError for what names no file in that folder."""
    prefix = resolve_prefix(filename_prefix, prompt, extra.get("workflow"), datetime.now())
    fault = _why_not_there(prefix, save_to)
    if fault is not None:
        raise RequestError(fault)
    return prefix, save_to


def _why_not_there(prefix: str, save_to: str) -> str | None:
    if save_to not in _FOLDERS:
        return f"save_to is {save_to!r}; choose one of: {', '.join(_FOLDERS)}."
    return why_not(prefix) or why_no_folder(prefix, _FOLDERS[save_to]())


@dataclass(frozen=True)
class _Encoding:
    format: VideoFormat
    crf: float
    preset: str

    @classmethod
    def checked(cls, format: str, crf: float, preset: str, rate: Fraction) -> _Encoding:
        """What the widgets say; RequestError where this machine cannot encode so."""
        check_settings(crf, preset)
        video_format = find(format)
        fault = video_format.why_no_picture(crf=crf, preset=preset, rate=rate)
        if fault is not None:
            raise RequestError(fault)
        return cls(video_format, crf, preset)


def _metadata(
    prompt: dict, extra_pnginfo: dict, reports: list[dict], warnings: list[str]
) -> dict[str, str]:
    """Tags of the file: the page restores a graph from separate `prompt` and `workflow` tags.

    What another node put there that is no JSON is left out, with a sentence.
    """
    tags = dict(extra_pnginfo)
    if prompt:
        tags["prompt"] = prompt
    if reports:
        tags["nox"] = reports
    texts = {}
    for name, value in tags.items():
        try:
            texts[str(name)] = json.dumps(_strict_json(value), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as err:
            warnings.append(f"The file has no tag {name!r}, which cannot be written: {err}.")
    return texts


def _strict_json(value):
    """The value with null for NaN and Infinity, which JSON does not know and the page rejects."""
    if isinstance(value, dict):
        return {key: _strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_next(
    place: tuple[str, str], warnings: list[str], images, sound: Audio | None, **settings
) -> tuple[WrittenVideo, str, str]:
    """Write under the first free number.

    Returns:
        What was written, its subfolder, and in which of _FOLDERS.
    """
    usual = (_DEFAULT_PREFIX, _OUTPUT)
    try:
        folder, name, counter, subfolder = _numbered(*place, images)
    except NoxError as err:
        if place == usual:
            raise
        folder, name, counter, subfolder = _numbered(*usual, images)
        warnings.append(f"The video was saved under {usual[0]} instead: {err}")
        place = usual
    while True:
        path = os.path.join(folder, f"{name}_{counter:05}_{settings['video_format'].suffix}")
        try:
            written = write_video(path, images, sound, **settings)
        except NameTakenError:  # by another run that saves into the same folder
            counter += 1
        else:
            return written, subfolder, place[1]


def _numbered(prefix: str, save_to: str, images) -> tuple[str, str, int, str]:
    """(folder, name, next number, subfolder) by ComfyUI's rules, with the folder made."""
    height, width = images.shape[1:3]
    try:
        return folder_paths.get_save_image_path(prefix, _FOLDERS[save_to](), width, height)[:4]
    except Exception as err:  # core raises a bare one where the name leads out of its folder
        reason = getattr(err, "strerror", None) or str(err).splitlines()[0]
        raise NoxError(f"The folder for {prefix[:80]} could not be made: {reason}.") from err


def _preview(
    written: WrittenVideo, subfolder: str, save_to: str, kind: VideoFormat, images, lines
) -> dict:
    """The player on the node, and the lines for whoever reads the history.

    A browser does not play every kind: the first frame stands for those, from the temp folder.
    """
    if kind.plays_on_page:
        file = ui.SavedResult(os.path.basename(written.path), subfolder, io.FolderType(save_to))
        shown = ui.PreviewVideo([file]).as_dict()
    else:
        shown = _first_picture(images)
    if lines:
        shown["text"] = ("\n".join(lines),)
    return shown


def _first_picture(images) -> dict:
    try:
        return ui.PreviewImage(images[:1, ..., :3].float()).as_dict()
    except OSError as err:  # a full temp folder, say: the video is saved all the same
        logging.warning("Nox Save Video: no picture can be shown (%s).", err.strerror)
        return {}
