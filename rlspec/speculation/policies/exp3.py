"""Owns the adversarial bandit: exponential weights over K, by batch bucket."""

from __future__ import annotations

import math
import random
from collections import defaultdict

from rlspec.speculation.policies.base import Outcome, Outlook
from rlspec.speculation.policies.buckets import Pull, bucket_of, speedup_over_plain

LEARNING_RATE = 0.1
"""Weight of one loss in the exponent. The log weights of two arms that differ by .1 (a speedup of .3) part by
.01 a round: some hundreds of rounds, as many as steps between two updates of the actor."""
EXPLORATION = 0.05
"""Share of rounds drawn uniformly: bounds 1 / p, the factor on the loss of a rarely drawn arm."""
SHARE = 0.001
"""Share of all weight that each round spreads evenly. It keeps the log weights within ln(arms / share) of
each other (8.5 with five arms), which is how far an arm that becomes the best has to come back."""
MAX_SPEEDUP = 3.0
"""Speedup that is worth a reward of 1; more is clipped. The largest that the systems we follow report is 3.06
(OSD); a larger figure makes the same gap between arms a smaller reward."""


class _Bucket:
    """The weights of one batch bucket, and the draw whose outcome is waited for."""

    def __init__(self) -> None:
        self.pull = Pull()
        self.plain_seconds: float | None = None
        self.drawn_probability = 1.0
        self.log_weights: list[float] = []
        """By K; the largest is 0 after each round, so that a K which is new starts level with the best."""

    def probabilities(self, num_arms: int, exploration: float) -> list[float]:
        """Of each arm: its share of the weight, mixed with the uniform distribution."""
        while len(self.log_weights) < num_arms:
            self.log_weights.append(0.0)
        top = max(self.log_weights[:num_arms])
        weights = [math.exp(value - top) for value in self.log_weights[:num_arms]]
        total = sum(weights)
        return [(1 - exploration) * weight / total + exploration / num_arms for weight in weights]

    def discount(self, arm: int, scaled_loss: float, share: float) -> None:
        """Take the loss off the arm's log weight, spread the share, and put the largest back to 0."""
        self.log_weights[arm] -= scaled_loss
        top = max(self.log_weights)
        weights = [math.exp(value - top) for value in self.log_weights]
        spread = share * sum(weights) / len(weights)
        shared = [(1 - share) * weight + spread for weight in weights]
        largest = max(shared)
        # exp() of a log weight far below the top is 0; without a share it stays at the smallest float.
        smallest = math.ulp(0.0)
        self.log_weights = [math.log(max(weight / largest, smallest)) for weight in shared]


class Exp3Chooser:
    """EXP3Spec: in each batch bucket draw k with p(k) = (1 - g) w(k) / sum of w + g / arms.

    After the outcome of the drawn k: w(k) *= exp(-learning_rate (1 - x) / p(k)), with the reward x = speedup
    over plain decoding / `max_speedup`, clipped to [0, 1] (the speedup as in `UcbChooser`); (1 - x) / p(k) is
    an unbiased estimate of the loss of every arm. Then w(k) = (1 - share) w(k) + share x mean of w.

    Sources: BanditSpec (arXiv 2505.15141), EXP3Spec: exponential weights over configurations; the sharing is
    EXP3.S of Auer et al. 2002, for a best arm that changes, and 0 turns it off. Assumption: none on how
    rewards come about, which is why it learns slowest of the three bandits. Unlike the other two it learns
    from its own draws only: an outcome that something else caused has no probability to weigh it with.

    Args:
        learning_rate, exploration, share, max_speedup: See the constants; `exploration` is g above.
        seed: Of the random draws.
    """

    explores = True

    def __init__(
        self,
        learning_rate: float = LEARNING_RATE,
        exploration: float = EXPLORATION,
        share: float = SHARE,
        max_speedup: float = MAX_SPEEDUP,
        seed: int = 0,
    ) -> None:
        self._learning_rate = learning_rate
        self._exploration = exploration
        self._share = share
        self._max_speedup = max_speedup
        self._random = random.Random(seed)
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def choose(self, outlook: Outlook) -> int:
        """The arm waited for, or a new draw."""
        bucket = self._buckets[bucket_of(outlook.batch_size)]
        bucket.plain_seconds = outlook.step_seconds(0)
        held = bucket.pull.held(outlook.max_draft_tokens)
        if held is not None:
            return held
        probabilities = bucket.probabilities(outlook.max_draft_tokens + 1, self._exploration)
        arm = self._random.choices(range(len(probabilities)), probabilities)[0]
        bucket.drawn_probability = probabilities[arm]
        return bucket.pull.draw(arm)

    def observe(self, outcome: Outcome) -> None:
        """Learn from the outcome of the drawn arm."""
        bucket = self._buckets[bucket_of(outcome.batch_size)]
        if bucket.plain_seconds is None:
            return
        speedup = speedup_over_plain(outcome, bucket.plain_seconds)
        if speedup is None or not bucket.pull.answer(outcome.num_draft_tokens):
            return
        reward = min(max(speedup / self._max_speedup, 0.0), 1.0)
        scaled_loss = self._learning_rate * (1 - reward) / bucket.drawn_probability
        bucket.discount(outcome.num_draft_tokens, scaled_loss, self._share)
