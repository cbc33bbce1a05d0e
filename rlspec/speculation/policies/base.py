"""Owns the interface of a draft-length policy: who decides K."""

from __future__ import annotations

from typing import Protocol

from rlspec.types import Decision, Load, StepFacts


class DraftLengthPolicy(Protocol):
    """Decides K before each engine step and learns from each finished one.

    It runs inside the scheduler: no I/O, no locks, no clock of its own (time comes with the facts).
    """

    def decide(self, load: Load) -> Decision:
        """K for the step being scheduled; what it lets the drafter propose is verified one step later."""
        ...

    def observe(self, facts: StepFacts) -> None:
        """Learn from one finished step."""
        ...
