"""Comfy files: reads back what Nox Save Video wrote."""

import json
from pathlib import Path

import av


def streams_of(path: Path) -> dict[str, int]:
    """Decoded frames or sound samples of each stream; a file that does not play raises."""
    counts = {}
    with av.open(str(path)) as file:
        for stream in file.streams:
            file.seek(0)
            frames = list(file.decode(stream))
            is_sound = stream.type == "audio"
            counts[stream.type] = sum(frame.samples if is_sound else 1 for frame in frames)
    return counts


def tags_of(path: Path) -> dict:
    """The tags of ours that a file has, parsed."""
    with av.open(str(path)) as file:
        metadata = dict(file.metadata)
    names = {"prompt", "workflow", "nox"} & metadata.keys()
    return {name: json.loads(metadata[name]) for name in names}
