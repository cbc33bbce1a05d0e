"""Owns the policy that reads K off a table of batch sizes, by vLLM's rule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from rlspec.errors import ConfigError
from rlspec.speculation.policies.base import WithoutEvents
from rlspec.types import Decision, Load, Reason

ALLOWED = "ranges [first batch size, last batch size, K] of integers, from batch size 1, not overlapping"


class StaticTablePolicy(WithoutEvents):
    """K of the last range that starts at or below the batch size.

    The table and the rule are vLLM's `num_speculative_tokens_per_batch_size` (vLLM 0.32): ranges include both
    ends, in any order; the first must start at 1; a gap keeps the K of the range before it, and so do batches
    above the last range; K is at most the engine's largest. The batch size counts all requests of the step,
    prefill included. Stricter than vLLM: a number that is no integer is refused, not rounded down.

    Assumption: whoever measured the table did so on this machine, with this drafter, at this acceptance.

    Args:
        table: The ranges.
        max_draft_tokens: The engine's largest K, vLLM's `num_speculative_tokens`; None is no limit.
    """

    def __init__(self, table: Sequence[Sequence[int]], max_draft_tokens: int | None = None) -> None:
        ranges = _checked(table)
        self._starts = [first for first, _, _ in ranges]
        self._decisions = []
        for _, _, given in ranges:
            k = given if max_draft_tokens is None else min(given, max_draft_tokens)
            self._decisions.append(Decision(k, Reason.TABLE if k else Reason.OFF))

    def decide(self, load: Load) -> Decision:
        """The table's K; an empty batch is read as one of 1."""
        return self._decisions[bisect_right(self._starts, max(load.batch_size, 1)) - 1]


def _checked(table: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """The ranges in order; `ConfigError` for what vLLM refuses."""
    if isinstance(table, str) or not isinstance(table, Sequence) or not table:
        raise _error(table, "Give at least one range, for example [[1, 8, 5], [9, 64, 2], [65, 512, 0]].")
    ranges = sorted(_checked_range(entry) for entry in table)
    if ranges[0][0] != 1:
        raise _error(table, f"Let the first range start at batch size 1, not {ranges[0][0]}.")
    for (_, last, _), (first, _, _) in pairwise(ranges):
        if first <= last:
            raise _error(table, f"A range starts at {first} and the one before it ends at {last}: keep one.")
    return ranges


def _checked_range(entry: Sequence[int]) -> tuple[int, int, int]:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise _error(entry, "Write each range as three integers: [first batch size, last batch size, K].")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in entry):
        raise _error(entry, "Write whole numbers.")
    first, last, k = entry
    if first < 1:
        raise _error(entry, "Batch sizes count from 1.")
    if last < first:
        raise _error(entry, f"The range ends before it starts: write [{last}, {first}, {k}]?")
    if k < 0:
        raise _error(entry, "K counts draft tokens: 0 is plain decoding.")
    return first, last, k


def _error(given: object, fix: str) -> ConfigError:
    return ConfigError("speculation.table", given=given, allowed=ALLOWED, fix=fix)
