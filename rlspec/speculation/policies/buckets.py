"""Owns what the bandits share: batch buckets, the reward of a step, and a pull that lasts to its outcome."""

from __future__ import annotations

from rlspec.speculation.policies.base import Outcome

MAX_HELD_STEPS = 8
"""Steps that a drawn arm is asked for without an outcome of it. An outcome needs two steps with the same K
(drafted, then verified) and comes one or two steps later under asynchronous scheduling; twice that means that
something else decides K at the moment (a cool-down, a floor, no room)."""
RETRY_OUTCOMES = 64
"""Outcomes of the bucket for which an arm that got none is left alone; a cool-down lasts about that long."""


def bucket_of(batch_size: int) -> int:
    """The bucket of a batch: 1, 2, 3-4, 5-8, 9-16, ... requests, numbered from 0.

    Engines pad a batch up to a captured size, so that batches up to the same power of two cost about the
    same.
    """
    return max(batch_size - 1, 0).bit_length()


def tokens_per_second(outcome: Outcome) -> float | None:
    """Tokens that all responses got, per second of the step; None for a step that took no time or had
    nobody."""
    if outcome.step_seconds <= 0 or outcome.batch_size <= 0:
        return None
    return outcome.num_emitted / outcome.step_seconds


def speedup_over_plain(outcome: Outcome, plain_seconds: float) -> float | None:
    """The step's tokens a request and second over those of plain decoding, 1 / `plain_seconds`."""
    rate = tokens_per_second(outcome)
    return None if rate is None else rate / outcome.batch_size * plain_seconds


class Pull:
    """The arm drawn in one bucket, asked for until its outcome comes.

    A step is an `Outcome` only if it verified and drafted with the same K. A bandit that drew anew in each
    step would hardly ever hear of an arm that it explores, and would hear of arm k with probability p(k)
    squared, so that importance weights 1 / p(k) would be wrong. One draw and one outcome make one round of
    the bandit.
    """

    def __init__(self) -> None:
        self._arm: int | None = None
        self._num_held = 0
        self._num_outcomes = 0
        self._refused_until: dict[int, int] = {}

    def held(self, max_draft_tokens: int) -> int | None:
        """The arm still waited for; None if a new one must be drawn."""
        if self._arm is None or self._arm > max_draft_tokens:
            return None
        if self._num_held >= MAX_HELD_STEPS:
            self._refused_until[self._arm] = self._num_outcomes + RETRY_OUTCOMES
            return None
        self._num_held += 1
        return self._arm

    def draw(self, arm: int) -> int:
        """Ask for `arm` from now on."""
        self._arm, self._num_held = arm, 1
        return arm

    def is_refused(self, arm: int) -> bool:
        """Whether the arm was asked for lately and never ran."""
        return self._refused_until.get(arm, 0) > self._num_outcomes

    def answer(self, arm: int) -> bool:
        """Note an outcome of `arm`; whether it is the one that was waited for."""
        self._num_outcomes += 1
        self._refused_until.pop(arm, None)
        if arm != self._arm:
            return False
        self._arm = None
        return True
