"""Owns TLT's bandit: epsilon-greedy on the median reward of each K, by batch bucket."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from statistics import median

from rlspec.speculation.policies.base import Outcome, Outlook
from rlspec.speculation.policies.buckets import Pull, bucket_of, tokens_per_second

EPSILON = 0.1
"""Share of rounds that draw a random arm."""
WINDOW_OUTCOMES = 16
"""Rewards kept of each arm. The median turns when half of them are new: with five arms and epsilon .1 an
arm that is only explored is seen about every 50 rounds, so that it is noticed after some 400 rounds."""


class BegMabChooser:
    """BEG-MAB: in each batch bucket, with probability epsilon a random K, else argmax of the median reward.

    Source: TLT (arXiv 2511.16665), bucketed epsilon-greedy. TLT groups its strategies by the tokens they
    verify and maps each group to a range of batch sizes. For a chain of K drafts a request verifies 1 + K
    tokens, so that a group is one K; the map is the bound B (1 + K) <= max_verify_tokens. TLT's reward is
    accepted tokens x batch / time, with "accepted" the mean tokens a request gets: `num_emitted` of a step is
    that product, so the reward here is num_emitted / step_seconds. An arm without a reward is tried first.

    Assumptions: in a bucket and over the last `window_outcomes` steps of each arm the rewards are comparable,
    the median's noise is smaller than the gap between arms. The reward counts all requests of the step, so in
    a bucket whose batch shrinks (16 to 9) the rewards of all arms fall, and an arm that was last seen at the
    larger batch looks better than it is until it is drawn again.

    Args:
        epsilon: Share of rounds that draw at random.
        window_outcomes: Rewards kept of each arm.
        max_verify_tokens: The most tokens B (1 + K) that a step may verify; None is no bound. K = 0 is always
            allowed.
        seed: Of the random draws.
    """

    explores = True

    def __init__(
        self,
        epsilon: float = EPSILON,
        window_outcomes: int = WINDOW_OUTCOMES,
        max_verify_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self._epsilon = epsilon
        self._max_verify_tokens = max_verify_tokens
        self._random = random.Random(seed)
        self._pulls: defaultdict[int, Pull] = defaultdict(Pull)
        self._rewards: defaultdict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=window_outcomes)
        )

    def choose(self, outlook: Outlook) -> int:
        """The arm waited for, or a new draw."""
        bucket = bucket_of(outlook.batch_size)
        arms = self._arms(outlook)
        pull = self._pulls[bucket]
        held = pull.held(arms[-1])
        return held if held is not None else pull.draw(self._draw(bucket, arms))

    def observe(self, outcome: Outcome) -> None:
        """Keep the reward of the K that ran, whoever chose it."""
        reward = tokens_per_second(outcome)
        if reward is not None:
            bucket = bucket_of(outcome.batch_size)
            self._pulls[bucket].answer(outcome.num_draft_tokens)
            self._rewards[bucket, outcome.num_draft_tokens].append(reward)

    def _arms(self, outlook: Outlook) -> range:
        largest = outlook.max_draft_tokens
        if self._max_verify_tokens is not None:
            affordable = self._max_verify_tokens // max(outlook.batch_size, 1) - 1
            largest = max(min(largest, affordable), 0)
        return range(largest + 1)

    def _draw(self, bucket: int, arms: range) -> int:
        pull = self._pulls[bucket]
        open_arms = [k for k in arms if not pull.is_refused(k)] or [0]
        untried = [k for k in open_arms if not self._rewards.get((bucket, k))]
        if untried:
            return untried[0]
        if self._random.random() < self._epsilon:
            return self._random.choice(open_arms)
        return max(open_arms, key=lambda k: median(self._rewards[bucket, k]))
