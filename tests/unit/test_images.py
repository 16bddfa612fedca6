"""The byte order of the kernels' images, chunk by chunk as their descriptors read it."""

import torch

from nox_kernels import images as image_order
from nox_kernels import reference
from nox_kernels.layout import raster_layout
from tests.cases import CASES


def packed():
    case = CASES[0]
    layout = raster_layout(case.sequence)
    return reference.pack_tiles(
        *case.make_inputs(), layout.slot_row, layout.valid_count, "accurate", "none"
    )


def test_every_chunk_of_q_and_k_lies_where_the_128_byte_swizzle_says():
    plain = packed()
    stored = image_order.to_kernel_order(plain)
    for name in ("q", "k"):
        ours, theirs = getattr(plain, name), getattr(stored, name)
        for row in (0, 1, 7, 8, 13, 63):
            for chunk in range(8):
                place = 16 * (chunk ^ (row % 8))
                assert torch.equal(
                    theirs[:, :, row, place : place + 16],
                    ours[:, :, row, 16 * chunk : 16 * chunk + 16],
                )


def test_every_byte_of_v_lies_where_the_kernel_reads_it():
    plain = packed()
    tile = image_order.to_kernel_order(plain).v[1, 2].reshape(128, 64)
    order = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    for channel in (0, 1, 2, 3, 9, 126, 127):
        for place in range(64):
            chunk = (place // 16) ^ (channel // 2 % 4)
            key = 16 * (place // 16) + order[place % 16]
            stored = tile[channel, 16 * chunk + place % 16]
            assert stored == plain.v[1, 2, key, channel]


def test_the_way_back_gives_the_same_images():
    plain = packed()
    back = image_order.to_plain_order(image_order.to_kernel_order(plain))
    for name, ours, theirs in zip(plain._fields, plain, back, strict=True):
        assert torch.equal(ours, theirs), name
