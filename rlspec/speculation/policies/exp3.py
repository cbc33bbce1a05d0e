"""Owns the adversarial bandit: exponential weights over K, by batch bucket."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence

from rlspec.speculation.policies.arguments import at_least_0, fraction, whole
from rlspec.speculation.policies.buckets import BucketBandit

LEARNING_RATE = 0.05
"""Log weight a round and unit of speedup: two arms that differ by .3 part by .015 a round."""
EXPLORATION = 0.05
"""Share of rounds drawn uniformly: bounds 1 / p, the factor on the reward of a rarely drawn arm."""
MAX_MOVE = 1.0
"""The most that one reward moves a log weight, so that no lucky step of a rarely drawn arm decides. Regret
bounds of exponential weights ask for the same."""
MAX_DEPTH = 6.0
"""How far a log weight may lie below the best: a weight of 1 / 400, below what `EXPLORATION` draws anyway. It
keeps the way back short for an arm that becomes the best, what the sharing of EXP3.S is for."""
BASELINE_ROUNDS = 32
"""Rewards that the baseline averages over."""


class _Bucket:
    """The weights of one batch bucket, and the draw whose reward is waited for."""

    def __init__(self) -> None:
        self.drawn_probability = 1.0
        self._log_weights: defaultdict[int, float] = defaultdict(float)
        """By K, at most 0: a K that is new starts level with the best."""
        self._baseline = 0.0
        self._num_rewards = 0

    def probabilities(self, arms: Sequence[int], exploration: float) -> list[float]:
        """Of each arm: its share of the weight, mixed with the uniform distribution."""
        weights = [math.exp(self._log_weights[arm]) for arm in arms]
        total = sum(weights)
        return [(1 - exploration) * weight / total + exploration / len(arms) for weight in weights]

    def learn(self, arm: int, reward: float, learning_rate: float) -> None:
        """Move the arm's log weight by its weighted advantage over the baseline; the largest is then 0."""
        self._num_rewards += 1
        if self._num_rewards == 1:
            self._baseline = reward
        move = learning_rate * (reward - self._baseline) / self.drawn_probability
        self._log_weights[arm] += min(max(move, -MAX_MOVE), MAX_MOVE)
        self._baseline += (reward - self._baseline) / min(self._num_rewards, BASELINE_ROUNDS)
        top = max(self._log_weights.values())
        for k, value in self._log_weights.items():
            self._log_weights[k] = max(value - top, -MAX_DEPTH)


class Exp3Chooser(BucketBandit):
    """EXP3Spec: in each batch bucket draw k with p(k) = (1 - g) w(k) / sum of w + g / arms.

    After the reward x of the drawn k, `Round`'s speedup over plain decoding: w(k) *= exp(learning_rate
    (x - b) / p(k)), with b the mean of the rewards before it. (x - b) / p(k), and 0 for the others, is an
    unbiased estimate of every arm's speedup less b; b moves all weights alike, so that it changes nothing but
    the variance: without it the arm that is drawn most would move by its whole reward in each round.

    Sources: BanditSpec (arXiv 2505.15141), EXP3Spec: exponential weights over configurations; Auer et al.
    2002 for the mixture. Ours are the baseline and the two limits, see the constants. Assumption: none on how
    rewards come about, which is why it learns slowest of the three bandits.

    Args:
        learning_rate, exploration: See the constants; `exploration` is g above.
        seed: Of the random draws.
    """

    def __init__(
        self, learning_rate: float = LEARNING_RATE, exploration: float = EXPLORATION, seed: int = 0
    ) -> None:
        super().__init__()
        self._learning_rate = at_least_0("learning_rate", learning_rate)
        self._exploration = fraction("exploration", exploration)
        self._random = random.Random(whole("seed", seed, 0))
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def _draw(self, bucket: int, arms: Sequence[int]) -> int:
        known = self._buckets[bucket]
        probabilities = known.probabilities(arms, self._exploration)
        place = self._random.choices(range(len(arms)), probabilities)[0]
        known.drawn_probability = probabilities[place]
        return arms[place]

    def _learn(self, bucket: int, arm: int, reward: float) -> None:
        self._buckets[bucket].learn(arm, reward, self._learning_rate)
