"""Owns the estimate of the seconds that speculation saved against plain decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlspec.types import StepFacts


@dataclass(frozen=True, slots=True)
class Savings:
    """What some steps saved. An estimate: the assumptions are those of `plain_seconds_estimate`.

    Attributes:
        saved_seconds: Plain seconds less actual seconds of the comparable steps; below 0: lost.
        plain_seconds: What plain decoding would have taken for the tokens of the comparable steps.
        actual_seconds: What they took.
        num_comparable_steps: Steps for which an estimate exists.
        num_speculating_steps: Steps that verified drafts or let the drafter propose, comparable or not.
        not_comparable_seconds: What the other steps took: neither saved nor lost.
        num_not_comparable_steps: How many they are.
    """

    saved_seconds: float
    plain_seconds: float
    actual_seconds: float
    num_comparable_steps: int
    num_speculating_steps: int
    not_comparable_seconds: float
    num_not_comparable_steps: int


def plain_seconds_estimate(facts: StepFacts) -> float | None:
    """Seconds that plain decoding would have taken for the tokens of this step; None where unknown.

    A step in which n requests got e_r tokens each stands for sum(e_r) / n plain steps of the same batch, each
    of `facts.plain_seconds`, the seconds that the controller expected of K = 0 when it chose K for this step.

    Assumes that the requests of a batch gain alike (plain decoding would serve them in full batches), and
    that the expectation, which comes from K = 0 steps, still holds. None, so neither saved nor lost: the
    controller had no expectation; no request got a token; or a prompt was computed in the step (more than
    one token beside the drafts of a request), whose cost is the same with and without speculation.
    """
    num_gaining = sum(count > 0 for count in facts.num_emitted)
    if facts.plain_seconds <= 0 or not num_gaining or not facts.is_decoding:
        return None
    return facts.plain_seconds * max(1.0, sum(facts.num_emitted) / num_gaining)


def saved_seconds(facts: StepFacts) -> float:
    """What this step saved; 0 where it cannot be compared."""
    plain = plain_seconds_estimate(facts)
    return 0.0 if plain is None else plain - facts.step_seconds


def savings(steps: Sequence[StepFacts]) -> Savings:
    """What these steps saved together."""
    estimates = [plain_seconds_estimate(facts) for facts in steps]
    compared = [(e, facts.step_seconds) for e, facts in zip(estimates, steps, strict=True) if e is not None]
    plain = math.fsum(estimate for estimate, _ in compared)
    actual = math.fsum(seconds for _, seconds in compared)
    return Savings(
        saved_seconds=plain - actual,
        plain_seconds=plain,
        actual_seconds=actual,
        num_comparable_steps=len(compared),
        num_speculating_steps=sum(facts.is_speculating for facts in steps),
        not_comparable_seconds=math.fsum(
            facts.step_seconds for e, facts in zip(estimates, steps, strict=True) if e is None
        ),
        num_not_comparable_steps=len(steps) - len(compared),
    )


def cumulative_savings(steps: Sequence[StepFacts]) -> list[float]:
    """Seconds saved up to and with each step."""
    return list(itertools.accumulate(saved_seconds(facts) for facts in steps))
