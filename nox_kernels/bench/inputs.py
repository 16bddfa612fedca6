"""Inputs: the clips that the bench attends and the values in them."""

import torch
from torch import Tensor

from ..errors import RequestError
from ..sequence import Sequence, t2va_sequence

HEAD_DIM = 128
SETS = ("normal", "strong", "outlier")
# What H3 renders, then what is small enough for any number of rows.
CANVASES = ((1344, 768), (256, 192), (64, 64))
MIN_ROWS = t2va_sequence(64, 64, 5, 1).num_rows


def clip_of(num_rows: int) -> Sequence:
    """A text-to-video clip of exactly this many packed rows.

    Of the longest clips that fit, one for each canvas, the one with the most video; its prompt
    fills the rest.

    Raises:
        RequestError: No clip is as short.
    """
    if num_rows < MIN_ROWS:
        raise RequestError(f"A clip has {MIN_ROWS} rows at least, got --rows {num_rows}.")
    clips = []
    for width, height in CANVASES:
        num_frames = 5
        while t2va_sequence(width, height, num_frames, 1).num_rows <= num_rows:
            num_frames += 17
        if num_frames > 5:
            num_frames -= 17
            num_text = 1 + num_rows - t2va_sequence(width, height, num_frames, 1).num_rows
            clips.append(t2va_sequence(width, height, num_frames, num_text))
    return max(clips, key=lambda clip: clip.num_video)


def make_inputs(
    name: str, num_rows: int, num_heads: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [H, S, 128] bfloat16: views of one fused buffer [S, 3, H, 128], as H3 passes them.

    Args:
        name: "normal": random normal. "strong": channels 19, 34, 67 and 82 of K 12 times and of Q
            3 times as large, an offset for each head, and both halved, as in H3's last layers.
            "outlier": one key of 128 four times as large, and V with one value of 1,500 in a
            channel whose rms is 4.
        num_rows: S.
        num_heads: H.
        device: Of the buffer; the same values every time on the same kind of device.
    """
    generator = torch.Generator(device).manual_seed(1234)
    kind = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    buffer = torch.randn(num_rows, 3, num_heads, HEAD_DIM, **kind)
    q, k, v = (buffer[:, part].transpose(0, 1) for part in range(3))
    if name == "strong":
        channels = [19, 34, 67, 82]
        k[..., channels] *= 12
        q[..., channels] *= 3
        for x in (q, k):
            x += torch.randn(num_heads, 1, HEAD_DIM, **kind)
            x /= 2
    elif name == "outlier":
        k[:, ::128] *= 4
        v *= 4
        v[:, num_rows // 2 | 1, 7] = 1500.0
    return q, k, v
