"""Time and extra memory of saving one long clip: Nox beside ComfyUI's own saver, same settings.

Linux only (peak memory is read from /proc). It fails where the bars are missed: 300 MB on top of
frames that take none (--moving ones do), and 1.2 of core's time. Run it with the Python of
ComfyUI's environment:

    COMFYUI/venv/bin/python tests/bench/bench_save_video.py --comfyui COMFYUI [--frames 481]
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from host_memory import memory_bytes, reset_peak

ROOT = Path(__file__).resolve().parents[2]
HEIGHT, WIDTH, FPS, CRF, SAMPLE_RATE = 1088, 1920, 24, 18, 32000
MIB = 1 << 20
MAX_EXTRA_BYTES, MAX_SHARE = 300_000_000, 1.2


def clip(num_frames: int, num_moving: int) -> torch.Tensor:
    """[F, H, W, 3]: one frame expanded with stride 0, or that many frames that move and differ."""
    generator = torch.Generator().manual_seed(0)
    row = torch.linspace(0, 1, WIDTH)
    column = torch.linspace(0, 1, HEIGHT)[:, None]
    still = torch.stack([row.expand(HEIGHT, -1), column.expand(-1, WIDTH), row * column], dim=-1)
    still += 0.02 * torch.randn(HEIGHT, WIDTH, 3, generator=generator)
    still.clamp_(0, 1)
    if num_moving:
        return torch.stack([still.roll(7 * frame_idx, dims=1) for frame_idx in range(num_moving)])
    return still.expand(num_frames, -1, -1, -1)


def tone(num_frames: int) -> torch.Tensor:
    """[1, 2, L]"""
    time_s = torch.arange(round(num_frames / FPS * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.3 * torch.sin(2 * math.pi * 440 * time_s)).expand(1, 2, -1).contiguous()


def save_by_nox(path: str, frames: torch.Tensor, waveform: torch.Tensor) -> None:
    """As Nox Save Video does by default."""
    from nox_kernels.sound import Audio
    from nox_kernels.video import write_video

    write_video(path, frames, Audio(waveform, SAMPLE_RATE), fps=FPS, crf=CRF)


def save_by_core(path: str, frames: torch.Tensor, waveform: torch.Tensor) -> None:
    """As Save Video of ComfyUI does with the same encoder, crf and preset."""
    from comfy_api.latest._input_impl.video_types import VideoFromComponents
    from comfy_api.latest._util.video_types import VideoCodec, VideoComponents, VideoContainer

    audio = {"waveform": waveform, "sample_rate": SAMPLE_RATE}
    video = VideoFromComponents(VideoComponents(images=frames, audio=audio, frame_rate=FPS))
    video.save_to(path, format=VideoContainer.MP4, codec=VideoCodec.H264, crf=CRF)


SAVERS = {"core": save_by_core, "nox": save_by_nox}


def measure(saver: str, comfyui: str, num_frames: int, num_moving: int) -> dict:
    """One save in this process, after a short one that loads what it needs."""
    sys.path[:0] = [str(ROOT)] if saver == "nox" else [comfyui]
    frames = clip(num_frames, num_moving)
    waveform = tone(len(frames))
    with tempfile.TemporaryDirectory() as folder:
        SAVERS[saver](f"{folder}/warm.mp4", frames[:2, :64, :64], waveform[..., :2000])
        reset_peak()
        before = memory_bytes("VmRSS")
        start = time.perf_counter()
        SAVERS[saver](f"{folder}/clip.mp4", frames, waveform)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "extra_mib": (memory_bytes("VmHWM") - before) / MIB,
            "file_mib": Path(folder, "clip.mp4").stat().st_size / MIB,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", required=True, help="folder of ComfyUI")
    parser.add_argument("--frames", type=int, default=481, help="of one picture, expanded")
    parser.add_argument("--moving", type=int, default=0, help="frames that move, instead")
    parser.add_argument("--rounds", type=int, default=2, help="of each saver, in turns")
    parser.add_argument("--saver", choices=SAVERS, help=argparse.SUPPRESS)  # the child's part
    asked = parser.parse_args()
    if asked.saver:
        print(json.dumps(measure(asked.saver, asked.comfyui, asked.frames, asked.moving)))
        return
    found: dict[str, list[dict]] = {saver: [] for saver in SAVERS}
    for _ in range(asked.rounds):
        for saver in SAVERS:
            command = [sys.executable, *sys.argv, "--saver", saver]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[saver].append(json.loads(done.stdout.splitlines()[-1]))
    num_frames = asked.moving or asked.frames
    print(f"{num_frames} frames of {WIDTH}x{HEIGHT}, H.264 crf {CRF}, medium, with sound")
    medians = {}
    for saver, runs in found.items():
        medians[saver] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{saver:5} {medians[saver]['seconds']:7.1f} s  "
            f"{medians[saver]['extra_mib']:6.0f} MiB extra memory  "
            f"{medians[saver]['file_mib']:6.2f} MiB file"
        )
    share = medians["nox"]["seconds"] / medians["core"]["seconds"]
    print(f"nox / core: {share:.2f} of the time")
    is_small = bool(asked.moving) or medians["nox"]["extra_mib"] * MIB < MAX_EXTRA_BYTES
    if not is_small or share > MAX_SHARE:
        sys.exit("missed: Nox takes more memory or time than it may")


if __name__ == "__main__":
    main()
