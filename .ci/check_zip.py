"""Check the registry zip: all that a user needs, no tests, no binaries."""

import sys
import zipfile
from pathlib import PurePosixPath

NEEDED = {
    "__init__.py",
    "pyproject.toml",
    "requirements.txt",
    "LICENSE",
    "README.md",
    "nodes/attention.py",
    "nox_kernels/attention.py",
    "nox_kernels/csrc/params.h",
    "nox_kernels/formats/01-mp4-h264.json",
    "web/badge.js",
    "web/docs/NoxAttention.md",
    "workflows/Nox H3 Text to Video and Audio.json",
    "workflows/Nox H3 Image to Video and Audio.json",
    "workflows/Nox H3 Continue a Clip.json",
}
SUFFIXES = {".cu", ".cuh", ".h", ".js", ".py", ".md", ".json", ".jpg", ".png", ".toml", ".txt", ""}
MAX_BYTES = 4 << 20


def faults(path: str) -> list[str]:
    """What is wrong with the zip, a sentence each."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        size_bytes = sum(info.file_size for info in archive.infolist())
    found = [f"{name} is missing" for name in sorted(NEEDED - set(names))]
    for name in map(PurePosixPath, names):
        if name.parts[0] in ("tests", ".ci", ".github", ".venv"):
            found.append(f"{name} does not belong into the zip")
        if name.suffix not in SUFFIXES:
            found.append(f"{name} is of a kind that does not belong into the zip")
    if size_bytes > MAX_BYTES:
        found.append(f"it unpacks to {size_bytes:,} bytes, over {MAX_BYTES:,}")
    return found


if __name__ == "__main__":
    problems = faults(sys.argv[1])
    print("\n".join(problems) or f"{sys.argv[1]}: holds what it should and nothing else")
    sys.exit(bool(problems))
