"""What tests of the kernels share: dense calls, and their reference on the same images."""

import pytest
import torch

from nox_kernels import images as image_order
from nox_kernels import kernels, reference, route
from nox_kernels.layout import packed_layout, raster_layout

is_served = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_kernel = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_served, reason="needs an NVIDIA GPU of compute capability 9.0"),
]

LAYOUTS = {"accurate": raster_layout, "faithful": packed_layout}


def pack(qkv, layout, precision, pooling="none"):
    return kernels.pack_tiles(*qkv, layout.slot_row, layout.valid_count, precision, pooling)


def attend(images, bits, layout, dtype=torch.bfloat16):
    return kernels.tile_attention(images, bits, layout.slot_row, layout.num_rows, dtype)


def all_bits(layout, num_heads):
    return route.keep_all(layout, num_heads).bits


def dense(qkv, layout, precision):
    """[S, H, D] of the kernels, every tile kept."""
    images = pack(qkv, layout, precision)
    return attend(images, all_bits(layout, qkv[0].shape[0]), layout, qkv[0].dtype)[0]


def reference_of(images, bits, layout, dtype=torch.float32):
    """The reference on the very images that a kernel wrote."""
    plain = image_order.to_plain_order(images)
    return reference.tile_attention(plain, bits, layout.slot_row, layout.num_rows, dtype)


def fused(num_rows, num_heads, seed=0, dtype=torch.bfloat16):
    """q, k, v [H, S, 128] views of one buffer [S, 3, H, 128], random normal."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (num_rows, 3, num_heads, 128)
    buffer = torch.randn(shape, generator=generator, device="cuda", dtype=dtype)
    return [buffer[:, part].transpose(0, 1) for part in range(3)]
