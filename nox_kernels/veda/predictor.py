"""Predictor: a trained scorer of tiles, as a plain module whose memory a host may own.

A tile is embedded by the mean, maximum and minimum of its rows through a projection per head; the
score of a pair is the dot product of their embeddings. All sums are taken in float64 and scores
rounded to float32 once: TF32 cannot enter, and the order of summation, and so how the work is
split, shows only where terms cancel to their float64 rounding.
"""

import torch
from torch import Tensor, nn

from .bundle import Bundle, dequantise
from .bundle_info import BundleInfo


class LayerPredictor(nn.Module):
    """Weights of one layer. H heads, D head dim."""

    def __init__(
        self,
        proj_q: Tensor,
        proj_k: Tensor,
        so_q: Tensor | None = None,
        so_k: Tensor | None = None,
        count_gain: Tensor | None = None,
    ):
        """Take the weights as they are.

        Args:
            proj_q: [H, 3 * D, D], features to embedding of query tiles.
            proj_k: The same for key tiles.
            so_q: [H, D, R] of the second-order term, or None.
            so_k: The same.
            count_gain: [H] weight of the log of a key tile's tokens, or None.
        """
        super().__init__()
        weights = {
            "proj_q": proj_q,
            "proj_k": proj_k,
            "so_q": so_q,
            "so_k": so_k,
            "count_gain": count_gain,
        }
        for name, weight in weights.items():
            value = None if weight is None else nn.Parameter(weight, requires_grad=False)
            self.register_parameter(name, value)

    @property
    def pooling(self) -> str:
        """Statistics of tiles that `embed` needs, see `reference.POOLINGS`."""
        return "extremes" if self.so_q is None else "variance"

    def embed(
        self, q_pool: Tensor, k_pool: Tensor, valid_count: Tensor, heads: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings whose dot products are the scores of algorithm D4.

        With features f = [mean | max | min], q^ = f_q proj_q + mean_q and k^ alike:
        score = q^ k^ / sqrt(D) + count_gain ln(count_k) + (E[q^2] so_q) (Var(k) so_k).

        Args:
            q_pool: [h, Nq, P, D] float32 statistics of query tiles, see `reference.pool_tiles`.
            k_pool: [h, Nt, P, D], the same of key tiles.
            valid_count: [Nt] real rows of each key tile.
            heads: [h] int64, which of the predictor's heads these are.

        Returns:
            [h, Nq, E] and [h, Nt, E] float64.
        """

        def weight(name: str) -> Tensor:
            value = getattr(self, name)  # ComfyUI may have left it on the CPU
            return value.index_select(0, heads.to(value.device)).to(heads.device).double()

        def embed_tiles(pool: Tensor, proj: str) -> Tensor:
            return pool[:, :, :3].flatten(2).double() @ weight(proj) + pool[:, :, 0]

        q_parts = [embed_tiles(q_pool, "proj_q") * q_pool.shape[3] ** -0.5]
        k_parts = [embed_tiles(k_pool, "proj_k")]
        if self.so_q is not None:
            mean, variance = q_pool[:, :, 0].double(), q_pool[:, :, 3].double()
            q_parts.append((variance + mean.square()) @ weight("so_q"))
            k_parts.append(k_pool[:, :, 3].double() @ weight("so_k"))
        if self.count_gain is not None:
            num_query_tiles, num_tiles = q_pool.shape[1], k_pool.shape[1]
            q_parts.append(weight("count_gain")[:, None, None].expand(-1, num_query_tiles, 1))
            log_count = valid_count.clamp(min=1).double().log()
            k_parts.append(log_count[None, :, None].expand(len(heads), num_tiles, 1))
        return torch.cat(q_parts, dim=2), torch.cat(k_parts, dim=2)


class VedaPredictor(nn.Module):
    """A bundle's predictor of every layer, and what the bundle says of itself.

    Attributes:
        info: The bundle's.
        layers: A `LayerPredictor` each.
    """

    def __init__(self, info: BundleInfo, layers: list[LayerPredictor]):
        super().__init__()
        self.info = info
        self.layers = nn.ModuleList(layers)

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> "VedaPredictor":
        """The predictor of a bundle, in the dtype that it stays in memory with."""
        weights = dequantise(bundle.tensors)
        layers = []
        for layer_idx in range(bundle.info.num_layers):
            prefix = f"layers.{layer_idx}."
            own = {
                name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            layers.append(LayerPredictor(**own))
        return cls(bundle.info, layers)

    def layer(self, layer_idx: int) -> LayerPredictor:
        """The predictor of one layer."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, LayerPredictor)
        return layer
