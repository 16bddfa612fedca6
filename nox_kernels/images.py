"""Images: the byte order in which the sm_90a kernels keep Q, K and V.

Rows of 128 bytes lie in the 128-byte swizzle of wgmma: the 16-byte chunk c of row r is stored at
chunk c ^ (r % 8). V is stored transposed, a row of 64 bytes per channel, its keys permuted so that
what a thread holds of P after Q K^T is what it must give to P V, in the 64-byte swizzle.
"""

import torch
from torch import Tensor

from .reference import TileImages

CHUNK = 16  # bytes that a swizzle moves together
# Which key of 16 is stored in each place of V's rows.
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def _swizzle(x: Tensor, row_shift: int) -> Tensor:
    """Store chunk c of row r at c ^ ((r >> row_shift) % number of chunks); its own inverse.

    Args:
        x: [..., rows, bytes], one byte an element.
        row_shift: 0 for rows of 128 bytes, 1 for rows of 64: eight rows repeat the pattern.
    """
    chunks = x.unflatten(-1, (-1, CHUNK))
    num_rows, num_chunks = chunks.shape[-3:-1]
    row = torch.arange(num_rows, device=x.device)[:, None]
    place = torch.arange(num_chunks, device=x.device) ^ ((row >> row_shift) % num_chunks)
    return chunks[..., row, place, :].flatten(-2)


def to_kernel_order(images: TileImages) -> TileImages:
    """The reference's images as the kernels write and read them; shapes stay as they are."""
    order = torch.tensor(KEY_ORDER, device=images.v.device)
    v = images.v.unflatten(2, (-1, CHUNK))[:, :, :, order].flatten(2, 3)  # [H, Nk, 64, D]
    v = _swizzle(v.transpose(2, 3).contiguous(), 1).reshape(images.v.shape)
    return images._replace(q=_swizzle(images.q, 0), k=_swizzle(images.k, 0), v=v)


def to_plain_order(images: TileImages) -> TileImages:
    """The inverse of `to_kernel_order`."""
    num_heads, num_tiles, tile, head_dim = images.v.shape
    order = torch.tensor(KEY_ORDER, device=images.v.device).argsort()
    v = _swizzle(images.v.reshape(num_heads, num_tiles, head_dim, tile), 1).transpose(2, 3)
    v = v.unflatten(2, (-1, CHUNK))[:, :, :, order].flatten(2, 3).contiguous()
    return images._replace(q=_swizzle(images.q, 0), k=_swizzle(images.k, 0), v=v)
