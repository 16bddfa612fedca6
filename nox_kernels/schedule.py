"""Schedule: which steps of a run are dense, told by sigma and never by counting calls."""

from collections.abc import Callable
from dataclasses import dataclass

from .request import AUTO, DenseRequest

SIGMA_TOLERANCE = 1e-4  # shift 12 packs sigmas as close as 0.012
AUTO_PERCENT = 0.2  # auto dense first steps cover this share of the schedule


@dataclass(frozen=True)
class Schedule:
    """Which steps of a run are dense, told by sigma and never by counting calls.

    Attributes:
        sigmas: The sampler's sigmas, descending; one more than there are steps.
        first_steps: Dense steps at the start, resolved.
        last_steps: Dense steps at the end.
        sigma_start: Sparse from this sigma down.
        sigma_end: Sparse down to this sigma.
        auto_steps: What auto would make of `first_steps`; 0 where a run begins late.
    """

    sigmas: tuple[float, ...]
    first_steps: int
    last_steps: int
    sigma_start: float
    sigma_end: float
    auto_steps: int

    @classmethod
    def resolve(
        cls,
        sigmas: tuple[float, ...],
        dense: DenseRequest,
        percent_to_sigma: Callable[[float], float],
    ) -> "Schedule":
        """Turn a request's counts and percents into sigmas of this run."""
        limit = percent_to_sigma(AUTO_PERCENT) + SIGMA_TOLERANCE
        auto_steps = sum(sigma > limit for sigma in sigmas[:-1])
        return cls(
            sigmas=tuple(sigmas),
            first_steps=auto_steps if dense.first_steps == AUTO else dense.first_steps,
            last_steps=dense.last_steps,
            sigma_start=percent_to_sigma(dense.start_percent),
            sigma_end=percent_to_sigma(dense.end_percent),
            auto_steps=auto_steps,
        )

    @property
    def num_steps(self) -> int:
        """Denoising steps."""
        return max(1, len(self.sigmas) - 1)

    @property
    def has_dense_step(self) -> bool:
        """Whether any step is dense at its start."""
        return any(self.dense_reason(sigma) for sigma in self.sigmas[:-1])

    def step_of(self, sigma: float) -> int:
        """The step that an evaluation at `sigma` belongs to, 0-based.

        A sampler that evaluates twice in a step does so between its two sigmas.
        """
        step_idx = sum(s >= sigma - SIGMA_TOLERANCE for s in self.sigmas) - 1
        return min(max(step_idx, 0), self.num_steps - 1)

    def dense_reason(self, sigma: float) -> str | None:
        """Why an evaluation at `sigma` must be dense; None where sparse may run."""
        step_idx = self.step_of(sigma)
        if step_idx < self.first_steps:
            return "first steps"
        if step_idx >= self.num_steps - self.last_steps:
            return "last steps"
        if not self.sigma_end - SIGMA_TOLERANCE <= sigma <= self.sigma_start + SIGMA_TOLERANCE:
            return "outside the window"
        return None
