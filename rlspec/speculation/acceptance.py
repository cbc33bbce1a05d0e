"""Owns what share of draft tokens is accepted, by position, drafter version and context length, with time.

Shape suffixes: K positions of a draft (entry 0 is position 1), R rows of evidence (0 global, then one a
bucket), C columns of counts (`ACCEPTED` to `DRAFT_TRIALS`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlspec.speculation.acceptance_evidence import (
    ACCEPT_TRIALS,
    ACCEPTED,
    Estimate,
    Evidence,
    conditional_rates,
    evidence_from,
)
from rlspec.speculation.change_detector import ChangeDetector, Counts

MEMORY_REQUEST_STEPS = 400.0
"""Evidence on a position decays by 1/e in so many request-steps that offered it: its standard error is
0.02."""
CONTEXT_EDGES = (0, 2048, 8192, 32768)
"""Where the buckets of context length begin, in tokens."""
OTHER_BUCKETS_KEEP = 0.02
"""Left of the other buckets when one sees an abrupt change: 8 of 400 request-steps. It may not concern
them."""
MAX_VERSIONS = 8
"""Drafter versions whose evidence is kept; the one begun first is dropped first."""
MAX_DRAFT_TOKENS = 32
"""The histogram of a step has 2 (K + 1)^2 cells: beyond this K it costs more than 15 microseconds."""


class Acceptance:
    """Acceptance by draft position, learnt from the request-steps that were offered drafts.

    Discounted Beta posteriors of conditional rates: evidence on a position decays with the request-steps that
    offered that position, so a position not offered for a while keeps what was learnt. An abrupt change of
    the first position's rate (`ChangeDetector`) replaces the evidence by what came since the change.

    Attributes:
        version: The drafter version that is learnt of now.
        num_changes: Abrupt changes seen so far.
    """

    def __init__(self, max_draft_tokens: int, prior: Sequence[float] | None = None) -> None:
        """Start without evidence.

        Args:
            max_draft_tokens: The largest K that is ever offered.
            prior: Promised survival: the share of request-steps in which position 1, 2, ... is accepted.
                Positions beyond it continue geometrically; without it position 1 starts at `PRIOR_RATE`.
        """
        if not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens is {max_draft_tokens}; allowed are 1 to {MAX_DRAFT_TOKENS}")
        self.max_draft_tokens = max_draft_tokens
        self.version = ""
        self.num_changes = 0
        counts = np.zeros((1 + len(CONTEXT_EDGES), 4, max_draft_tokens))
        self._now = Evidence(conditional_rates(prior or (), max_draft_tokens), (), counts)
        self._versions = {self.version: self._now}
        self._detector = ChangeDetector()
        self._estimates: dict[int, Estimate] = {}
        width = max_draft_tokens + 1
        self._stride = np.uint16(2 * width)
        self._shifted = bytes(min(width + num_drafted, 255) for num_drafted in range(256))
        self._totals_of_cells = _totals_of_cells(max_draft_tokens)

    def observe(
        self,
        num_offered: tuple[int, ...],
        num_drafted: tuple[int, ...],
        num_accepted: tuple[int, ...],
        context_lengths: tuple[int, ...],
    ) -> None:
        """Learn from one engine step; the step counts for the context bucket of its mean context length."""
        if not any(num_offered):
            return
        batch_size = len(num_offered)
        if not batch_size == len(num_drafted) == len(num_accepted) == len(context_lengths):
            raise ValueError("the columns of a step must have one entry a request")
        totals = self._totals(num_offered, num_drafted, num_accepted)
        counts_CK = totals[:4]
        row = 1 + self._bucket(sum(context_lengths) // batch_size)
        rate, num_trials = self._now.rate(row), float(totals[4, 0])
        since = self._detector.observe(rate, float(counts_CK[ACCEPTED, 0]), num_trials, counts_CK)
        counts_RCK = self._now.counts_RCK
        self._estimates.clear()
        if since is not None:
            self.num_changes += 1
            counts_RCK *= OTHER_BUCKETS_KEEP
            counts_RCK[0] = counts_RCK[row] = since
            return
        decay_K = np.exp(totals[4] * (-1.0 / MEMORY_REQUEST_STEPS))
        changed_RCK = counts_RCK[0 : row + 1 : row]  # the global row and the bucket's, as one view
        changed_RCK *= decay_K
        changed_RCK += counts_CK

    def start_version(self, version: str) -> None:
        """A drafter version takes over: a known one with its own evidence, a new one with the means so
        far."""
        if version == self.version:
            return
        if version not in self._versions:
            self._versions[version] = self._now.successor()
            if len(self._versions) > MAX_VERSIONS:
                self._versions.pop(next(name for name in self._versions if name != version))
        self._now, self.version = self._versions[version], version
        self._detector.restart()
        self._estimates.clear()

    def forget(self, keep: float) -> None:
        """Multiply the evidence on all versions by `keep`: after a policy update or a swap."""
        if not 0.0 <= keep <= 1.0:
            raise ValueError(f"keep is {keep}; allowed are 0 (forget all) to 1 (forget nothing)")
        for evidence in self._versions.values():
            evidence.counts_RCK *= keep
        self._detector.restart()
        self._estimates.clear()

    def estimate(self, context_length: int) -> Estimate:
        """All that is known for this context length; computed once between two observations."""
        row = 1 + self._bucket(context_length)
        known = self._estimates.get(row)
        if known is None:
            known = self._estimates[row] = self._now.estimate(row)
        return known

    @property
    def num_effective(self) -> float:
        """Discounted request-steps behind position 1, over all contexts."""
        return float(self._now.counts_RCK[0, ACCEPT_TRIALS, 0])

    def state(self) -> dict[str, object]:
        """Everything learnt, as plain JSON values; the change detector starts afresh after a restore."""
        versions = {
            name: {
                "accept_prior": list(evidence.accept_prior),
                "draft_prior": list(evidence.draft_prior),
                "counts": evidence.counts_RCK.tolist(),
            }
            for name, evidence in self._versions.items()
        }
        return {
            "max_draft_tokens": self.max_draft_tokens,
            "version": self.version,
            "num_changes": self.num_changes,
            "versions": versions,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Acceptance:
        """The estimator behind `state`; ValueError if it is not one."""
        try:
            restored = cls(int(state["max_draft_tokens"]))
            restored.num_changes = int(state["num_changes"])
            shape = restored._now.counts_RCK.shape
            versions = {str(name): evidence_from(row, shape) for name, row in state["versions"].items()}
            restored.version = str(state["version"])
            restored._now = versions[restored.version]
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"not the state of an Acceptance: {error!r}") from error
        restored._versions = versions
        return restored

    def _totals(
        self, num_offered: tuple[int, ...], num_drafted: tuple[int, ...], num_accepted: tuple[int, ...]
    ) -> Counts:
        """Counts of the step by position: the four columns of evidence, and the request-steps that offered
        it.

        One histogram over (offered, accepted) and (offered, drafted) cells, then a matrix product.
        """
        offered_bytes = bytes(num_offered)
        drafted_bytes = offered_bytes if num_drafted == num_offered else bytes(num_drafted)
        offered = np.frombuffer(offered_bytes * 2, np.uint8) * self._stride
        given = np.frombuffer(bytes(num_accepted) + drafted_bytes.translate(self._shifted), np.uint8)
        num_cells = len(self._totals_of_cells)
        histogram = np.bincount(offered + given, minlength=num_cells)
        if len(histogram) != num_cells:
            raise ValueError(f"more than {self.max_draft_tokens} draft tokens in a step: {max(num_offered)}")
        totals: Counts = (histogram @ self._totals_of_cells).reshape(5, self.max_draft_tokens)
        return totals

    @staticmethod
    def _bucket(context_length: int) -> int:
        return max(0, bisect_right(CONTEXT_EDGES, context_length) - 1)


def _totals_of_cells(max_draft_tokens: int) -> npt.NDArray[np.float64]:
    """What a cell of the histogram adds to the totals.

    Row offered * 2 (K + 1) + accepted is of a request-step that was offered and accepted so many; the row
    K + 1 further on is of one that was offered and drafted so many.
    """
    width = max_draft_tokens + 1
    offered, given = (axis.reshape(-1, 1) for axis in np.divmod(np.arange(2 * width * width), 2 * width))
    is_accepted, given = given < width, given % width
    position = np.arange(1, width)
    offers = offered >= position
    success, trial = offers & (given >= position), offers & (given >= position - 1)
    blocks = [is_accepted & success, is_accepted & trial, ~is_accepted & success, ~is_accepted & trial]
    return np.hstack([*blocks, is_accepted & offers]).astype(np.float64)
