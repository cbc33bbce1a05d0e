"""A world of formulas for tests of choosers: fixed costs and acceptance, seeded noise, one outcome each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from rlspec.speculation.policies import Chooser
from rlspec.speculation.policies.base import Outcome, Outlook

PLAIN_SECONDS = 0.02
NOISE = 0.1
"""Standard deviation of a step's seconds, as a fraction of them."""


@dataclass(frozen=True)
class World:
    """Conditional acceptance by position, and seconds of a step by K over those of K = 0."""

    acceptance: tuple[float, ...]
    cost: tuple[float, ...]

    @property
    def tokens(self) -> tuple[float, ...]:
        """Expected tokens a request and step, by K."""
        return tuple(accumulate(accumulate((1.0, *self.acceptance), mul)))

    @property
    def speedups(self) -> list[float]:
        """Over plain decoding, by K."""
        return [tokens / cost for tokens, cost in zip(self.tokens, self.cost, strict=True)]

    @property
    def best_k(self) -> int:
        """K of the largest speedup."""
        return max(range(len(self.cost)), key=lambda k: self.speedups[k])

    def outlook(self, batch_size: int) -> Outlook:
        """What is true of each K; the drafter's part is a third of what K adds."""
        added = [PLAIN_SECONDS * (cost - 1.0) for cost in self.cost]
        return Outlook(
            batch_size=batch_size,
            num_draft_tokens=0,
            tokens=self.tokens,
            verify_seconds=tuple(PLAIN_SECONDS + 2.0 / 3.0 * seconds for seconds in added),
            draft_seconds=tuple(seconds / 3.0 for seconds in added),
        )

    def outcome(self, k: int, batch_size: int, generator: random.Random) -> Outcome:
        """A noisy step at K."""
        num_accepted = 0
        for _ in range(batch_size):
            position = 0
            while position < k and generator.random() < self.acceptance[position]:
                position += 1
            num_accepted += position
        seconds = PLAIN_SECONDS * self.cost[k] * max(generator.gauss(1.0, NOISE), 0.2)
        return Outcome(batch_size, k, batch_size + num_accepted, batch_size * k, num_accepted, seconds)


PAYS = World((0.9, 0.9, 0.1, 0.1, 0.1), (1.0, 1.1, 1.2, 1.5, 1.8, 2.1))
"""K = 2 gives 2.26 times plain decoding, the next best 1.86 times."""
NONE_PAYS = World((0.05,) * 5, (1.0, 1.2, 1.4, 1.6, 1.8, 2.0))
"""K = 1 gives 0.88 times plain decoding, larger K less."""


def play(
    chooser: Chooser, world: World, num_steps: int, generator: random.Random, batch_size: int = 16
) -> list[int]:
    """The K chosen step by step; at batch 16 each step is a round of a bandit."""
    outlook = world.outlook(batch_size)
    chosen = []
    for _ in range(num_steps):
        k = chooser.choose(outlook)
        chosen.append(k)
        chooser.observe(world.outcome(k, batch_size, generator))
    return chosen


def share(chosen: Sequence[int], k: int) -> float:
    """Share of the choices that are K."""
    return chosen.count(k) / len(chosen)
