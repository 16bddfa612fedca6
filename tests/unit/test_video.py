"""The video writer: colours, sizes, sound, tags, and what happens when writing fails."""

import json
import math
import os
import signal
import subprocess
import sys
import wave
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

av = pytest.importorskip("av")

from nox_kernels.errors import NoxError, RequestError  # noqa: E402
from nox_kernels.sound import Audio  # noqa: E402
from nox_kernels.video import NameTakenError, write_video  # noqa: E402
from nox_kernels.video_format import default_format, find  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
COLOURS = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1.0]])


def solid(level, num_frames=2, height=64, width=64):
    return torch.full((num_frames, height, width, 3), float(level))


def tone(num_channels=2, sample_rate=32000, seconds=1.0, frequency=200.0):
    time_s = torch.arange(round(seconds * sample_rate)) / sample_rate
    pitches = frequency + 100.0 * torch.arange(num_channels)[:, None]
    return Audio(0.5 * torch.sin(2 * math.pi * pitches * time_s), sample_rate)


def decode_planes(path):
    """Y, U, V of every frame as float arrays, without any colour conversion."""
    planes = []
    with av.open(path) as container:
        for frame in container.decode(video=0):
            assert frame.format.name == "yuv420p"
            flat = frame.to_ndarray().reshape(-1).astype(np.float64)
            height, width = frame.height, frame.width
            y, u, v = np.split(flat, [height * width, height * width * 5 // 4])
            half = (height // 2, width // 2)
            planes.append((y.reshape(height, width), u.reshape(half), v.reshape(half)))
    return planes


def decode_rgb(path):
    """[F, H, W, 3] in 0..255 by the limited-range BT.709 equations, written out here."""
    frames = []
    for y, u, v in decode_planes(path):
        luma = (y - 16) / 219
        blue, red = ((c.repeat(2, 0).repeat(2, 1) - 128) / 224 for c in (u, v))
        green = luma - 0.187324 * blue - 0.468124 * red
        rgb = np.stack([luma + 1.5748 * red, green, luma + 1.8556 * blue], axis=-1)
        frames.append(255 * rgb.clip(0, 1))
    return np.stack(frames)


def decode_sound(path):
    """[C, L] samples and the rate, or None without an audio stream."""
    with av.open(path) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        samples = np.concatenate([f.to_ndarray() for f in container.decode(stream)], axis=1)
        return samples, stream.codec_context.sample_rate


def pitch(samples, sample_rate):
    middle = samples[len(samples) // 8 : -len(samples) // 8]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    return spectrum.argmax() * sample_rate / len(middle)


# Colours


@pytest.mark.parametrize("level", [0, 16, 128, 178.5, 235, 255])
def test_a_solid_grey_comes_back_within_two_levels(tmp_path, level):
    written = write_video(tmp_path / "a.mp4", solid(level / 255))
    assert np.abs(decode_rgb(written.path) - level).mean() <= 2


def test_black_and_white_fill_exactly_the_limited_range(tmp_path):
    frames = torch.cat([solid(0.0, width=32), solid(1.0, width=32)], dim=2)
    (y, u, v), *_ = decode_planes(write_video(tmp_path / "a.mp4", frames).path)
    assert abs(y[:, 4:28] - 16).max() <= 1
    assert abs(y[:, 36:60] - 235).max() <= 1
    assert max(abs(u - 128).max(), abs(v - 128).max()) <= 1


def test_saturated_bars_come_back_within_two_levels(tmp_path):
    frames = COLOURS.repeat_interleave(32, dim=0).expand(3, 96, 192, 3)
    decoded = decode_rgb(write_video(tmp_path / "a.mp4", frames).path)
    assert np.abs(decoded - 255 * frames.numpy()).mean() <= 2


def test_all_four_colour_tags_say_limited_bt709(tmp_path):
    written = write_video(tmp_path / "a.mp4", solid(0.5))
    with av.open(written.path) as container:
        context = container.streams.video[0].codec_context
        tags = (context.color_primaries, context.color_trc, context.colorspace)
        assert [int(tag) for tag in tags] == [1, 1, 1]
        assert int(context.color_range) == 1


def change_in_five_rounds(folder, frames):
    """[F, H, W, 3], in levels."""
    current = frames
    for round_idx in range(5):
        path = write_video(folder / f"{round_idx}.mp4", current).path
        current = torch.from_numpy(decode_rgb(path) / 255).float()
    return 255 * (current - frames).abs()


@pytest.mark.parametrize("level", [0, 16, 128, 235, 255])
def test_five_rounds_of_saving_move_a_solid_at_most_three_levels(tmp_path, level):
    assert change_in_five_rounds(tmp_path, solid(level / 255)).max() <= 3


def test_five_rounds_of_saving_move_bars_at_most_three_levels(tmp_path):
    frames = COLOURS.repeat_interleave(32, dim=0).expand(3, 96, 192, 3)
    change = change_in_five_rounds(tmp_path, frames).unflatten(2, (-1, 32))
    assert change[:, :, :, 8:-8].max() <= 3  # inside each bar: edges blur


def test_five_rounds_of_saving_move_a_steep_gradient_three_levels_in_the_mean(tmp_path):
    rows = torch.linspace(0.1, 0.9, 64)
    frames = torch.stack(
        [rows.expand(64, 64), rows[:, None].expand(64, 64), 1 - rows.expand(64, 64)]
    )
    frames = frames.permute(1, 2, 0).expand(3, 64, 64, 3)
    assert change_in_five_rounds(tmp_path, frames).mean() <= 3


def test_a_colour_sample_is_the_mean_of_its_four_pixels(tmp_path):
    frames = torch.zeros(1, 64, 64, 3)
    frames[:, 0::2, :, 0] = 1.0  # red lines on black: V of a line or the other is 240 or 128
    (_, _, v), *_ = decode_planes(write_video(tmp_path / "a.mp4", frames, crf=1).path)
    assert abs(v[8:-8, 8:-8] - 184).max() <= 4


def test_a_clean_gradient_keeps_42_db_at_the_default_quality(tmp_path):
    height, width, num_frames = 256, 448, 24
    red = torch.linspace(0, 0.7, width).expand(height, width)
    green = torch.linspace(0, 0.7, height)[:, None].expand(height, width)
    still = torch.stack([red, green, torch.full((height, width), 0.35)], dim=-1)
    fade = 0.3 * torch.arange(num_frames) / num_frames
    frames = still + fade[:, None, None, None]
    decoded = decode_rgb(write_video(tmp_path / "a.mp4", frames).path) / 255
    assert -10 * math.log10(np.mean((decoded - frames.numpy()) ** 2)) >= 42


def test_levels_are_rounded_and_not_truncated(tmp_path):
    # 127.7 truncated is 127, rounded 128: one step of luma apart at crf 0.
    low = write_video(tmp_path / "low.mp4", solid(127.7 / 255), crf=0).path
    high = write_video(tmp_path / "high.mp4", solid(128 / 255), crf=0).path
    assert decode_planes(low)[0][0].mean() == decode_planes(high)[0][0].mean()


def test_pixels_beyond_the_range_saturate(tmp_path):
    frames = torch.cat([solid(-3.0, width=32), solid(7.0, width=32)], dim=2)
    decoded = decode_rgb(write_video(tmp_path / "a.mp4", frames).path)
    assert decoded[:, :, 4:28].max() <= 2
    assert decoded[:, :, 36:60].min() >= 253


def test_invalid_pixels_become_black_and_are_counted_by_frame(tmp_path):
    frames = solid(1.0, num_frames=3)
    frames[1] = float("nan")
    frames[2, :, :, 1] = float("inf")
    written = write_video(tmp_path / "a.mp4", frames)
    decoded = decode_rgb(written.path)
    assert decoded[0].min() > 250
    assert decoded[1].max() < 5
    assert decoded[2, ..., 1].max() < 5
    assert written.warnings[0].startswith("2 of 3 frames")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_taken(tmp_path, dtype):
    written = write_video(tmp_path / "a.mp4", solid(0.5).to(dtype))
    assert np.abs(decode_rgb(written.path) - 127.5).mean() <= 2


def test_alpha_is_left_out(tmp_path):
    frames = torch.cat([solid(0.5), torch.zeros(2, 64, 64, 1)], dim=-1)
    assert np.abs(decode_rgb(write_video(tmp_path / "a.mp4", frames).path) - 127.5).mean() <= 2


# Sizes and time


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (2, 2), (1, 200), (33, 65), (65, 34), (1058, 793)]
)
def test_every_size_gives_a_file_of_the_next_even_size(tmp_path, width, height):
    written = write_video(tmp_path / "a.mp4", solid(0.5, 1, height, width))
    y, *_ = decode_planes(written.path)[0]
    assert y.shape == (height + height % 2, width + width % 2) == (written.height, written.width)
    is_odd = width % 2 or height % 2
    assert len(written.warnings) == (1 if is_odd else 0)
    if is_odd:
        assert f"{width}x{height}" in written.warnings[0]
        assert f"{written.width}x{written.height}" in written.warnings[0]


def test_padding_repeats_the_edge(tmp_path):
    frames = solid(0.0, height=33, width=65)
    frames[:, 32:] = 1.0
    written = write_video(tmp_path / "a.mp4", frames, crf=0)
    (y, *_), *_ = decode_planes(written.path)
    assert y[33].min() > 225  # the row that was added
    assert y[:30, 65].max() < 25  # the column that was added


def test_one_frame_lasts_one_frame(tmp_path):
    written = write_video(tmp_path / "a.mp4", solid(0.5, 1))
    with av.open(written.path) as container:
        stream = container.streams.video[0]
        assert stream.duration * stream.time_base == Fraction(1, 24)
        assert (stream.frames, written.num_frames) == (1, 1)


@pytest.mark.parametrize("fps", [0.01, 1 / 3, 8, 23.976, Fraction(30000, 1001), 60, 1000, 10000])
def test_the_frame_rate_is_kept(tmp_path, fps):
    written = write_video(tmp_path / "a.mp4", solid(0.5, 5), fps=fps)
    with av.open(written.path) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == pytest.approx(float(fps), rel=1e-5)
        assert float(stream.duration * stream.time_base * fps) == pytest.approx(5, rel=1e-3)


def test_a_lower_crf_is_closer_to_the_frames(tmp_path):
    frames = torch.rand(4, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    error = {}
    for crf in (0, 18, 51):
        path = write_video(tmp_path / f"{crf}.mp4", frames, crf=crf).path
        error[crf] = np.abs(decode_rgb(path) - 255 * frames.numpy()).mean()
    assert error[0] < error[18] < error[51]


def test_crf_zero_stays_in_a_profile_that_browsers_play(tmp_path):
    written = write_video(tmp_path / "a.mp4", solid(0.5), crf=0)
    with av.open(written.path) as container:
        assert container.streams.video[0].profile == "High"


def test_progress_counts_every_frame(tmp_path):
    seen = []
    write_video(tmp_path / "a.mp4", solid(0.5, 3), progress=lambda *step: seen.append(step))
    assert seen == [(1, 3), (2, 3), (3, 3)]


# Sound


def test_no_sound_means_no_audio_stream(tmp_path):
    written = write_video(tmp_path / "a.mp4", solid(0.5))
    assert decode_sound(written.path) is None
    assert written.warnings == ()


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (Audio(torch.zeros(2, 0), 32000), "is empty (0 samples)"),
        (Audio(torch.zeros(1, 2, 0), 32000), "is empty (0 samples)"),
        (Audio(torch.zeros(1, 1, 2, 9), 32000), "[1, 1, 2, 9] at 32000 Hz"),
        (Audio(torch.zeros(2, 9), 0), "[2, 9] at 0 Hz"),
        (Audio(torch.zeros(2, 9), float("nan")), "[2, 9] at nan Hz"),
        (Audio(torch.zeros(2, 9), None), "no waveform with a sample rate"),
        (Audio(None, 32000), "no waveform with a sample rate"),
    ],
)
def test_sound_that_no_file_can_hold_does_not_cost_the_picture(tmp_path, audio, words):
    written = write_video(tmp_path / "a.mp4", solid(0.5), audio)
    assert decode_sound(written.path) is None
    (warning,) = written.warnings
    assert warning.startswith("The video was saved without sound: ")
    assert words in warning


def test_whole_numbers_are_samples_of_full_scale(tmp_path):
    sound = tone(1)
    levels = (sound.waveform * 32767).to(torch.int16)
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), Audio(levels, 32000))
    assert written.warnings == ()
    samples, _ = decode_sound(written.path)
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("num_channels", range(1, 10))
def test_channels_arrive_in_order(tmp_path, num_channels):
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), tone(num_channels))
    samples, sample_rate = decode_sound(written.path)
    mixed = num_channels > 6
    assert len(samples) == (2 if mixed else num_channels)
    assert len(written.warnings) == mixed
    for channel_idx, channel in enumerate(samples):
        if channel_idx == 3 and num_channels == 6:
            continue  # the bass channel of 5.1 is cut at 120 Hz
        assert pitch(channel, sample_rate) == pytest.approx(200 + 100 * channel_idx, abs=3)


