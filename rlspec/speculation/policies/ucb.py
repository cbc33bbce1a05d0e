"""Owns the optimistic bandit: the K whose reward could still be the best, by batch bucket."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque

from rlspec.speculation.policies.base import Outcome, Outlook
from rlspec.speculation.policies.buckets import Pull, bucket_of, speedup_over_plain

CONFIDENCE = 0.25
"""Width of the index in speedups: twice the standard deviation of one step's speedup. With 16 requests and
K = 3 at an acceptance of .7 a step's tokens spread by .3 around 2.5: a standard deviation of 12 %."""
WINDOW_OUTCOMES = 500
"""Outcomes of a bucket that count. Actor and drafter change with each update, some hundreds of steps apart;
every arm is tried at least once a window, which costs below 2 % of the outcomes with K up to 8."""


class _Bucket:
    """The outcomes of one batch bucket that count, summed by arm."""

    def __init__(self) -> None:
        self.pull = Pull()
        self.plain_seconds: float | None = None
        self.num_rewards: Counter[int] = Counter()
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._window: deque[tuple[int, float]] = deque()

    def add(self, arm: int, reward: float, window_outcomes: int | None) -> None:
        """Count a reward and forget the one that leaves the window."""
        self._count(arm, reward, 1)
        if window_outcomes is not None:
            self._window.append((arm, reward))
            if len(self._window) > window_outcomes:
                self._count(*self._window.popleft(), -1)

    def index(self, arm: int, confidence: float) -> float:
        """UCB1: the arm's mean, plus what its number of rewards leaves open."""
        num_rewards = self.num_rewards[arm]
        mean = self._sums[arm] / num_rewards
        return mean + confidence * math.sqrt(2 * math.log(self.num_rewards.total()) / num_rewards)

    def _count(self, arm: int, reward: float, sign: int) -> None:
        self.num_rewards[arm] += sign
        self._sums[arm] += sign * reward


class UcbChooser:
    """UCBSpec: in each batch bucket argmax over k of mean(k) + confidence sqrt(2 ln t / n(k)).

    mean(k) is the arm's mean reward, n(k) its rewards, t the rewards of the bucket. The reward is the step's
    speedup over plain decoding: tokens a request and second, divided by those that the bucket's last outlook
    expects of K = 0, 1 / step_seconds(0). So it has the same scale in every bucket and on every machine, and
    `confidence` is one figure. An error in that expectation scales all arms of a bucket alike; where it is
    corrected while learning, the rewards before the correction keep the old scale until they leave the
    window. An arm without a reward is tried first, the smallest K first.

    Sources: BanditSpec (arXiv 2505.15141), K as an arm with UCB; UCB1's index is for rewards in [0, 1], whose
    standard deviation is at most 1/2: for another sigma the width is 2 sigma, which is `confidence`. Counting
    only the last outcomes is SW-UCB (arXiv 0805.3415); BanditSpec has no window. Assumption: within a bucket
    and a window the rewards of an arm are drawn from one distribution; a `confidence` below the real spread
    may settle on the wrong arm.

    Args:
        confidence: Twice the standard deviation of one reward.
        window_outcomes: Outcomes of a bucket that count; None counts all.
    """

    explores = True

    def __init__(self, confidence: float = CONFIDENCE, window_outcomes: int | None = WINDOW_OUTCOMES) -> None:
        self._confidence = confidence
        self._window_outcomes = window_outcomes
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def choose(self, outlook: Outlook) -> int:
        """The arm waited for, or the arm of the highest index."""
        bucket = self._buckets[bucket_of(outlook.batch_size)]
        bucket.plain_seconds = outlook.step_seconds(0)
        held = bucket.pull.held(outlook.max_draft_tokens)
        if held is not None:
            return held
        return bucket.pull.draw(self._best(bucket, outlook.max_draft_tokens))

    def observe(self, outcome: Outcome) -> None:
        """Keep the reward of the K that ran, whoever chose it; not of a bucket that had no outlook yet."""
        bucket = self._buckets[bucket_of(outcome.batch_size)]
        if bucket.plain_seconds is None:
            return
        reward = speedup_over_plain(outcome, bucket.plain_seconds)
        if reward is not None:
            bucket.pull.answer(outcome.num_draft_tokens)
            bucket.add(outcome.num_draft_tokens, reward, self._window_outcomes)

    def _best(self, bucket: _Bucket, max_draft_tokens: int) -> int:
        arms = [k for k in range(max_draft_tokens + 1) if not bucket.pull.is_refused(k)] or [0]
        untried = [k for k in arms if not bucket.num_rewards[k]]
        return untried[0] if untried else max(arms, key=lambda k: bucket.index(k, self._confidence))
