"""Owns what measured step costs mean: a table, the memory-bound boundary, where speculation stops paying."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlspec.speculation.outlook import break_even_acceptance
from rlspec.types import StepFacts

MEMORY_BOUND_RATIO = 1.25
"""A batch is called memory-bound while its plain step takes at most so many times that of the smallest batch:
most of the time is then spent on reading weights, which draft tokens share."""

ACCEPTANCES = (0.4, 0.6, 0.8)
"""Conditional acceptances for which the profile says up to which batch speculation pays: of a weak, a usual
and a very good drafter."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Steps of one batch size, context and K.

    Attributes:
        batch_size: Requests.
        context: Tokens of each, at the start.
        k: Draft tokens a request.
        seconds: Median step seconds: verification of K + 1 tokens a request and drafting of K.
        num_steps: Steps measured.
    """

    batch_size: int
    context: int
    k: int
    seconds: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured cells of one engine; pure.

    Attributes:
        cells: In the order they were measured.
    """

    cells: tuple[Cell, ...]

    @property
    def largest_k(self) -> int:
        """The largest K measured."""
        return max(cell.k for cell in self.cells)

    def seconds(self, batch_size: int, context: int, k: int) -> float | None:
        """Median step seconds; None if not measured."""
        wanted = (batch_size, context, k)
        found = (cell.seconds for cell in self.cells if (cell.batch_size, cell.context, cell.k) == wanted)
        return next(found, None)

    def loads(self) -> list[tuple[int, int]]:
        """Batch sizes and contexts with a plain step."""
        return sorted({(cell.batch_size, cell.context) for cell in self.cells if cell.k == 0})

    def break_even(self, batch_size: int, context: int) -> tuple[float, int] | None:
        """The smallest conditional acceptance with which some K pays, and that K; None: not even 1 does."""
        plain = self.seconds(batch_size, context, 0)
        assert plain is not None
        needed = []
        for k in range(1, self.largest_k + 1):
            seconds = self.seconds(batch_size, context, k)
            if seconds is not None and seconds / plain < k + 1:
                needed.append((break_even_acceptance(k, seconds / plain), k))
        return min(needed, default=None)

    def best_k(self, batch_size: int, context: int, acceptance: float) -> int:
        """K of the most tokens a second if each draft token, given those before, is accepted at this rate."""
        best, goodput = 0, 0.0
        for k in range(self.largest_k + 1):
            seconds = self.seconds(batch_size, context, k)
            tokens = sum(acceptance**position for position in range(k + 1))
            if seconds is not None and tokens / seconds > goodput:
                best, goodput = k, tokens / seconds
        return best

    def sentences(self) -> list[str]:
        """What an engineer should know."""
        smallest = min(context for _, context in self.loads())
        batches = [batch for batch, context in self.loads() if context == smallest]
        plain = {batch: self.seconds(batch, smallest, 0) or 0.0 for batch in batches}
        bound = [batch for batch in batches if plain[batch] <= MEMORY_BOUND_RATIO * plain[batches[0]]]
        lines = [
            f"Memory-bound up to batch {max(bound)}: a plain step takes at most {MEMORY_BOUND_RATIO} times "
            f"that of batch {batches[0]} ({1000 * plain[batches[0]]:.1f} ms)."
        ]
        for acceptance in ACCEPTANCES:
            paying = [batch for batch in batches if self.best_k(batch, smallest, acceptance)]
            if not paying:
                lines.append(f"With {acceptance:.0%} of draft tokens accepted, speculation pays at no batch.")
                continue
            largest = max(paying)
            k = self.best_k(largest, smallest, acceptance)
            lines.append(
                f"With {acceptance:.0%} of draft tokens accepted, speculation pays up to batch {largest} "
                f"(K = {k} there, K = {self.best_k(batches[0], smallest, acceptance)} at batch {batches[0]})."
            )
        for batch in (batches[0], batches[-1]):
            needed = self.break_even(batch, smallest)
            wants = (
                "no acceptance is enough"
                if needed is None
                else f"{needed[0]:.0%} must be accepted (K = {needed[1]})"
            )
            lines.append(f"At batch {batch}: {wants}.")
        return lines

    def headers(self) -> list[str]:
        """Of `rows`."""
        return ["batch", "context", *(f"K = {k}, ms" for k in self.measured_k()), "acceptance needed"]

    def measured_k(self) -> list[int]:
        """The K measured."""
        return sorted({cell.k for cell in self.cells})

    def rows(self) -> list[list[str]]:
        """One row a load."""
        rows = []
        for batch, context in self.loads():
            needed = self.break_even(batch, context)
            times = [self.seconds(batch, context, k) for k in self.measured_k()]
            shown = ["-" if value is None else f"{1000 * value:.1f}" for value in times]
            rows.append([str(batch), str(context), *shown, f"{needed[0]:.2f}" if needed else "above 1"])
        return rows


def steady_steps(steps: Iterable[StepFacts]) -> list[StepFacts]:
    """Steps that computed no prompt, drafted as the step before did, and verified what K offered."""
    found, before = [], None
    for facts in steps:
        k = facts.num_draft_tokens
        if before == k and facts.is_decoding and sum(facts.num_drafted) == k * facts.batch_size:
            found.append(facts)
        before = k
    return found


def profile_of(runs: Mapping[tuple[int, int], Sequence[StepFacts]]) -> Profile:
    """The profile of runs by (batch size, context)."""
    cells = []
    for (batch_size, context), steps in runs.items():
        by_k: defaultdict[int, list[float]] = defaultdict(list)
        for facts in steady_steps(steps):
            if facts.batch_size == batch_size:
                by_k[facts.num_draft_tokens].append(facts.step_seconds)
        cells += [
            Cell(batch_size, context, k, statistics.median(seconds), len(seconds))
            for k, seconds in sorted(by_k.items())
        ]
    return Profile(tuple(cells))