@pytest.mark.parametrize(
    ("sample_rate", "stored_rate"),
    [(44100, 44100), (32000, 32000), (11025, 11025), (96000, 96000), (22050, 22050),
     (31999, 32000), (192000, 96000), (1000, 7350)],
)  # fmt: skip
def test_every_sample_rate_plays_at_its_pitch(tmp_path, sample_rate, stored_rate):
    audio = tone(sample_rate=sample_rate)
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), audio)
    samples, rate = decode_sound(written.path)
    assert rate == stored_rate
    assert pitch(samples[0], rate) == pytest.approx(200, abs=3)
    with av.open(written.path) as container:
        stream = container.streams.audio[0]
        assert float(stream.duration * stream.time_base) == pytest.approx(1, abs=0.01)
    assert written.warnings == ()


def test_sound_starts_with_the_picture(tmp_path):
    waveform = torch.zeros(1, 32000)
    waveform[0, 16000:] = tone(1).waveform[0, 16000:]
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), Audio(waveform, 32000))
    samples, _ = decode_sound(written.path)
    onset = int(np.argmax(np.abs(samples[0]) > 0.1))
    assert abs(onset - 16000) <= 64 + 1024  # the encoder may smear one frame of 1024


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w[0, 100:101].fill_(float("nan")), ["1 of 64000", "invalid"]),
        (lambda w: w.fill_(float("nan")), ["64000 of 64000", "silent"]),
        (lambda w: w[1, 5:7].fill_(float("inf")), ["2 of 64000", "invalid"]),
        (lambda w: w[1, 5:8].fill_(-float("inf")), ["3 of 64000", "invalid"]),
        (lambda w: w.mul_(100.0), ["louder than full scale", "peak 50"]),
        (lambda w: w.fill_(-1.0), ["silent", "stay at -1, -1"]),
        (lambda w: w.fill_(0.0), ["silent", "stay at 0, 0"]),
    ],
)
def test_spoilt_sound_is_repaired_named_and_playable(tmp_path, spoil, words):
    audio = tone()
    spoil(audio.waveform)
    given = audio.waveform.clone()
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), audio)
    samples, _ = decode_sound(written.path)
    assert np.isfinite(samples).all()
    assert np.abs(samples).max() < 2
    for word in words:
        assert word in " ".join(written.warnings)
    torch.testing.assert_close(audio.waveform, given, equal_nan=True)  # the caller's is untouched


