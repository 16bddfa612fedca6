"""Still: the first frame of a clip as PNG beside its video."""

from __future__ import annotations

import contextlib
import os
import uuid

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..nox_kernels.errors import NoxError
from ..nox_kernels.video import publish


def write_still(path: str, frame, metadata: dict[str, str]) -> str | None:
    """Write a frame [H, W, C] in 0..1, whole or not at all; an existing file is never touched.

    Returns why it could not be, as a sentence, and None when it was: the video is saved by then, and
    a picture of it is no reason to fail.
    """
    rgb = np.nan_to_num(frame[..., :3].float().cpu().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    picture = Image.fromarray(np.rint(255 * rgb.clip(0, 1)).astype(np.uint8))
    part = os.path.join(os.path.dirname(path), f".nox-{uuid.uuid4().hex}.part")
    try:
        tags = PngInfo()
        for name, text in metadata.items():
            with contextlib.suppress(UnicodeError):  # a name that PNG cannot hold
                tags.add_text(name, text)
        picture.save(part, format="PNG", pnginfo=tags)
        publish(part, path)
    except (OSError, ValueError, NoxError) as err:  # ValueError: a tag that PNG cannot hold
        reason = getattr(err, "strerror", None) or err
        return f"The first frame could not be saved as {os.path.basename(path)}: {reason}"
    finally:
        with contextlib.suppress(OSError):  # after publish there is nothing left to remove
            os.unlink(part)
    return None
