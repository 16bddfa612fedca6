"""Saving on disks that are full or closed: a sentence, no half file, and the next save works."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("av")

from nox_kernels.errors import NoxError
from nox_kernels.video import write_video
from nox_kernels.video_format import find, formats

ROOT = Path(__file__).resolve().parents[2]
KINDS = [name for name in formats() if "NVENC" not in name]
NOBODY = 65534

# A disk of 1 MB, in a mount namespace of the child's own: gone when it ends.
_MOUNTED = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$1" -c "$2" "$0" "$3"'
_SMALL_DISK = """
import json, os, sys, torch
from nox_kernels.errors import NoxError
from nox_kernels.sound import Audio
from nox_kernels.video import write_video
from nox_kernels.video_format import find
folder, kind = sys.argv[1], find(sys.argv[2])
noise = torch.rand(24, 256, 256, 3, generator=torch.Generator().manual_seed(0))
path = f"{folder}/big{kind.suffix}"
try:
    write_video(path, noise, Audio(torch.rand(2, 32000) - 0.5, 32000), video_format=kind, crf=1)
    sentence = "written"
except NoxError as err:
    sentence = str(err)
left = os.listdir(folder)
small = write_video(f"{folder}/small{kind.suffix}", noise[:1, :32, :32], video_format=kind)
os.unlink(small.path)
warnings = []
if kind.audio.encoder == "flac":  # 2 MHz is more than it takes; as WAV it is 8 MB
    loud = Audio(torch.rand(2, 2_000_000) - 0.5, 2_000_000)
    warnings = write_video(path, noise[:1, :32, :32], loud, video_format=kind).warnings
print(json.dumps([sentence, left, warnings, os.listdir(folder)]))
"""


def run_on_small_disk(folder, kind):
    """What the child above found; skips where a user may mount nothing."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount a small disk")
    program = ["sh", "-c", _MOUNTED, str(folder), sys.executable, _SMALL_DISK, kind]
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    done = subprocess.run(
        ["unshare", "-rm", *program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_one_sentence_and_the_next_video_works(tmp_path, kind):
    sentence, left, warnings, files = run_on_small_disk(tmp_path, kind)
    assert sentence.startswith("The video could not be saved as ")
    assert "the disk is full; free some space and run again" in sentence
    assert left == []
    if find(kind).audio.encoder == "flac":
        assert "saved without sound: the audio encoder failed" in warnings[-1]
        assert "so did a WAV file beside it (No space left on device)" in warnings[-1]
        assert files == [f"big{find(kind).suffix}"]


@contextlib.contextmanager
def as_nobody():
    """Root may write anywhere, so step down for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_folder_that_is_not_writable_is_one_sentence():
    # not tmp_path: it lies in a folder that nobody else may enter
    with tempfile.TemporaryDirectory() as folder:
        # PyAV loads parts of itself when first used, from where nobody else may read
        os.unlink(write_video(f"{folder}/warm.mp4", torch.full((2, 64, 64, 3), 0.5)).path)
        os.chmod(folder, 0o555)
        with as_nobody(), pytest.raises(NoxError, match="the folder is not writable"):
            write_video(f"{folder}/a.mp4", torch.full((2, 64, 64, 3), 0.5))
        assert os.listdir(folder) == []
        os.chmod(folder, 0o755)


def test_a_cancelled_video_of_any_kind_leaves_nothing(tmp_path):
    def cancel(done, total):
        raise KeyboardInterrupt

    for name in KINDS:
        kind = find(name)
        with pytest.raises(KeyboardInterrupt):
            write_video(
                tmp_path / f"a{kind.suffix}",
                torch.full((3, 64, 64, 3), 0.5),
                video_format=kind,
                progress=cancel,
            )
        assert os.listdir(tmp_path) == []