def test_good_sound_gets_no_warning(tmp_path):
    audio = Audio(tone().waveform[None], 32000)  # a batch of one, as ComfyUI hands it
    assert write_video(tmp_path / "a.mp4", solid(0.5, 24), audio).warnings == ()


@pytest.mark.parametrize("num_channels", [1, 2, 6])
@pytest.mark.parametrize("num_samples", [1, 7999, 8000, 8001, 16001])
def test_any_number_of_samples_is_saved(tmp_path, num_channels, num_samples):
    # sound goes to the encoder second by second: the last one may be a single sample
    waveform = torch.rand(num_channels, num_samples) - 0.5
    written = write_video(tmp_path / "clip.mp4", solid(0.5), Audio(waveform, 8000), fps=24)
    assert not [warning for warning in written.warnings if "encoder" in warning]
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert len(container.streams.audio) == 1


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_length_mismatch_is_named_and_nothing_is_cut(tmp_path, seconds):
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), tone(seconds=seconds))
    assert f"{seconds:.2f} s" in written.warnings[0]
    assert "1.00 s" in written.warnings[0]
    samples, rate = decode_sound(written.path)
    assert samples.shape[1] >= seconds * rate
    assert len(decode_planes(written.path)) == 24


def test_a_small_length_mismatch_is_not_named(tmp_path):
    assert write_video(tmp_path / "a.mp4", solid(0.5, 24), tone(seconds=1.09)).warnings == ()


