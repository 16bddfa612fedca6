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
_BAND_ROWS = 64  # converted at a time: floats of a whole frame would be 50 MB at 1920x1088
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
    dtype = np.uint8 if pixel_format.bits == 8 else np.uint16
    chroma_shape = height // pixel_format.shared_rows, width // pixel_format.shared_columns
    planes = [np.empty(shape, dtype) for shape in ((height, width), chroma_shape, chroma_shape)]
    for start in range(0, height, _BAND_ROWS):
        band = _band(rgb[start : start + _BAND_ROWS], pixel_format)
        for plane, (samples, zero) in zip(planes, band, strict=True):
            first = start * len(plane) // height
            _round_into(plane[first : first + len(samples)], samples, zero, dither)
    return planes


def _band(rgb: np.ndarray, pixel_format: PixelFormat) -> list[tuple[np.ndarray, float]]:
    """Samples of the three planes of some rows, around 0, and the level of that 0."""
    height, width = rgb.shape[:2]
    step = float(1 << (pixel_format.bits - 8))  # levels in a level of 8 bits
    rows, columns = pixel_format.shared_rows, pixel_format.shared_columns
    luma = rgb.reshape(-1, 3) @ (step * _LUMA).astype(np.float32)  # [H * W]
    sums = rgb if rows == 1 else rgb[0::2] + rgb[1::2]
    mix = np.tile(step * _CHROMA / (rows * columns), (columns, 1)).astype(np.float32)
    chroma = sums.reshape(-1, 3 * columns) @ mix  # [samples, 2]
    blue, red = chroma.T.reshape(2, height // rows, width // columns)
    luma_zero, chroma_zero = step * _LUMA_BLACK, step * _CHROMA_ZERO
    return [(luma.reshape(height, width), luma_zero), (blue, chroma_zero), (red, chroma_zero)]


def _round_into(out: np.ndarray, samples: np.ndarray, zero: float, dither: bool) -> None:
    """The samples, moved to their zero, in whole levels; none lies below 0."""
    # The conversion to integers cuts off, so half a level is added. Bands start at multiples of 8
    # rows in every plane, so the pattern goes on from one to the next.
    shift = np.float32(zero + 0.5)
    out[:] = samples + (shift + _pattern(*samples.shape) if dither else shift)


@functools.lru_cache(maxsize=8)
def _pattern(height: int, width: int) -> np.ndarray:
    """[height, width] of Bayer's 8x8 order, -0.5 < x < 0.5."""
    order = np.zeros((1, 1))
    for _ in range(3):
        order = np.block([[4 * order, 4 * order + 2], [4 * order + 3, 4 * order + 1]])
    tile = ((order + 0.5) / order.size - 0.5).astype(np.float32)
    return np.tile(tile, (-(-height // 8), -(-width // 8)))[:height, :width]
