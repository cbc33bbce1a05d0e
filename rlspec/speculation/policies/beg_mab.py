"""Owns TLT's bandit: epsilon-greedy on the median reward of each K, by batch bucket."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from rlspec.speculation.policies.arguments import fraction, whole
from rlspec.speculation.policies.base import Outlook
from rlspec.speculation.policies.buckets import BucketBandit

EPSILON = 0.1
"""Share of rounds that draw a random arm."""
WINDOW_ROUNDS = 16
"""Rewards kept of each arm. The median turns when half of them are new: with six arms and epsilon .1 an arm
that is only explored is seen about every 60 rounds, so that its change is noticed after some 500 rounds."""


class BegMabChooser(BucketBandit):
    """BEG-MAB: in each batch bucket, with probability epsilon a random K, else argmax of the median reward.

    Source: TLT (arXiv 2511.16665), bucketed epsilon-greedy. TLT groups its strategies by the tokens they
    verify and maps each group to a range of batch sizes. For a chain of K drafts a request verifies 1 + K
    tokens, so that a group is one K; the map is the bound B (1 + K) <= max_verify_tokens. TLT's reward is
    accepted tokens x batch / time; the speedup of `Round` is that over what K = 0 would give, the same order
    of the arms at one batch size, and the only one that compares rewards while a batch shrinks within its
    bucket. An arm without a reward is tried first, the smallest K first.

    Assumption: in a bucket and over the last `window_rounds` rewards of each arm these come from one
    distribution, whose median is in the order of its mean; the round's 16 request-steps see to the latter.

    Args:
        epsilon: Share of rounds that draw at random.
        window_rounds: Rewards kept of each arm.
        max_verify_tokens: The most tokens B (1 + K) that a step may verify; None is no bound. K = 0 is always
            allowed.
        seed: Of the random draws.
    """

    def __init__(
        self,
        epsilon: float = EPSILON,
        window_rounds: int = WINDOW_ROUNDS,
        max_verify_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._epsilon = fraction("epsilon", epsilon)
        whole("window_rounds", window_rounds, 1)
        if max_verify_tokens is not None:
            whole("max_verify_tokens", max_verify_tokens, 1)
        self._max_verify_tokens = max_verify_tokens
        self._random = random.Random(whole("seed", seed, 0))
        self._rewards: defaultdict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=window_rounds)
        )

    def _largest_arm(self, outlook: Outlook) -> int:
        if self._max_verify_tokens is None:
            return outlook.max_draft_tokens
        affordable = self._max_verify_tokens // max(outlook.batch_size, 1) - 1
        return max(min(outlook.max_draft_tokens, affordable), 0)

    def _draw(self, bucket: int, arms: Sequence[int]) -> int:
        untried = next((k for k in arms if (bucket, k) not in self._rewards), None)
        if untried is not None:
            return untried
        if self._random.random() < self._epsilon:
            return self._random.choice(arms)
        return max(arms, key=lambda k: median(self._rewards[bucket, k]))

    def _learn(self, bucket: int, arm: int, reward: float) -> None:
        self._rewards[bucket, arm].append(reward)
