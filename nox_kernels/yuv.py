"""YUV: the limited-range BT.709 planes of an RGB frame, rounded."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

_RED, _GREEN, _BLUE = 0.2126, 0.7152, 0.0722  # BT.709: share of each in the luma
_LUMA = 219.0 * np.array([_RED, _GREEN, _BLUE])  # [3], levels of 8 bits
_CHROMA = 112.0 * np.array(  # [3, 2]: blue and red difference
    [
        [-_RED / (1 - _BLUE), 1.0],
        [-_GREEN / (1 - _BLUE), -_GREEN / (1 - _RED)],
        [1.0, -_BLUE / (1 - _RED)],
    ]
)
_LUMA_BLACK, _CHROMA_ZERO = 16.0, 128.0  # levels of 8 bits


@dataclass(frozen=True)
class PixelFormat:
    """How FFmpeg's format of this name lays out three planes, Y, U and V.

    Attributes:
        name: FFmpeg's word.
        bits: Per sample; more than 8 are stored in 16, the low ones.
        shared_rows, shared_columns: The pixels that share one colour sample.
    """

    name: str
    bits: int
    shared_rows: int
    shared_columns: int


PIXEL_FORMATS = {
    pixel_format.name: pixel_format
    for pixel_format in (
        PixelFormat("yuv420p", 8, 2, 2),
        PixelFormat("yuv420p10le", 10, 2, 2),
        PixelFormat("yuv422p10le", 10, 1, 2),
        PixelFormat("yuv444p", 8, 1, 1),
        PixelFormat("yuv444p10le", 10, 1, 1),
    )
}


def to_planes(rgb: np.ndarray, pixel_format: PixelFormat, *, dither: bool) -> list[np.ndarray]:
    """Y, U and V, each rounded once, from the floats.

    A colour sample is the mean of the pixels that share it: what decoders undo, so that a clip that
    is saved again and again stays where it is.

    Args:
        rgb: [H, W, 3] float32 in 0..1, with H and W whole multiples of what shares a sample.
        pixel_format: of the result.
        dither: Add an ordered pattern of less than half a level before rounding, the same in every
            frame: smooth gradients then show no bands, and the encoder no flicker.

    Returns:
        [H, W] and twice [H / shared_rows, W / shared_columns], uint8 or uint16.
    """
    height, width = rgb.shape[:2]
    step = float(1 << (pixel_format.bits - 8))  # levels in a level of 8 bits
    rows, columns = pixel_format.shared_rows, pixel_format.shared_columns
    luma = rgb.reshape(-1, 3) @ (step * _LUMA).astype(np.float32)  # [H * W]

    sums = rgb if rows == 1 else rgb[0::2] + rgb[1::2]
    mix = np.tile(step * _CHROMA / (rows * columns), (columns, 1)).astype(np.float32)
    chroma = sums.reshape(-1, 3 * columns) @ mix  # [samples, 2]
    chroma = chroma.T.reshape(2, height // rows, width // columns)
    planes = [(luma.reshape(height, width), _LUMA_BLACK), *((c, _CHROMA_ZERO) for c in chroma)]
    return [_rounded(plane, step * zero, pixel_format.bits, dither) for plane, zero in planes]


def _rounded(plane: np.ndarray, zero: float, bits: int, dither: bool) -> np.ndarray:
    """The plane, moved to its zero, in whole levels; it holds none below 0."""
    # The conversion to integers cuts off, so half a level is added.
    shift = np.float32(zero + 0.5)
    moved = plane + shift if not dither else plane + (shift + _pattern(*plane.shape))
    return moved.astype(np.uint8 if bits == 8 else np.uint16)


@functools.lru_cache(maxsize=4)
def _pattern(height: int, width: int) -> np.ndarray:
    """[height, width] of Bayer's 8x8 order, -0.5 < x < 0.5."""
    order = np.zeros((1, 1))
    for _ in range(3):
        order = np.block([[4 * order, 4 * order + 2], [4 * order + 3, 4 * order + 1]])
    tile = ((order + 0.5) / order.size - 0.5).astype(np.float32)
    return np.tile(tile, (-(-height // 8), -(-width // 8)))[:height, :width]
