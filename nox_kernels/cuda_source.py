"""CUDA source: the text of csrc as NVRTC gets it, and the hash that tells versions apart."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

# No contraction into fma except where the source asks for it: so all architectures agree.
FLAGS = ("--fmad=false", "--std=c++17", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^(\s*#\s*include\s*)"([^"]+)"', re.MULTILINE)


class Source:
    """The CUDA text of a folder, as NVRTC gets it.

    Attributes:
        text: Path from the folder, with slashes -> content. Includes in it are spelled from the
            folder too, since NVRTC does not resolve "../params.h" among files in memory.
        hash: sha256 over all of it and the flags, in hex.
    """

    def __init__(self, folder: Path):
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.*")}
        names = sorted(name for name in paths if name.endswith((".h", ".cuh", ".cu")))
        # Text mode: a checkout with \r\n is the same source.
        texts = {name: paths[name].read_text(encoding="utf-8") for name in names}
        self.text = {name: _root_includes(name, text, texts) for name, text in texts.items()}
        digest = hashlib.sha256()
        for part in (*FLAGS, *(part for item in self.text.items() for part in item)):
            digest.update(part.encode() + b"\0")
        self.hash = digest.hexdigest()

    @property
    def headers(self) -> dict[str, str]:
        """What a unit may include."""
        return {name: text for name, text in self.text.items() if not name.endswith(".cu")}


def _root_includes(name: str, text: str, texts: Mapping[str, str]) -> str:
    def root(match: re.Match) -> str:
        beside = os.path.normpath(os.path.join(os.path.dirname(name), match[2]))
        beside = beside.replace(os.sep, "/")
        return f'{match[1]}"{beside if beside in texts else match[2]}"'

    return _INCLUDE.sub(root, text)
