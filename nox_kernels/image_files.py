"""Image files: compiled kernels on disk, in the data wheel and in the user's cache."""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import strict_json
from .errors import FileError

log = logging.getLogger("nox")

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
_DIGEST_BYTES = hashlib.sha256().digest_size
_REINSTALL = "Run: pip install --force-reinstall nox-kernels"


def file_name(unit_name: str, architecture: str) -> str:
    """Of an image: "attend_sm90.sm_90a.cubin", or .ptx for a virtual architecture."""
    kind = "ptx" if architecture.startswith("compute_") else "cubin"
    return f"{unit_name}.{architecture}.{kind}"


@dataclass(frozen=True)
class DataWheel:
    """The installed package nox_kernels_cubins, if there is one.

    Attributes:
        folder: Its place, or None.
        sha256: File name -> digest, from its manifest.
        fault: Why it is ignored, as a sentence; "" for a wheel that fits or is not there.
    """

    folder: Path | None
    sha256: Mapping[str, str]
    fault: str = ""

    @classmethod
    def open(cls, folder: Path | None, source_hash: str) -> "DataWheel":
        """Read the manifest, and ignore a wheel that was built from other source."""
        if folder is None:
            return cls(None, {})
        try:
            manifest: Any = strict_json.parse((folder / MANIFEST).read_bytes())
            if manifest["format"] != MANIFEST_FORMAT or manifest["source_hash"] != source_hash:
                return cls(
                    folder,
                    {},
                    "The installed package nox-kernels belongs to another version of Nox and is "
                    "ignored. Run: pip install --upgrade nox-kernels",
                )
            return cls(folder, {name: file["sha256"] for name, file in manifest["files"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(folder, {}, f"The package nox-kernels is damaged. {_REINSTALL}")

    def read(self, name: str) -> bytes | None:
        """An image, or None if the wheel has none of that name.

        Raises:
            FileError: The file is missing or not what the manifest says.
        """
        if self.folder is None or name not in self.sha256:
            return None
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() != self.sha256[name]:
            raise FileError(f"{name} of the package nox-kernels is damaged. {_REINSTALL}")
        return data


@dataclass(frozen=True)
class CachedImage:
    """One image in the user's cache: the file's last 32 bytes are the sha256 of the rest.

    In the file rather than beside it, so that one rename puts both in place.
    """

    path: Path

    def read(self) -> bytes | None:
        """The image, or None if there is none; a damaged file is deleted."""
        try:
            content = self.path.read_bytes()
        except OSError:
            return None
        data, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if data and hashlib.sha256(data).digest() == digest:
            return data
        log.warning("Nox: %s is damaged; it is compiled again.", self.path)
        with contextlib.suppress(OSError):
            self.path.unlink()
        return None

    def write(self, data: bytes) -> None:
        """Put an image in place, whole or not at all. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data + hashlib.sha256(data).digest())
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let one process at a time fill the cache.

        The lock saves work only, for `write` is atomic: where the folder takes none, go on.
        """
        from filelock import FileLock  # comes with torch

        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, NotImplementedError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(f"{self.path}.lock"))
            yield
