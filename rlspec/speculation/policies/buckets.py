"""Owns what the bandits share: batch buckets, rounds of one arm each, and the reward of a round.

choose   outlook ─► the arm of the round that goes on, else a draw ─► K
observe  outcome of that arm ─► round ── enough request-steps ──► reward ─► the bandit learns
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from rlspec.speculation.policies.base import Outcome, Outlook

ROUND_REQUEST_STEPS = 16
"""Request-steps that make one reward: one step at batch 16 or more, 16 steps at batch 1. With K = 3 and an
acceptance of .7 the tokens of a request and step spread by 1.2 around 2.5: by 49 % at batch 1, where a single
step says nothing, and by 12 % over 16 of them."""
MAX_WAITED_STEPS = 8
"""Steps that an arm is asked for without an outcome of it. An outcome needs two steps with the same K
(drafted, then verified) and comes one or two steps later under asynchronous scheduling; twice that means that
outcomes of it do not come at the moment (prompts in every step, a request without room for K)."""
RETRY_OUTCOMES = 64
"""Outcomes of the bucket for which an arm that got none is left alone; a cool-down lasts about that long."""


def bucket_of(batch_size: int) -> int:
    """The bucket of a batch: 1, 2, 3-4, 5-8, 9-16, ... requests, numbered from 0.

    Engines pad a batch up to a captured size, so that batches up to the same power of two cost about the
    same.
    """
    return max(batch_size - 1, 0).bit_length()


class Round:
    """The round of one bucket: an arm, asked for until its outcomes cover `ROUND_REQUEST_STEPS`.

    A step is an `Outcome` only if it verified and drafted with the same K. A bandit that drew anew in each
    step would hardly ever hear of an arm that it explores, and would hear of arm k with probability p(k)
    squared, so that importance weights 1 / p(k) would be wrong.

    The reward is the round's speedup over plain decoding: the tokens it gave over those that K = 0 would have
    given in its seconds, a token a request each `plain_seconds`. So it has one scale in every bucket and on
    every machine, also while a batch shrinks within its bucket. `plain_seconds` is what the last outlook
    expects of K = 0; its error scales the arms of a bucket alike, as long as it stays the same.
    """

    def __init__(self) -> None:
        self.plain_seconds = 0.0
        self._arm: int | None = None
        self._num_waited = 0
        self._num_outcomes = 0
        self._num_request_steps = 0
        self._num_emitted = 0
        self._num_plain_tokens = 0.0
        self._refused_until: dict[int, int] = {}

    def held(self, largest_arm: int) -> int | None:
        """The arm whose round goes on; None if a new one must be drawn."""
        if self._arm is None or self._arm > largest_arm:
            return None
        if self._num_waited >= MAX_WAITED_STEPS:
            self._refused_until[self._arm] = self._num_outcomes + RETRY_OUTCOMES
            return None
        self._num_waited += 1
        return self._arm

    def begin(self, arm: int) -> int:
        """Ask for `arm` from now on."""
        self._arm, self._num_waited = arm, 1
        self._num_request_steps = self._num_emitted = 0
        self._num_plain_tokens = 0.0
        return arm

    def is_refused(self, arm: int) -> bool:
        """Whether the arm was asked for lately and no outcome came."""
        return self._refused_until.get(arm, 0) > self._num_outcomes

    def add(self, outcome: Outcome) -> float | None:
        """Count an outcome; the reward if it ends the round."""
        if min(outcome.step_seconds, outcome.batch_size, self.plain_seconds) <= 0:
            return None
        self._num_outcomes += 1
        if outcome.num_draft_tokens != self._arm:
            return None
        self._num_waited = 0
        self._num_request_steps += outcome.batch_size
        self._num_emitted += outcome.num_emitted
        self._num_plain_tokens += outcome.batch_size * outcome.step_seconds / self.plain_seconds
        if self._num_request_steps < ROUND_REQUEST_STEPS:
            return None
        self._arm = None
        return self._num_emitted / self._num_plain_tokens


class BucketBandit(ABC):
    """A bandit over K for each batch bucket; what it draws and how it learns is the subclass's.

    It learns from the rounds that it drew. Outcomes of a K that something else asked for, or of a bucket that
    it has not chosen for, teach nothing.
    """

    explores = True

    def __init__(self) -> None:
        self._rounds: defaultdict[int, Round] = defaultdict(Round)

    def choose(self, outlook: Outlook) -> int:
        """The arm of the round that goes on, or a new draw."""
        bucket = bucket_of(outlook.batch_size)
        current = self._rounds[bucket]
        current.plain_seconds = outlook.step_seconds(0)
        largest_arm = self._largest_arm(outlook)
        held = current.held(largest_arm)
        if held is not None:
            return held
        arms = [k for k in range(largest_arm + 1) if not current.is_refused(k)]
        return current.begin(self._draw(bucket, arms) if arms else 0)

    def observe(self, outcome: Outcome) -> None:
        """Learn from the outcome that ends a round."""
        bucket = bucket_of(outcome.batch_size)
        reward = self._rounds[bucket].add(outcome)
        if reward is not None:
            self._learn(bucket, outcome.num_draft_tokens, reward)

    def _largest_arm(self, outlook: Outlook) -> int:
        return outlook.max_draft_tokens

    @abstractmethod
    def _draw(self, bucket: int, arms: Sequence[int]) -> int:
        """One of the arms, which are rising and at least one."""

    @abstractmethod
    def _learn(self, bucket: int, arm: int, reward: float) -> None:
        """Take in the reward of a round."""
