"""Owns the two policies that do not learn: a constant K, and the K of each step of an earlier run."""

from __future__ import annotations

from collections.abc import Sequence

from rlspec.speculation.policies.base import WithoutEvents
from rlspec.types import Decision, Load, Reason


class FixedPolicy(WithoutEvents):
    """The same K in every step. K = 0 is plain decoding with the drafter loaded."""

    def __init__(self, num_draft_tokens: int) -> None:
        reason = Reason.FIXED if num_draft_tokens else Reason.OFF
        self._decision = Decision(num_draft_tokens, reason)

    def decide(self, load: Load) -> Decision:
        """The constant."""
        return self._decision


class ReplayPolicy(WithoutEvents):
    """The K of each step of an earlier run, so that a seeded run can be repeated token for token.

    A run that has more steps than the trace is not the same run: the steps beyond it get K = 0 and the
    reason `replay_exhausted`, which is counted and warned about.
    """

    def __init__(self, k_trace: Sequence[int]) -> None:
        self._decisions = tuple(Decision(k, Reason.REPLAYED) for k in k_trace)

    def decide(self, load: Load) -> Decision:
        """The K that was recorded for this step."""
        if load.step_index < len(self._decisions):
            return self._decisions[load.step_index]
        return Decision(0, Reason.REPLAY_EXHAUSTED)