def test_sound_is_kept_as_wav_when_its_encoder_fails(tmp_path):
    no_sound = replace(default_format().audio, encoder="no such encoder")
    (tmp_path / "a.wav").write_bytes(b"somebody's")
    audio = tone()
    written = write_video(
        tmp_path / "a.mp4",
        solid(0.5, 24),
        audio,
        video_format=replace(default_format(), audio=no_sound),
    )
    assert len(decode_planes(written.path)) == 24
    assert decode_sound(written.path) is None
    assert (tmp_path / "a.wav").read_bytes() == b"somebody's"
    assert "a_2.wav" in written.warnings[-1]
    with wave.open(str(tmp_path / "a_2.wav")) as wav:
        assert (wav.getnchannels(), wav.getframerate(), wav.getnframes()) == (2, 32000, 32000)
        levels = np.frombuffer(wav.readframes(32000), "<i2").reshape(-1, 2).T
    assert np.abs(levels / 32767 - audio.waveform.numpy()).max() < 1e-4


# Tags


def test_tags_come_back_as_written_beside_sound(tmp_path):
    words = "\u97f3\u697d \u00fcber \U0001f3ac "
    graph = json.dumps({"nodes": [words * 9000]}, ensure_ascii=False)
    assert len(graph.encode()) > 150_000
    tags = {"prompt": '{"3": {"seed": 1}}', "workflow": graph, "nox": "[]"}
    escaped = json.dumps({"nodes": [words * 9000]})
    assert len(escaped) > 300_000
    tags["escaped"] = escaped
    written = write_video(tmp_path / "a.mp4", solid(0.5, 24), tone(), metadata=tags)
    with av.open(written.path) as container:
        assert {name: container.metadata.get(name) for name in tags} == tags


