"""`faithful` against SageAttention 2.2's own sm_90 kernel, bit for bit, where it is installed."""

import pytest
import torch

from nox_kernels import images as image_order
from nox_kernels import kernels
from nox_kernels.layout import packed_layout
from nox_kernels.reference import TileImages
from tests.gpu.kernels_case import all_bits, attend, fused, needs_kernel, pack
from tests.gpu.test_kernels_hostile import rows_sequence

sage = pytest.importorskip("sageattention", reason="needs SageAttention 2.2")
core = pytest.importorskip("sageattention.core", reason="needs SageAttention 2.2")
pytestmark = needs_kernel

# S mod 128 in {0, 1, 63, 64, 65, 127}, and a real clip
ROWS = (1_024, 1_025, 1_087, 1_088, 1_089, 1_151, 38_304)
ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # upstream's order of V's tokens


def upstream(qkv, granularity, smooth_k):
    """[S, H, D] of SageAttention's sm_90 function."""
    q, k, v = (x[None] for x in qkv)
    out = sage.sageattn_qk_int8_pv_fp8_cuda_sm90(
        q, k, v, tensor_layout="HND", qk_quant_gran=granularity, smooth_k=smooth_k
    )
    return out[0].transpose(0, 1)


def images_of_upstream(qkv, granularity, smooth_k, layout):
    """Our images of what SageAttention's own quantisers write."""
    q, k, v = (x[None] for x in qkv)
    num_heads, num_rows = q.shape[1:3]
    num_tiles = layout.num_query_tiles
    pad = 128 * num_tiles - num_rows
    mean = k.mean(dim=2, keepdim=True) if smooth_k else None
    if granularity == "per_warp":
        q8, q_scale, k8, k_scale = core.per_warp_int8_cuda(
            q, k, mean, tensor_layout="HND", BLKQ=64, WARPQ=16, BLKK=128
        )
        q_scale = q_scale.view(num_heads, -1, 1).expand(-1, -1, 8)
        k_scale = k_scale.view(num_heads, -1, 1).expand(-1, -1, 4)
    else:
        q8, q_scale, k8, k_scale = core.per_thread_int8_triton(
            q, k, mean, tensor_layout="HND", BLKQ=64, WARPQ=16, BLKK=128, WARPK=128
        )
        q_scale, k_scale = q_scale.view(num_heads, -1, 8), k_scale.view(num_heads, -1, 4)
    # rows r and r + 8 of 16 share a scale; 64-row blocks may end before the last 128-row tile
    q_scale = torch.nn.functional.pad(q_scale, (0, 0, 0, 8 * num_tiles - q_scale.shape[1]))
    q_scale = q_scale[:, :, None].expand(-1, -1, 2, -1).reshape(num_heads, num_tiles, 128)
    v8, v_scale, _ = core.per_channel_fp8(
        torch.nn.functional.pad(v, (0, 0, 0, pad)), tensor_layout="HND", smooth_v=False
    )
    v8 = v8[0].view(torch.int8).unflatten(2, (-1, 16))  # [H, D, tokens / 16, 16]
    inverse = torch.tensor(ORDER, device=v8.device).argsort()
    v8 = v8[..., inverse].flatten(2).transpose(1, 2)  # [H, tokens, D]
    header = torch.zeros(num_heads, 2 * num_tiles, 8, device=q.device)
    header[..., :4] = k_scale.repeat_interleave(2, dim=1)
    header[..., 4], header[..., 6], header[..., 7] = 1.0, 1.0, layout.valid_count.float()

    def tiles(x, size):
        return torch.nn.functional.pad(x[0], (0, 0, 0, pad)).unflatten(1, (-1, size))

    none = torch.empty(0, device=q.device)
    plain = TileImages(
        q=tiles(q8, 128),
        q_scale=q_scale.contiguous(),
        k=tiles(k8, 64),
        header=header,
        v=v8[:, : 128 * num_tiles].unflatten(1, (-1, 64)),
        v_channel_scale=v_scale[0].contiguous(),
        v_is_e4m3=torch.ones(num_heads, dtype=torch.bool, device=q.device),
        k_mean=none,
        q_pool=none,
        k_pool=none,
    )
    return TileImages(*(x.contiguous() for x in image_order.to_kernel_order(plain)))


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("granularity", ["per_thread", "per_warp"])
@pytest.mark.parametrize("num_rows", ROWS)
def test_attention_has_upstreams_bits_on_its_own_quantised_tensors(num_rows, granularity, smooth_k):
    qkv = fused(num_rows, 56 if num_rows > 10_000 else 4)
    qkv[1] = qkv[1] + 1.5  # smoothing has something to do
    layout = packed_layout(rows_sequence(num_rows)).to("cuda")
    images = images_of_upstream(qkv, granularity, smooth_k, layout)
    out = attend(images, all_bits(layout, qkv[0].shape[0]), layout)[0]
    assert torch.equal(out, upstream(qkv, granularity, smooth_k))


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("num_rows", ROWS)
def test_the_whole_call_has_upstreams_bits(num_rows, smooth_k):
    qkv = fused(num_rows, 56 if num_rows > 10_000 else 4)
    qkv[1] = qkv[1] + 1.5
    layout = packed_layout(rows_sequence(num_rows)).to("cuda")
    images = kernels.pack_tiles(
        *qkv, layout.slot_row, layout.valid_count, "faithful", "none", smooth_k=smooth_k
    )
    out = attend(images, all_bits(layout, qkv[0].shape[0]), layout)[0]
    assert torch.equal(out, upstream(qkv, "per_thread", smooth_k))


def test_the_top_level_call_has_the_same_bits():
    qkv = fused(2_049, 4)
    layout = packed_layout(rows_sequence(2_049)).to("cuda")
    out = attend(pack(qkv, layout, "faithful"), all_bits(layout, 4), layout)[0]
    theirs = sage.sageattn(*(x[None] for x in qkv), tensor_layout="HND")
    assert torch.equal(out, theirs[0].transpose(0, 1))
