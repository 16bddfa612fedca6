"""Every kind of file: what ffmpeg's own decoder gives back, its tags, and what it cannot hold."""

import json
import math
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

av = pytest.importorskip("av")

from nox_kernels import video_format  # noqa: E402
from nox_kernels.errors import RequestError  # noqa: E402
from nox_kernels.sound import Audio  # noqa: E402
from nox_kernels.video import write_video  # noqa: E402
from nox_kernels.video_format import PRESETS, default_format, find, formats, parse  # noqa: E402

HERE = {
    name
    for name, found in formats().items()
    if found.why_no_picture(crf=18, preset="medium") is None and found.why_no_sound() is None
}
FFV1 = "mkv (FFV1 + FLAC)"
COLOURS = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1.0]])


reads_tags = pytest.mark.skipif(
    not hasattr(av.VideoFrame, "color_primaries"),
    reason="this PyAV (16.0) converts every file by BT.601, whatever its tags say",
)


@pytest.fixture(params=list(formats()))
def kind(request):
    if request.param not in HERE:
        pytest.skip(f"{request.param} does not open on this machine")
    return find(request.param)


def save(folder, kind, frames, audio=None, **values):
    return write_video(folder / f"a{kind.suffix}", frames, audio, video_format=kind, **values)


def solid(level, num_frames=2, height=64, width=64):
    return torch.full((num_frames, height, width, 3), float(level))


def decode(path):
    """[F, H, W, 3] uint8: the conversion of FFmpeg, by the tags of the file."""
    frames = []
    with av.open(path) as container:
        for frame in container.decode(video=0):
            # swscale has a coarse path from more than 8 bits to packed RGB, off by up to 4
            is_deep = frame.format.components[0].bits > 8
            frames.append(frame.to_ndarray(format="gbrp" if is_deep else "rgb24"))
    return np.stack(frames)


def load(path):
    """[F, H, W, 3] float32 in 0..1, as ComfyUI's own loader converts."""
    with av.open(path) as container:
        frames = [frame.to_ndarray(format="gbrpf32le") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames))


def tone(num_channels=2, sample_rate=32000, seconds=1.0):
    time_s = torch.arange(round(seconds * sample_rate)) / sample_rate
    pitches = 200.0 + 100.0 * torch.arange(num_channels)[:, None]
    return Audio(0.5 * torch.sin(2 * math.pi * pitches * time_s), sample_rate)


def decode_sound(path):
    """[C, L] floats of the only audio stream, cut and delayed as the file asks."""
    with av.open(path) as container:
        frames = list(container.decode(audio=0))
        packed = [frame.to_ndarray().astype(np.float64) for frame in frames]
        first = frames[0]
        scale = {"s16": 2**15, "s32": 2**31}.get(first.format.name.rstrip("p"), 1.0)
        if not first.format.is_planar:
            channels = first.layout.nb_channels
            packed = [chunk.reshape(-1, channels).T for chunk in packed]
    return np.concatenate(packed, axis=1) / scale


def clean_clip(num_frames=12, height=256, width=448):
    """Moving gradients without noise, and a hard edge."""
    red = torch.linspace(0, 0.7, width).expand(height, width)
    green = torch.linspace(0, 0.7, height)[:, None].expand(height, width)
    still = torch.stack([red, green, torch.full((height, width), 0.35)], dim=-1)
    frames = still + 0.3 * (torch.arange(num_frames) / num_frames)[:, None, None, None]
    for frame_idx, frame in enumerate(frames):
        frame[64:128, 16 * frame_idx : 16 * frame_idx + 64] = 0.9
    return frames


def psnr(decoded, frames):
    return -10 * math.log10(np.mean((decoded / 255.0 - frames.numpy()) ** 2))


# The menu


def test_the_three_of_everybody_stand_first_and_names_are_for_ever():
    assert list(formats()) == [
        "mp4 (H.264 + AAC)",
        "mp4 (H.265 + AAC)",
        "mkv (FFV1 + FLAC)",
        "mp4 (H.264 4:4:4 + AAC)",
        "mp4 (H.265 10-bit + AAC)",
        "mp4 (H.265 4:4:4 10-bit + AAC)",
        "mp4 (AV1 10-bit + AAC)",
        "mov (ProRes 422 HQ + PCM)",
        "mp4 (H.264 NVENC + AAC)",
        "mp4 (H.265 NVENC + AAC)",
        "mp4 (AV1 NVENC + AAC)",
    ]


def test_the_standard_wheel_writes_all_that_need_no_gpu():
    assert {name for name in formats() if "NVENC" not in name} <= HERE


def test_an_encoder_that_does_not_open_is_named_with_a_way_out():
    kind = default_format()
    broken = replace(kind, video=replace(kind.video, options={"profile": "no such profile"}))
    sentence = broken.why_no_picture(crf=18, preset="medium")
    assert "encoder libx264 does not open" in sentence
    assert "Choose another format." in sentence