def test_tags_stand_before_the_picture_data(tmp_path):
    written = write_video(tmp_path / "a.mp4", solid(0.5), metadata={"workflow": "needle"})
    data = Path(written.path).read_bytes()
    assert data.index(b"moov") < data.index(b"needle") < data.index(b"mdat")


# Files


def test_an_existing_file_is_never_touched(tmp_path):
    target = tmp_path / "a.mp4"
    target.write_bytes(b"precious")
    with pytest.raises(NameTakenError):
        write_video(target, solid(0.5), progress=lambda *_: pytest.fail("encoded for nothing"))
    assert target.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_a_file_that_appears_while_encoding_is_never_touched(tmp_path):
    target = tmp_path / "a.mp4"
    with pytest.raises(NameTakenError):
        write_video(target, solid(0.5), progress=lambda *_: target.write_bytes(b"precious"))
    assert target.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_sound_and_picture_lie_side_by_side_in_the_file(tmp_path):
    path = write_video(tmp_path / "a.mp4", solid(0.5, 96), tone(seconds=4)).path
    with av.open(path) as container:
        order = [
            (float(packet.pts * packet.time_base), packet.stream.type, packet.pos)
            for packet in container.demux()
            if packet.pts is not None
        ]
    heard = 0.0
    for time_s, kind, _ in sorted(order, key=lambda packet: packet[2]):
        if kind == "audio":
            heard = time_s
        else:  # a player that reads on must not wait for the end of the file
            assert time_s - heard < 1.5


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace_file = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("flush"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace_file(*names)))
    write_video(tmp_path / "a.mp4", solid(0.5))
    assert done[:2] == ["flush", "name"]


