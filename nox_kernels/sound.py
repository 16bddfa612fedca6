"""Sound: checks and cleans the sound of a clip, and encodes it."""

from __future__ import annotations

import contextlib
import numbers
import os
import struct
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from .video_format import AudioFormat

# Channel order of a waveform without a label.
_LAYOUTS = {1: "mono", 2: "stereo", 3: "3.0", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
# More than 6 channels are mixed in AAC: it has no standard layout for them, and PyAV (16.0, 18.1)
# crashes the process that decodes 8 planar channels, ComfyUI's loader included.
_MIN_CHANGE = 1e-5  # from the lowest to the highest sample of a channel; full scale is 1
_NO_SOUND = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
_MAX_RATE = 1 << 24  # Hz; the header of a WAV counts bytes a second in 32 bits


@dataclass(frozen=True, eq=False)
class Audio:
    """Sound of a clip: waveform [C, L] or [1, C, L], any float dtype, nominally in -1..1."""

    waveform: Tensor
    sample_rate: int  # Hz


@dataclass(frozen=True, eq=False)
class Sound:
    """The audio half of a file, checked and cleaned."""

    samples: np.ndarray  # [C, L] float32 in -1..1
    sample_rate: int  # Hz

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.samples.shape[1] / self.sample_rate


class SoundError(Exception):
    """The audio encoder gave up; carries its message and the sound."""

    def __init__(self, message: str, sound: Sound):
        super().__init__(message)
        self.sound = sound


def clean_sound(
    audio: Audio | None, audio_format: AudioFormat, warnings: list[str]
) -> Sound | None:
    """Finite samples in -1..1; None where there is nothing to save. Adds a sentence per repair.

    Sound that no file can hold is left out with a sentence: the picture was long work.
    """
    if audio is None:
        return None
    fault = _why_not(audio)
    if fault is not None:
        warnings.append(f"The video was saved without sound: {fault}.")
        return None
    waveform = audio.waveform.detach()
    sample_rate = round(audio.sample_rate)
    if not waveform.is_floating_point():  # samples of a WAV file as they lie there
        waveform = waveform.float() / torch.iinfo(waveform.dtype).max
    if waveform.ndim == 3:
        if len(waveform) > 1:
            warnings.append(f"Of {len(waveform)} sound tracks in the batch the first was saved.")
        waveform = waveform[0]
    samples = np.array(waveform.float().cpu().numpy(), ndmin=2)  # a copy: the caller's stays
    if len(samples) not in _LAYOUTS:
        warnings.append(f"Of {len(samples)} sound channels the first two were saved.")
        samples = samples[:2]
    elif len(samples) > audio_format.max_channels:
        warnings.append(f"The {len(samples)} sound channels were mixed to stereo.")

    finite = np.isfinite(samples)
    num_invalid = samples.size - int(np.count_nonzero(finite))
    if num_invalid:
        warnings.append(
            f"{num_invalid} of {samples.size} sound samples are invalid (NaN or infinite); "
            "they were replaced by silence."
        )
        samples[~finite] = 0.0
    num_loud = int(np.count_nonzero(np.abs(samples) > 1.0))
    if num_loud:
        warnings.append(
            f"{num_loud} of {samples.size} sound samples are louder than full scale "
            f"(peak {np.abs(samples).max():.3g}); they were cut to full scale and may crackle."
        )
        np.clip(samples, -1.0, 1.0, out=samples)
    if np.ptp(samples, axis=1).max() < _MIN_CHANGE:
        values = ", ".join(f"{channel[0]:.3g}" for channel in samples)
        warnings.append(
            f"The sound is silent: no channel changes (they stay at {values}). "
            "If you expected sound, the audio decoder returned nothing useful."
        )
    return Sound(np.ascontiguousarray(samples), sample_rate)


def _why_not(audio: Audio) -> str | None:
    """What keeps a sound from being saved, as half a sentence."""
    waveform, rate = audio.waveform, audio.sample_rate
    if not isinstance(waveform, Tensor) or not isinstance(rate, numbers.Real):
        return "what is connected holds no waveform with a sample rate"
    if waveform.numel() == 0:
        return "the connected sound is empty (0 samples)"
    if waveform.ndim not in (1, 2, 3) or not 1 <= rate < _MAX_RATE or waveform.dtype in _NO_SOUND:
        return (
            "it must be a waveform [channels, samples] with a positive sample rate, and has shape "
            f"{list(waveform.shape)} at {rate} Hz"
        )
    return None


def encode_sound(container, sound: Sound, audio_format: AudioFormat) -> Iterator:
    """Packets of the whole sound, in order; SoundError where the encoder refuses."""
    import av

    layout = _LAYOUTS[len(sound.samples)]
    num_packets = 0
    is_mixed = len(sound.samples) > audio_format.max_channels
    try:
        rates = av.codec.Codec(audio_format.encoder, "w").audio_rates or [sound.sample_rate]
        # The stream resamples and mixes by itself what differs from its own rate and layout.
        stream = container.add_stream(
            audio_format.encoder,
            rate=min(rates, key=lambda rate: (abs(rate - sound.sample_rate), -rate)),
            layout="stereo" if is_mixed else layout,
        )
        stream.format = audio_format.sample_format
        if audio_format.bit_rate:
            stream.bit_rate = audio_format.bit_rate
        for start in range(0, sound.samples.shape[1], sound.sample_rate):  # a second at a time
            second = sound.samples[:, start : start + sound.sample_rate].T
            second = np.ascontiguousarray(second).reshape(1, -1)
            # Interleaved: PyAV cannot fill a planar frame of 8 channels either.
            chunk = av.AudioFrame.from_ndarray(second, format="flt", layout=layout)
            chunk.sample_rate = sound.sample_rate
            chunk.time_base = Fraction(1, sound.sample_rate)
            chunk.pts = start
            for packet in stream.encode(chunk):
                num_packets += 1
                yield packet
        for packet in stream.encode(None):
            num_packets += 1
            yield packet
        if num_packets == 0:  # one sample at 10 Hz, resampled, say
            raise SoundError("it made nothing of so little sound", sound)
    except (av.error.FFmpegError, ValueError) as err:
        raise SoundError(str(err), sound) from err


def rescue_sound(target: str, sound: Sound, reason: str) -> str:
    """Keep the sound as 16-bit WAV beside the video; returns the sentence that says so."""
    stem = os.path.splitext(target)[0]
    names = (f"{stem}{suffix}.wav" for suffix in ("", *(f"_{n}" for n in range(2, 1000))))
    wav_path = next(name for name in names if not os.path.lexists(name))
    levels = np.rint(sound.samples.T * 32767.0).astype("<i2")  # [L, C], interleaved
    try:
        with open(wav_path, "xb") as file, wave.open(file, "wb") as wav:
            wav.setnchannels(levels.shape[1])
            wav.setsampwidth(2)
            wav.setframerate(sound.sample_rate)
            wav.writeframes(levels.tobytes())
    except (OSError, struct.error) as err:  # struct.error: more than the 4 GB that a WAV can count
        with contextlib.suppress(OSError):
            os.unlink(wav_path)
        return (
            f"The video was saved without sound: the audio encoder failed ({reason}) and so did "
            f"a WAV file beside it ({getattr(err, 'strerror', None) or 'it would be too large'})."
        )
    return (
        f"The video was saved without sound because the audio encoder failed ({reason}); the sound "
        f"is beside it in {os.path.basename(wav_path)}."
    )