@pytest.mark.parametrize("name", [name for name in formats() if "NVENC" in name])
def test_nvenc_is_offered_only_where_it_opens(name):
    sentence = find(name).why_no_picture(crf=18, preset="medium")
    if sentence is None:
        pytest.skip("this machine has it")
    assert "nvenc does not open" in sentence
    assert "NVIDIA GPU" in sentence


def test_an_unknown_format_is_a_sentence():
    with pytest.raises(RequestError, match="choose one of: mp4"):
        find("gif")


def _data():
    file = Path(video_format.__file__).parent / "formats" / "01-mp4-h264.json"
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("suffix"),
        lambda data: data.update(unknown=1),
        lambda data: data.update(plays_on_page="yes"),
        lambda data: data["video"].update(pixel_format="rgb24"),
        lambda data: data["video"].update(min_side="2"),
        lambda data: data["video"]["presets"].pop("medium"),
        lambda data: data["video"].update(options={"profile": 1}),
        lambda data: data["audio"].update(bit_rate=None),
        lambda data: data.pop("audio"),
    ],
)
def test_a_format_file_that_is_none_is_refused(spoil):
    data = _data()
    assert parse(data) == default_format()
    spoil(data)
    with pytest.raises(ValueError, match=r"."):
        parse(data)


# Colours, by ffmpeg's own conversion


def test_greys_come_back_within_two_levels(tmp_path, kind):
    levels = (0, 16, 128, 235, 255)
    for level in levels:
        written = save(tmp_path, kind, solid(level / 255))
        assert np.abs(decode(written.path).astype(int) - level).max() <= 2
        Path(written.path).unlink()


@reads_tags
def test_saturated_bars_come_back_within_two_levels(tmp_path, kind):
    frames = COLOURS.repeat_interleave(64, dim=0).expand(3, 96, 384, 3)
    error = np.abs(decode(save(tmp_path, kind, frames).path) - 255.0 * frames.numpy())
    inside = np.arange(384) % 64
    # the encoder blurs the edge of a bar; its inside is exact
    assert error[:, :, (inside >= 16) & (inside < 48)].max() <= 2
    assert error.mean() <= 2


@reads_tags
def test_colour_tags_read_back_as_written(tmp_path, kind):
    written = save(tmp_path, kind, solid(0.5))
    with av.open(written.path) as container:
        frame = next(container.decode(video=0))
        context = container.streams.video[0].codec_context
        assert frame.format.name == kind.video.pixel_format
        assert [int(t) for t in (frame.color_primaries, frame.color_trc, frame.colorspace)] == [
            1,
            1,
            1,
        ]
        assert int(frame.color_range) == 1
        assert kind.video.tag in ("", context.codec_tag)


@reads_tags
def test_a_clean_clip_keeps_42_db_at_the_defaults(tmp_path, kind):
    frames = clean_clip()
    assert psnr(decode(save(tmp_path, kind, frames).path), frames) >= 42


@reads_tags
@pytest.mark.parametrize("dither", [False, True])
def test_five_rounds_drift_at_most_three_levels(tmp_path, kind, dither):
    first = clean_clip(3, 128, 256)
    current = first
    for round_idx in range(5):
        path = save(tmp_path, kind, current, dither=dither).path
        current = load(path)
        Path(path).rename(tmp_path / f"{round_idx}{kind.suffix}")
    assert 255 * (current - first).abs().mean() <= 3


def test_ffv1_gives_back_every_level_of_8_bits(tmp_path):
    # by an exact conversion: FFmpeg's own to 8 bits is off by one here and there
    frames = torch.randint(0, 256, (2, 65, 33, 3), generator=torch.Generator().manual_seed(0)) / 255
    written = save(tmp_path, find(FFV1), frames)
    with av.open(written.path) as container:
        for frame, given in zip(container.decode(video=0), frames, strict=True):
            planes = [
                np.frombuffer(p, np.uint16).reshape(p.height, -1)[:, : p.width].astype(float)
                for p in frame.planes
            ]
            luma, blue, red = (
                (planes[0] - 64) / 876,
                (planes[1] - 512) / 896,
                (planes[2] - 512) / 896,
            )
            green = luma - 0.187324 * blue - 0.468124 * red
            rgb = np.stack([luma + 1.5748 * red, green, luma + 1.8556 * blue], axis=-1)
            assert (np.rint(255 * rgb) == np.rint(255 * given.numpy())).all()


def test_dither_keeps_the_mean_between_two_levels_and_stands_still(tmp_path):
    kind = default_format()
    between = (178.35 - 16) / 219  # grey whose luma lies between 178 and 179
    for dither, mean in ((False, 178.0), (True, 178.35)):
        path = save(tmp_path, kind, solid(between, 3, 128, 128), crf=1, dither=dither).path
        with av.open(path) as container:
            lumas = [frame.to_ndarray()[:128] for frame in container.decode(video=0)]
        Path(path).unlink()
        assert np.mean(lumas) == pytest.approx(mean, abs=0.05)
        assert np.abs(lumas[0].astype(int) - lumas[2]).max() <= 1


