"""Owns when a better K is good enough to be taken: hysteresis, and the price of waking the drafter."""

from __future__ import annotations

from dataclasses import dataclass

from rlspec.speculation.policies.base import Outlook
from rlspec.speculation.robust import RobustMean

PRIOR_TOKEN_FRACTION = 1.0 / 64.0
"""Seconds to catch up on one token, over the seconds of drafting one token for one request: a guess, as a
drafter's forward is memory-bound up to some 64 tokens."""

MIN_HORIZON_STEPS = 16
"""A load is expected to last so many more steps at least."""


def settle(outlook: Outlook, chosen: int, margin: float, price_seconds: float, horizon_steps: int) -> int:
    """The K to take: the chosen one, or the one before where a change does not pay for itself.

    From 0 up: K must gain more than `margin` and earn the price of waking the drafter within the horizon. To
    another K above 0: more than `margin`. To 0: at once, as promised to be no slower than plain. So between
    0 and `margin` the state before stays, which is the hysteresis.

    Args:
        outlook: What is expected of each K; its `num_draft_tokens` is the K before.
        chosen: What the policy would take.
        margin: A fraction of the goodput.
        price_seconds: Of the first step with drafts after K = 0.
        horizon_steps: For how many more steps the load is expected to last.
    """
    before = min(outlook.num_draft_tokens, outlook.max_draft_tokens)
    if chosen in (before, 0):
        return chosen
    plain = outlook.goodput(0)
    if before and outlook.goodput(before) >= plain:
        return chosen if outlook.goodput(chosen) > (1.0 + margin) * outlook.goodput(before) else before
    saved_seconds = outlook.tokens[chosen] * outlook.step_seconds(0) - outlook.step_seconds(chosen)
    pays = outlook.goodput(chosen) > (1.0 + margin) * plain
    return chosen if pays and (before or saved_seconds * horizon_steps > price_seconds) else 0


@dataclass(slots=True)
class WakePrice:
    """Seconds that the first drafting step after K = 0 takes longer, learnt by token caught up on.

    Attributes:
        window_tokens: Tokens a request that are caught up on at most; 0: waking is free.
    """

    window_tokens: int
    _token_seconds: RobustMean | None = None
    _missed_steps: int = 0
    _num_caught_up: int = 0
    _steps_since_growth: int = 0
    _batch_size: int = 0

    def observe(self, batch_size: int, k: int) -> None:
        """Count a decided step: how long the drafter is idle, and how long the batch has not grown."""
        if k and self._missed_steps:
            self._num_caught_up = self.num_missed_tokens(batch_size)
        self._missed_steps = 0 if k else self._missed_steps + 1
        self._steps_since_growth = 0 if batch_size > self._batch_size else self._steps_since_growth + 1
        self._batch_size = batch_size

    def num_missed_tokens(self, batch_size: int) -> int:
        """Tokens that the drafter would catch up on now."""
        return min(self._missed_steps, self.window_tokens) * batch_size

    def learn(self, excess_seconds: float, step_seconds: float) -> None:
        """Learn from the step that caught up: its seconds beyond those of drafting alone, and all of them."""
        if self._num_caught_up:
            if self._token_seconds is None:
                self._token_seconds = RobustMean()
            sample = max(excess_seconds, 0.0) / self._num_caught_up
            self._token_seconds.update(sample, step_seconds / self._num_caught_up, firm=True)

    def seconds(self, batch_size: int, draft_seconds: float) -> float:
        """The price now; `draft_seconds`: of K = 1 at this batch, for the guess before anything is known."""
        if self._token_seconds is not None:
            token_seconds = self._token_seconds.value
        else:
            token_seconds = PRIOR_TOKEN_FRACTION * draft_seconds / max(batch_size, 1)
        return self.num_missed_tokens(batch_size) * token_seconds

    def horizon_steps(self) -> int:
        """Steps that the present load is expected to last: as long as it has lasted already.

        Lindy's rule, exact in the mean for lengths with a heavy (Pareto, exponent 2) tail; for log-normal
        lengths it is near in the tail, where it matters.
        """
        return max(self._steps_since_growth, MIN_HORIZON_STEPS)