def test_a_finished_video_is_the_only_file(tmp_path):
    write_video(tmp_path / "a.mp4", solid(0.5, 24), tone())
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_a_cancelled_video_leaves_nothing(tmp_path):
    def cancel(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video(tmp_path / "a.mp4", solid(0.5, 3), tone(), progress=cancel)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(NoxError, match="does not exist"):
        write_video(tmp_path / "nowhere" / "a.mp4", solid(0.5))


@pytest.mark.parametrize(
    ("kind", "fps", "width", "words"),
    [
        ("mp4 (AV1 10-bit + AAC)", 300, 64, "cannot hold 64x64 pixels at 300 frames a second"),
        ("mp4 (H.264 + AAC)", 24, 16386, "cannot hold 16386x64 pixels at 24 frames a second"),
    ],
)
def test_what_an_encoder_cannot_hold_is_named_and_leaves_nothing(tmp_path, kind, fps, width, words):
    frames = solid(0.5, width=64).expand(2, 64, 64, 3).repeat(1, 1, width // 64 + 1, 1)
    with pytest.raises(NoxError, match=words):
        write_video(tmp_path / "a.mp4", frames[:, :, :width], fps=fps, video_format=find(kind))
    assert os.listdir(tmp_path) == []


def test_a_missing_encoder_is_one_sentence(tmp_path):
    no_picture = replace(default_format().video, encoder="no such encoder")
    with pytest.raises(NoxError, match="built without the encoder no such encoder"):
        write_video(
            tmp_path / "a.mp4",
            solid(0.5),
            video_format=replace(default_format(), video=no_picture),
        )
    assert os.listdir(tmp_path) == []


def test_an_unknown_preset_is_a_sentence_and_leaves_nothing(tmp_path):
    with pytest.raises(RequestError, match=r"none of ultrafast, .* veryslow"):
        write_video(tmp_path / "a.mp4", solid(0.5), preset="no such preset")
    assert os.listdir(tmp_path) == []


_FULL_DISK = """
import json, os, resource, signal, sys, torch
from nox_kernels.errors import NoxError
from nox_kernels.sound import Audio
from nox_kernels.video import write_video
folder = sys.argv[1]
seeded = torch.Generator().manual_seed(0)
frames = torch.rand(12, 128, 128, 3, generator=seeded)
audio = Audio(0.3 * torch.randn(2, 16000, generator=seeded), 32000)
size_bytes = os.path.getsize(write_video(folder + "/whole.mp4", frames, audio).path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
outcomes = []
for share in (0.0, 0.3, 0.95):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size_bytes), hard_limit))
    try:
        write_video(folder + "/part.mp4", frames, audio)
        sentence = "written"
    except NoxError as err:
        sentence = str(err)
    outcomes.append([share, sentence, sorted(os.listdir(folder))])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
write_video(folder + "/next.mp4", frames, audio)
print(json.dumps(outcomes))
"""


def run_python(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a POSIX file size limit")
def test_a_disk_that_fills_up_leaves_no_half_file_and_the_next_video_works(tmp_path):
    for _, sentence, files in run_python(_FULL_DISK, str(tmp_path)):
        assert "could not be saved" in sentence
        assert "larger than the file system allows" in sentence
        assert files == ["whole.mp4"]
    assert len(decode_planes(tmp_path / "next.mp4")) == 12


_LONG_CLIP = """
import json, resource, sys, torch
from nox_kernels.video import write_video
needs_av = "av" in sys.modules
frame = torch.linspace(0, 1, 256).expand(1, 3, 256, 256).permute(0, 2, 3, 1)
def peak_bytes(name, num_frames):
    frames = frame.expand(num_frames, -1, -1, -1)
    write_video(sys.argv[1] + name, frames, preset="ultrafast")
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
growth_bytes = -peak_bytes("/short.mp4", 60) + peak_bytes("/long.mp4", 660)
print(json.dumps({"needs_av": needs_av, "growth_bytes": growth_bytes}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
def test_memory_does_not_grow_with_the_number_of_frames_nor_does_the_import_need_av(tmp_path):
    found = run_python(_LONG_CLIP, str(tmp_path))
    assert found["growth_bytes"] < 30e6  # 600 more frames: 118 MB as uint8, 470 MB as float
    assert not found["needs_av"]


def test_sound_too_short_for_its_encoder_is_kept_as_wav(tmp_path):
    short = Audio(torch.tensor([[0.5]]), 1)
    written = write_video(tmp_path / "a.mp4", solid(0.5), short)
    assert decode_sound(written.path) is None
    assert "it made nothing of so little sound" in written.warnings[-1]
    with wave.open(str(tmp_path / "a.wav")) as kept:
        assert (kept.getnframes(), kept.getframerate()) == (1, 1)


# Requests that cannot be


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(0, 8, 8, 3),
        torch.zeros(8, 8, 3),
        torch.zeros(1, 8, 8, 1),
        torch.zeros(1, 0, 8, 3),
        torch.zeros(1, 8, 8, 3, dtype=torch.uint8),
        None,
    ],
)
def test_frames_that_are_no_frames_are_refused(tmp_path, frames):
    with pytest.raises(RequestError):
        write_video(tmp_path / "a.mp4", frames)


@pytest.mark.parametrize(
    "numbers",
    [{"fps": 0}, {"fps": -1}, {"fps": float("nan")}, {"fps": float("inf")}, {"crf": 52},
     {"crf": -1}, {"crf": float("nan")}],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(tmp_path, numbers):
    with pytest.raises(RequestError):
        write_video(tmp_path / "a.mp4", solid(0.5), **numbers)
    assert os.listdir(tmp_path) == []