# Sizes


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 2), (33, 65), (48, 80), (1058, 793)])
def test_every_size_is_whole_or_padded_and_named(tmp_path, kind, width, height):
    frames = torch.full((1, height, width, 3), 0.25)
    frames[:, -1] = frames[:, :, -1] = 0.75
    written = save(tmp_path, kind, frames)
    decoded = decode(written.path)[0]
    assert decoded.shape == (written.height, written.width, 3)
    assert written.height >= height
    assert written.width >= width
    padded = (written.height, written.width) != (height, width)
    assert len(written.warnings) == padded
    if padded:
        assert f"{width}x{height}" in written.warnings[0]
        assert f"{written.width}x{written.height}" in written.warnings[0]
    with av.open(written.path) as container:
        ratio = container.streams.video[0].sample_aspect_ratio
        assert ratio in (None, 0, 1)


@pytest.mark.parametrize("name", [FFV1, "mp4 (H.264 4:4:4 + AAC)"])
def test_formats_without_shared_colour_keep_odd_sizes(tmp_path, name):
    written = save(tmp_path, find(name), solid(0.5, 1, 793, 1059))
    assert (written.width, written.height, written.warnings) == (1059, 793, ())


# Time, sound and tags


def test_frames_and_samples_are_all_there(tmp_path, kind):
    audio = tone(seconds=33 / 24)
    written = save(tmp_path, kind, solid(0.5, 33), audio)
    assert len(decode(written.path)) == 33 == written.num_frames
    samples = decode_sound(written.path)
    assert abs(samples.shape[1] - audio.waveform.shape[1]) <= 1024
    overlap = min(samples.shape[1], audio.waveform.shape[1])
    error = np.abs(samples[:, :overlap] - audio.waveform[:, :overlap].numpy())
    assert error[:, 2048:-2048].max() < (0.05 if kind.audio.bit_rate else 1e-4)
    with av.open(written.path) as container:
        assert float(container.streams.video[0].average_rate) == 24


def test_one_frame_is_a_video(tmp_path, kind):
    assert len(decode(save(tmp_path, kind, solid(0.5, 1)).path)) == 1


@pytest.mark.parametrize("num_channels", range(1, 9))
def test_flac_and_pcm_keep_all_channels(tmp_path, num_channels):
    audio = tone(num_channels)
    for name in (FFV1, "mov (ProRes 422 HQ + PCM)"):
        written = save(tmp_path, find(name), solid(0.5, 24), audio)
        samples = decode_sound(written.path)
        assert np.abs(samples - audio.waveform.numpy()).max() < 1e-6
        assert written.warnings == ()


def test_a_rate_that_flac_refuses_is_kept_as_wav(tmp_path):
    audio = tone(sample_rate=2_000_000)
    written = save(tmp_path, find(FFV1), solid(0.5, 24), audio)
    assert len(decode(written.path)) == 24
    assert "the sound is beside it in a.wav" in written.warnings[-1]
    with wave.open(str(tmp_path / "a.wav")) as wav:
        assert (wav.getframerate(), wav.getnframes()) == (2_000_000, 2_000_000)


def test_long_tags_in_any_language_come_back(tmp_path, kind):
    graph = json.dumps({"text": "\u97f3 \u00fc \U0001f3ac" * 20_000}, ensure_ascii=False)
    tags = {"prompt": '{"3": {}}', "workflow": graph, "nox": "[]"}
    written = save(tmp_path, kind, solid(0.5, 24), tone(), metadata=tags)
    with av.open(written.path) as container:
        found = {name.lower(): value for name, value in container.metadata.items()}
    assert {name: found.get(name) for name in tags} == tags


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_taken(tmp_path, kind, preset):
    assert len(decode(save(tmp_path, kind, solid(0.5), preset=preset).path)) == 2


@pytest.mark.parametrize("crf", [0, 0.5, 51])
def test_both_ends_of_crf_are_taken(tmp_path, kind, crf):
    assert len(decode(save(tmp_path, kind, solid(0.5), crf=crf).path)) == 2


@pytest.mark.parametrize(
    "name", ["mp4 (H.264 + AAC)", "mp4 (H.265 + AAC)", "mp4 (H.265 10-bit + AAC)"]
)
def test_colour_samples_are_tagged_where_they_are_taken(tmp_path, name):
    if name not in HERE:
        pytest.skip(f"{name} does not open on this machine")
    path = save(tmp_path, find(name), solid(0.5)).path
    with av.open(path) as file:
        graph = av.filter.Graph()
        source = graph.add_buffer(template=file.streams.video[0])
        source.link_to(shown := graph.add("showinfo"))
        shown.link_to(graph.add("buffersink"))
        graph.configure()
        level = av.logging.get_level()
        av.logging.set_level(av.logging.INFO)
        try:
            with av.logging.Capture() as lines:
                graph.push(next(file.decode(video=0)))
                graph.pull()
        finally:
            av.logging.set_level(level)
    assert any("cl:center" in line for _, _, line in lines)
