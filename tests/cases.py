"""Cases: the attention problems that tests share, from benign to hostile."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nox_kernels import route
from nox_kernels.sequence import Sequence, t2va_sequence


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        name: Says what is hard about it.
        width: Canvas width in pixels.
        height: Canvas height in pixels.
        num_frames: Frames.
        num_text: Text rows.
        num_heads: H.
        recipe: Name of the distribution, see `make_inputs`.
        dtype: Of q, k and v.
    """

    name: str
    width: int = 256
    height: int = 192
    num_frames: int = 22
    num_text: int = 50
    num_heads: int = 2
    recipe: str = "normal"
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name

    @property
    def sequence(self) -> Sequence:
        """Its packed sequence."""
        return t2va_sequence(self.width, self.height, self.num_frames, self.num_text)

    def make_inputs(self, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Views q, k, v [H, S, 128] of one fused buffer [S, 3, H, 128], as ComfyUI passes them."""
        generator = torch.Generator().manual_seed(1234)
        shape = (self.sequence.num_rows, 3, self.num_heads, 128)
        buffer = torch.randn(shape, generator=generator)
        q, k, v = buffer.unbind(1)  # [S, H, 128]
        if self.recipe == "strong":
            # H3's last blocks: four channels of Q and K tower, and each head has an offset
            channels = [19, 34, 67, 82]
            k[..., channels] *= 12
            q[..., channels] *= 3
            for x in (q, k):
                x += torch.randn(1, self.num_heads, 128, generator=generator)
                x /= 2
        elif self.recipe == "loud value":
            # block 49 has V values of 1,500 in channels of rms 4
            v *= 4
            v[self.sequence.num_rows // 2 | 1, :, 7] = 1500.0  # odd: not in the sample
        elif self.recipe == "outlier keys":
            # one key of 128 at 4 x beside the loud value
            k[::128] *= 4
            v *= 4
            v[self.sequence.num_rows // 2 | 1, :, 7] = 1500.0  # odd: not in the sample
        elif self.recipe == "silent channel":
            v[..., 3] = 0.0
        elif self.recipe == "sharp":
            q *= 6
        elif self.recipe != "normal":
            raise ValueError(self.recipe)
        buffer = buffer.to(self.dtype).to(device)
        q, k, v = (buffer[:, part].transpose(0, 1) for part in range(3))
        return q, k, v


CASES = (
    Case("normal"),
    Case("strong channels", recipe="strong"),
    Case("loud value", recipe="loud value"),
    # an odd number of KV tiles, and 3 rows in the last one: groups of padding have scale 0
    Case("loud value, odd tiles", num_text=65, num_frames=39, recipe="loud value"),
    Case("outlier keys", recipe="outlier keys"),
    Case("silent channel", recipe="silent channel"),
    Case("sharp", recipe="sharp"),
    Case("float32 ragged", width=224, height=160, num_text=17, dtype=torch.float32),
    Case("float16 few keys", width=64, height=64, num_frames=5, dtype=torch.float16),
)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Mean over rows of the relative L2 error; both [..., D]."""
    out, truth = out.double(), truth.double()
    return float(((out - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())


def keep_tiles(scores, layout, num_kept):
    """Mode sparse's selection with a budget given as a number of tiles."""
    rule = route.sparse_rule(layout, min(1.0, num_kept / max(1, layout.num_video_kv_tiles)))
    if rule is None:
        return route.keep_all(layout, len(scores))
    return route.keep_best(scores, rule)


def mean_scores(images):
    """Mode sparse's scores of tile images with pooling "mean"."""
    return route.score_tiles(images.q_pool[:, :, 0], images.k_pool[:, :, 0])
