"""Owns the greedy identity check: at temperature 0, speculation changes no token.

Two engines may round a logit differently (a batch of another shape adds in another order), so a response
may part from its twin where the two best logits are tied. Every first difference is therefore looked up in
a reference model: within `TIE_TOLERANCE` it is a tie, and counted; else it is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlspec.types import Rollout

TIE_TOLERANCE = 1e-4
"""Largest gap of the reference's two best logits that counts as a tie: fp32 sums over a few hundred terms
of size 1 to 10 differ by about 1e-5 between summation orders; ten times that."""


@dataclass(frozen=True, slots=True)
class GreedyDifference:
    """Where two greedy responses to the same prompt first differ.

    Attributes:
        group_id: The prompt.
        position: Index in the response, from 0.
        prefix_token_ids: Prompt and the tokens both responses share.
    """

    group_id: str
    position: int
    prefix_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GreedyVerdict:
    """What the comparison found; `num_wrong` must be 0."""

    num_compared: int
    num_identical: int
    num_ties: int
    num_wrong: int

    @property
    def passed(self) -> bool:
        """Whether every difference was a tie."""
        return self.num_wrong == 0

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        return (
            f"greedy identity {word}: {self.num_identical} of {self.num_compared} responses identical, "
            f"{self.num_ties} first differ at a tie (within {TIE_TOLERANCE:g}), "
            f"{self.num_wrong} differ elsewhere"
        )


def first_differences(plain: Sequence[Rollout], speculating: Sequence[Rollout]) -> list[GreedyDifference]:
    """The first difference of each pair that has one.

    Args:
        plain, speculating: Responses to the same prompts, in the same order.
    """
    differences = []
    for one, other in zip(plain, speculating, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids, (one.group_id, other.group_id)
        position = _first_difference(one.completion_token_ids, other.completion_token_ids)
        if position is not None:
            prefix = one.prompt_token_ids + one.completion_token_ids[:position]
            differences.append(GreedyDifference(one.group_id, position, prefix))
    return differences


def judge(num_compared: int, top_two_gaps: Sequence[float]) -> GreedyVerdict:
    """The verdict.

    Args:
        num_compared: Pairs compared.
        top_two_gaps: For each first difference, the gap of the reference's two best logits there.
    """
    num_ties = sum(gap <= TIE_TOLERANCE for gap in top_two_gaps)
    num_different = len(top_two_gaps)
    return GreedyVerdict(num_compared, num_compared - num_different, num_ties, num_different - num_ties)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))
