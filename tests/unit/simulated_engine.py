"""An engine of formulas for tests of the controller: seeded, noisy, with one policy in its loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlspec.config_speculation import SpeculationConfig
from rlspec.speculation.build import adaptive_spec, build_policy
from rlspec.speculation.guard import GuardedPolicy
from rlspec.speculation.policies.base import DraftLengthPolicy
from rlspec.types import Load, StepFacts

PROMPT_TOKENS = 100
STALL_SECONDS = 1.4


def controller(name: str = "goodput", max_draft_tokens: int = 5, **settings: float) -> GuardedPolicy:
    """An adaptive policy with the configuration's defaults."""
    config = SpeculationConfig()
    fields = {
        "max_draft_tokens": max_draft_tokens,
        "switch_margin": config.switch_margin,
        "max_slowdown": config.max_slowdown,
        "exploration_fraction": config.exploration_fraction,
        "catch_up_tokens": config.catch_up_tokens,
    }
    policy = build_policy(adaptive_spec(name, {}, {**fields, **settings}, draft_fraction=0.15))
    assert isinstance(policy, GuardedPolicy)
    return policy


@dataclass
class SimulatedEngine:
    """What a step costs and what is accepted. The defaults are those of two CPU cores.

    Attributes:
        rates: Conditional acceptance by position, for a step index.
        base_seconds, token_seconds: Of the target's forward.
        draft_seconds: Of a draft token, and of a draft token a request.
        noise: Standard deviation of the logarithm of a step's seconds.
        stall_share: Share of steps that take STALL_SECONDS longer.
    """

    rates: Callable[[int], Sequence[float]]
    base_seconds: float = 0.075
    token_seconds: float = 0.0046
    draft_seconds: tuple[float, float] = (0.012, 0.0006)
    noise: float = 0.08
    stall_share: float = 0.0
    num_steps: int = field(default=0, init=False)

    def run(
        self, policy: DraftLengthPolicy, lengths: Sequence[int], seed: int = 0, max_steps: int = 10_000
    ) -> list[StepFacts]:
        """One response of each length, all begun at once."""
        generator = random.Random(seed)
        left = {f"r{index}": length for index, length in enumerate(lengths)}
        contexts = dict.fromkeys(left, PROMPT_TOKENS)
        offered = dict.fromkeys(left, 0)
        steps: list[StepFacts] = []
        clock = 0.0
        while left and len(steps) < max_steps:
            ids = tuple(left)
            drafted = tuple(offered[name] for name in ids)
            num_tokens = len(ids) * PROMPT_TOKENS if not steps else len(ids) + sum(drafted)
            load = Load(
                step_index=len(steps),
                num_waiting=0,
                num_scheduled_tokens=num_tokens,
                request_ids=ids,
                context_lengths=tuple(contexts[name] for name in ids),
                num_room=tuple(max(0, left[name] - 2) for name in ids),
            )
            decision = policy.decide(load)
            k = decision.num_draft_tokens
            seconds = self.step_seconds(num_tokens, k, len(ids)) * generator.lognormvariate(0.0, self.noise)
            seconds += STALL_SECONDS * (generator.random() < self.stall_share)
            rates = self.rates(self.num_steps)
            accepted = tuple(_accepted(generator, rates, count) for count in drafted)
            emitted = tuple(min(count + 1, left[name]) for name, count in zip(ids, accepted, strict=True))
            steps.append(
                StepFacts(
                    step_index=len(steps),
                    started_seconds=clock,
                    step_seconds=seconds,
                    num_scheduled_tokens=num_tokens,
                    num_waiting=0,
                    num_draft_tokens=k,
                    reason=decision.reason,
                    expected_tokens=decision.expected_tokens,
                    expected_seconds=decision.expected_seconds,
                    plain_seconds=decision.plain_seconds,
                    predicted_seconds=decision.predicted_seconds,
                    request_ids=ids,
                    num_offered=drafted,
                    num_drafted=drafted,
                    num_accepted=accepted,
                    num_emitted=emitted,
                    context_lengths=load.context_lengths,
                )
            )
            policy.observe(steps[-1])
            clock += seconds
            self.num_steps += 1
            caps = decision.caps or (k,) * len(ids)
            for name, count, room, cap in zip(ids, emitted, load.num_room, caps, strict=True):
                left[name] -= count
                contexts[name] += count
                offered[name] = min(k, room, cap)
                if left[name] <= 0:
                    del left[name]
        return steps

    def step_seconds(self, num_tokens: int, k: int, batch_size: int) -> float:
        """Without noise."""
        draft, draft_a_request = self.draft_seconds
        verify = self.base_seconds + self.token_seconds * num_tokens
        return verify + k * (draft + draft_a_request * batch_size)

    def best_k(self, batch_size: int, max_draft_tokens: int = 5) -> int:
        """K of the highest true goodput."""

        def goodput(k: int) -> float:
            survival, tokens = 1.0, 1.0
            for rate in self.rates(self.num_steps)[:k]:
                survival *= rate
                tokens += survival
            return tokens / self.step_seconds(batch_size * (1 + k), k, batch_size)

        return max(range(max_draft_tokens + 1), key=goodput)


def seconds_of(steps: Sequence[StepFacts]) -> float:
    """Seconds of all steps."""
    return sum(step.step_seconds for step in steps)


def heavy_tailed(count: int = 32, median: int = 100, longest: int = 1000, seed: int = 1) -> list[int]:
    """Log-normal lengths with one at the longest."""
    generator = random.Random(seed)
    lengths = [round(median * generator.lognormvariate(0.0, 0.8)) for _ in range(count - 1)]
    return [longest, *(min(max(length, 10), longest) for length in lengths)]


def _accepted(generator: random.Random, rates: Sequence[float], num_drafted: int) -> int:
    count = 0
    while count < num_drafted and generator.random() < rates[count]:
        count += 1
    return count
