"""Owns the evidence on one drafter version: discounted counts, and the acceptance that they make likely.

Shape suffixes: K positions of a draft (entry 0 is position 1), R rows of evidence (0 global, then one a
bucket), C columns of counts (`ACCEPTED` to `DRAFT_TRIALS`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from rlspec.speculation.change_detector import Counts

PRIOR_RATE = 0.5
PRIOR_WEIGHT = 2.0
"""Request-steps that a prior counts for: few, so that twenty steps of one request overrule any promise."""
MIN_PRIOR = 0.02
"""Priors stay so far from 0 and 1: at 0 or 1 a posterior without evidence would claim to be certain."""
BUCKET_PRIOR_WEIGHT = 16.0
"""Request-steps that the global rate counts for in a bucket."""
NUM_DEVIATIONS = 1.64
"""Width of the upper bound: 5 % of a normal distribution lies above it."""

ACCEPTED, ACCEPT_TRIALS, DRAFTED, DRAFT_TRIALS = range(4)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Shares of request-steps by draft position, non-increasing: accepted at least so far, and drafted so
    far."""

    mean: tuple[float, ...]
    upper: tuple[float, ...]
    drafted: tuple[float, ...]


@dataclass(slots=True)
class Evidence:
    """What is known of one drafter version: conditional rates promised for the first positions, and
    counts."""

    accept_prior: tuple[float, ...]
    draft_prior: tuple[float, ...]
    counts_RCK: Counts

    def rate(self, row: int) -> float:
        """Posterior mean of position 1."""
        prior = self.accept_prior[0] if self.accept_prior else PRIOR_RATE
        global_, own = self.counts_RCK[0], self.counts_RCK[row]
        weight = PRIOR_WEIGHT + float(global_[ACCEPT_TRIALS, 0])
        rate = (PRIOR_WEIGHT * prior + float(global_[ACCEPTED, 0])) / weight
        weight = min(BUCKET_PRIOR_WEIGHT, weight)
        return (weight * rate + float(own[ACCEPTED, 0])) / (weight + float(own[ACCEPT_TRIALS, 0]))

    def rates(self, row: int, column: int, default: float | None) -> list[tuple[float, float]]:
        """Posterior mean and weight of each conditional rate, in the order of positions.

        Beta posterior of a Bernoulli rate with discounted counts. A position without a promise takes the mean
        of the one before as prior, so that positions never offered continue geometrically; `default` is the
        prior of position 1, or of all of them where it is None, which is then 1.
        """
        promised = self.accept_prior if column == ACCEPTED else self.draft_prior
        global_, own = self.counts_RCK[0].tolist(), self.counts_RCK[row].tolist()
        mean, found = PRIOR_RATE if default is None else default, []
        for i, trials in enumerate(global_[column + 1]):
            prior = promised[i] if i < len(promised) else 1.0 if default is None else mean
            weight = PRIOR_WEIGHT + trials
            mean = (PRIOR_WEIGHT * prior + global_[column][i]) / weight
            shrink = min(BUCKET_PRIOR_WEIGHT, weight) if row else weight
            total = shrink + (own[column + 1][i] if row else 0.0)
            own_mean = (shrink * mean + own[column][i]) / total if row else mean
            found.append((min(max(own_mean, 0.0), 1.0), total))
        return found

    def estimate(self, row: int) -> Estimate:
        """Survival s_i = a_1 * ... * a_i with a_i = P(accepted >= i | accepted >= i - 1, offered >= i).

        The upper bound multiplies a_i + 1.64 posterior standard deviations sqrt(a (1 - a) / (weight + 1)):
        all positions are off in the same direction, which is wider than independent errors would be.
        """
        rates = self.rates(row, ACCEPTED, PRIOR_RATE)
        high = (
            min(rate + NUM_DEVIATIONS * math.sqrt(rate * (1.0 - rate) / (weight + 1.0)), 1.0)
            for rate, weight in rates
        )
        mean = tuple(accumulate((rate for rate, _ in rates), mul))
        drafted = accumulate((rate for rate, _ in self.rates(row, DRAFTED, None)), mul)
        return Estimate(
            mean=mean,
            upper=tuple(accumulate(high, mul)),
            drafted=tuple(max(share, survival) for share, survival in zip(drafted, mean, strict=True)),
        )

    def successor(self) -> Evidence:
        """Where a new version begins: this one's global means as priors, no evidence."""
        accept = tuple(rate for rate, _ in self.rates(0, ACCEPTED, PRIOR_RATE))
        draft = tuple(rate for rate, _ in self.rates(0, DRAFTED, None))
        return Evidence(accept, draft, np.zeros_like(self.counts_RCK))


def conditional_rates(survival: Sequence[float], max_draft_tokens: int) -> tuple[float, ...]:
    """Conditional rates of a promised survival."""
    rates, before = [], 1.0
    for share in survival[:max_draft_tokens]:
        if not 0.0 <= share <= before:
            raise ValueError(f"prior {tuple(survival)} must fall from at most 1 and stay above 0")
        rates.append(min(max(share / before if before else 0.0, MIN_PRIOR), 1.0 - MIN_PRIOR))
        before = share
    return tuple(rates)


def evidence_from(row: Mapping[str, Any], shape: tuple[int, ...]) -> Evidence:
    """One version of a state, checked."""
    priors = [tuple(float(rate) for rate in row[name]) for name in ("accept_prior", "draft_prior")]
    counts = np.array(row["counts"], np.float64)
    if counts.shape != shape or any(len(prior) > shape[2] for prior in priors):
        raise ValueError(f"not the state of an Acceptance: counts of shape {counts.shape}, expected {shape}")
    if not all(0.0 <= rate <= 1.0 for prior in priors for rate in prior):
        raise ValueError("not the state of an Acceptance: a prior outside 0 to 1")
    successes, trials = counts[:, (ACCEPTED, DRAFTED)], counts[:, (ACCEPT_TRIALS, DRAFT_TRIALS)]
    if not (np.isfinite(counts).all() and (counts >= 0.0).all() and (successes <= trials + 1e-9).all()):
        raise ValueError("not the state of an Acceptance: counts that are negative or exceed their trials")
    return Evidence(priors[0], priors[1], counts)
