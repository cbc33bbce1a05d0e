"""Owns the test of sampled tokens against exact probabilities, and how many samples it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlspec.errors import missing_extra

MIN_EXPECTED = 5.0
"""Cells in which fewer samples are expected are pooled into one: the usual condition of the chi-square
approximation (Cochran, "Some methods for strengthening the common chi-square tests", 1954).
`tests/unit/test_audit_distribution.py` measures the false-alarm rate that it leaves in the far tail."""

SEEN_ERROR = 0.02
"""Total-variation error that a full audit has to find."""

POWER = 0.99
"""How often it has to find it."""

Probabilities = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """Pearson's chi-square statistic, its degrees of freedom and its p-value."""

    statistic: float
    degrees: int
    p_value: float


def chi_square(counts: NDArray[Any], probabilities: Probabilities) -> ChiSquare:
    """Pearson's test of counts against exact probabilities.

    Assumes independent samples. Tokens of probability zero must not occur: one of them gives p = 0.

    Args:
        counts: Samples by cell.
        probabilities: Exact probability of each cell; they sum to 1.
    """
    counts, probabilities = np.ravel(counts).astype(float), np.ravel(probabilities)
    if counts[probabilities <= 0.0].any():
        return ChiSquare(float("inf"), 0, 0.0)
    expected = counts.sum() * probabilities
    is_pooled = expected < MIN_EXPECTED
    kept, rest = expected[~is_pooled], expected[is_pooled].sum()
    statistic = float(((counts[~is_pooled] - kept) ** 2 / kept).sum())
    degrees = len(kept) - 1
    if rest > 0.0:
        statistic += float((counts[is_pooled].sum() - rest) ** 2 / rest)
        degrees += 1
    if degrees < 1:
        return ChiSquare(0.0, 0, 1.0)
    return ChiSquare(statistic, degrees, float(_stats().chi2.sf(statistic, degrees)))


def power(probabilities: Probabilities, num_samples: int, alpha: float, error: float) -> float:
    """How often the test finds a total-variation error, at worst.

    Pearson's statistic is then asymptotically noncentral chi-square with noncentrality
    n * sum(d_i^2 / p_i) (Patnaik, "The non-central chi-square and F-distributions", 1949). For an error of
    total variation e, sum |d_i| = 2 e, and by Cauchy-Schwarz the sum is at least 4 e^2: whatever the error
    looks like. Errors inside the pooled cells cannot be seen; their mass is taken off e.

    Args:
        probabilities: Exact probability of each cell.
        num_samples: Samples drawn.
        alpha: The test fails below this p-value.
        error: Total-variation distance, 0 to 1.
    """
    probabilities = np.ravel(probabilities)
    is_pooled = num_samples * probabilities < MIN_EXPECTED
    pooled = float(probabilities[is_pooled].sum())
    seen = error - pooled
    degrees = int((~is_pooled).sum()) - (0 if pooled > 0.0 else 1)
    if seen <= 0.0 or degrees < 1:
        return 0.0
    critical = _stats().chi2.isf(alpha, degrees)
    return float(_stats().ncx2.sf(critical, degrees, 4.0 * num_samples * seen**2))


def samples_needed(probabilities: Probabilities, alpha: float, error: float = SEEN_ERROR) -> int:
    """The fewest samples, in steps of a tenth, that find `error` with `POWER`."""
    num_samples = 1000
    while power(probabilities, num_samples, alpha, error) < POWER:
        num_samples += num_samples // 10
    return num_samples


def smallest_error_seen(probabilities: Probabilities, num_samples: int, alpha: float) -> float:
    """The smallest total-variation error, to 0.001, that is found with `POWER`; 1.0 if none is."""
    low, high = 0, 1000  # thousandths; power grows with the error
    while high - low > 1:
        middle = (low + high) // 2
        if power(probabilities, num_samples, alpha, middle / 1000) >= POWER:
            high = middle
        else:
            low = middle
    return high / 1000


def uniform_ranks(
    probabilities_TV: Probabilities, tokens_T: NDArray[np.int64], generator: np.random.Generator
) -> Probabilities:
    """Randomised probability integral transform of each token under its own distribution.

    With tokens in order of falling probability, u = P(before the token) + U * P(token), U uniform: uniform
    on [0, 1) and independent from token to token when each was drawn from its row (Rosenblatt, "Remarks on
    a multivariate transformation", 1952; randomised for discrete distributions). It tests responses
    of any length on any vocabulary, where exact marginals cannot be computed.

    Args:
        probabilities_TV: Exact conditional distribution of each token (T tokens, V vocabulary).
        tokens_T: The tokens that were sampled.
        generator: Of the random U.
    """
    rows = np.arange(len(tokens_T))
    chosen = probabilities_TV[rows, tokens_T]
    is_before = probabilities_TV > chosen[:, None]
    # Ties in order of token id, so that each row is one order.
    is_before |= (probabilities_TV == chosen[:, None]) & (
        np.arange(probabilities_TV.shape[1]) < tokens_T[:, None]
    )
    below = np.where(is_before, probabilities_TV, 0.0).sum(axis=1)
    ranks: Probabilities = below + generator.random(len(tokens_T)) * chosen
    capped: Probabilities = np.minimum(ranks, np.nextafter(1.0, 0.0))
    return capped


@lru_cache(maxsize=1)
def _stats() -> ModuleType:
    try:
        import scipy.stats
    except ImportError as error:
        raise missing_extra("scipy", "audit", "the statistics of the audit") from error
    stats: ModuleType = scipy.stats
    return stats
