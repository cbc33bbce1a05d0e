"""Owns the optimistic bandit: the K whose reward could still be the best, by batch bucket."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from rlspec.speculation.policies.arguments import at_least_0, whole
from rlspec.speculation.policies.buckets import BucketBandit

REWARD_SPREAD = 0.15
"""Standard deviation of one reward: 12 % of a speedup of 1.25, see `ROUND_REQUEST_STEPS`."""
WINDOW_ROUNDS = 300
"""Rewards of a bucket that count, of all arms together. Actor and drafter change with each update, some
hundreds of steps apart. An arm that is .3 worse than the best takes 2 x .15^2 ln(300) / .3^2, 3 of them."""


class _Bucket:
    """The rewards of one batch bucket that count, summed by arm."""

    def __init__(self) -> None:
        self.num_rewards: defaultdict[int, int] = defaultdict(int)
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._window: deque[tuple[int, float]] = deque()

    def add(self, arm: int, reward: float, window_rounds: int | None) -> None:
        """Count a reward and forget the one that leaves the window."""
        self._window.append((arm, reward))
        self._count(arm, reward, 1)
        if window_rounds is not None and len(self._window) > window_rounds:
            self._count(*self._window.popleft(), -1)

    def best(self, arms: Sequence[int], reward_spread: float) -> int:
        """The arm of the highest index; all have a reward."""
        width = reward_spread * math.sqrt(2.0 * math.log(len(self._window)))

        def index(arm: int) -> float:
            num_rewards = self.num_rewards[arm]
            return self._sums[arm] / num_rewards + width / math.sqrt(num_rewards)

        return max(arms, key=index)

    def _count(self, arm: int, reward: float, sign: int) -> None:
        self.num_rewards[arm] += sign
        self._sums[arm] += sign * reward


class UcbChooser(BucketBandit):
    """UCBSpec: in each batch bucket argmax over k of mean(k) + reward_spread sqrt(2 ln t / n(k)).

    mean(k) is the arm's mean reward, n(k) how many it has, t those of the bucket; the reward is `Round`'s
    speedup over plain decoding. An arm without a reward is tried first, the smallest K first.

    Sources: BanditSpec (arXiv 2505.15141), K as an arm with UCB. The index is the one for rewards of standard
    deviation sigma = reward_spread with sub-Gaussian tails (Lattimore and Szepesvari, Bandit Algorithms,
    chapter 8); UCB1's own, for rewards in [0, 1], stands for sigma = 1. Counting only the last rewards is
    SW-UCB (arXiv 0805.3415); BanditSpec has no window. Assumption: within a bucket and a window the rewards
    of an arm come from one distribution; a `reward_spread` below the real one may settle on the wrong arm.

    Args:
        reward_spread: Standard deviation of one reward.
        window_rounds: Rewards of a bucket that count; None counts all.
    """

    def __init__(
        self, reward_spread: float = REWARD_SPREAD, window_rounds: int | None = WINDOW_ROUNDS
    ) -> None:
        super().__init__()
        self._reward_spread = at_least_0("reward_spread", reward_spread)
        self._window_rounds = window_rounds
        if window_rounds is not None:
            whole("window_rounds", window_rounds, 1)
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def _draw(self, bucket: int, arms: Sequence[int]) -> int:
        seen = self._buckets[bucket]
        untried = next((k for k in arms if not seen.num_rewards[k]), None)
        return untried if untried is not None else seen.best(arms, self._reward_spread)

    def _learn(self, bucket: int, arm: int, reward: float) -> None:
        self._buckets[bucket].add(arm, reward, self._window_rounds)
