"""Call log: what ran in each attention call of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

MAX_EVALUATIONS = 512  # of which the log knows every layer; it counts beyond them

Call = tuple[str, str]  # (kind, reason); kind as in `plan.Decision`, or what a host adds to these


@dataclass
class Evaluation:
    """One evaluation of the model.

    Attributes:
        step_idx: The denoising step it belongs to.
        calls: What ran in each layer; None where attention was not called.
    """

    step_idx: int
    calls: list[Call | None]


@dataclass(eq=False)
class CallLog:
    """What ran in each attention call of a run; numbers and words only. Safe to share by threads.

    Attributes:
        calls: Attention calls so far.
        evaluations: Evaluations that reached a layer, in order; a cache that answers for the model
            makes one that reaches none.
        num_evaluations: How many there were, those beyond MAX_EVALUATIONS included.
    """

    calls: Counter[Call] = field(default_factory=Counter)
    evaluations: list[Evaluation] = field(default_factory=list)
    num_evaluations: int = 0
    _kept_shares: list[float] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def begin(self, step_idx: int, num_layers: int) -> Evaluation:
        """Start an evaluation; its first call brings it into the log."""
        return Evaluation(step_idx, [None] * num_layers)

    def count(
        self, evaluation: Evaluation, layer_idx: int, call: Call, kept_share: float | None = None
    ) -> bool:
        """Note a call.

        Args:
            evaluation: From `begin`.
            layer_idx: The layer.
            call: What ran there.
            kept_share: Share of tile pairs computed, where tiles were routed.

        Returns:
            Whether it is the first of its kind and reason.
        """
        with self._lock:
            if not any(evaluation.calls):
                self.num_evaluations += 1
                if len(self.evaluations) < MAX_EVALUATIONS:
                    self.evaluations.append(evaluation)
            self.calls[call] += 1
            evaluation.calls[layer_idx] = call
            if kept_share is not None:
                self._kept_shares.append(kept_share)
            return self.calls[call] == 1

    @property
    def kept_share(self) -> float | None:
        """Mean share of tile pairs that routed calls computed; None without such a call."""
        return sum(self._kept_shares) / len(self._kept_shares) if self._kept_shares else None

    @property
    def kept_share_of_all_calls(self) -> float | None:
        """The same over every call, where a dense one computes all; None without a call."""
        num_calls = sum(self.calls.values())
        if num_calls == 0:
            return None
        return (sum(self._kept_shares) + num_calls - len(self._kept_shares)) / num_calls
