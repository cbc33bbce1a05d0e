"""Owns the two interfaces of a decision: who decides K, and who only chooses among the K of an outlook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlspec.types import Decision, Event, Load, StepFacts


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

    def take_events(self) -> list[Event]:
        """What a person should hear of, since the last call."""
        ...

    def mark(self, cause: str) -> None:
        """The policy or the drafter changed: `cause` says what happened, for a person."""
        ...


class LearningPolicy(DraftLengthPolicy, Protocol):
    """A policy whose knowledge outlives a run and a process."""

    def learn_costs(self, steps: Sequence[StepFacts]) -> None:
        """Learn what steps cost that another policy decided, and nothing of acceptance."""
        ...

    def state(self) -> dict[str, Any]:
        """What was learnt, as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what an earlier run learnt.

        Raises:
            KeyError, TypeError, ValueError: It is no such state; nothing has changed.
        """
        ...


class WithoutEvents:
    """For policies that learn nothing: nothing happens to them."""

    def observe(self, facts: StepFacts) -> None:
        """Nothing to learn."""

    def take_events(self) -> list[Event]:
        """None."""
        return []

    def mark(self, cause: str) -> None:
        """Nothing that was learnt becomes wrong."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of each K at the present batch if it stays: entry k of a column is K = k, from 0.

    Attributes:
        batch_size: Requests that would be verified.
        num_draft_tokens: K of the step before.
        tokens: Expected tokens a request and step; entry 0 is 1.0, entries rise.
        verify_seconds: The target's part of a step, with the draft tokens that K gives it to verify.
        draft_seconds: The drafter's part of a step; entry 0 is what an idle drafter costs.
    """

    batch_size: int
    num_draft_tokens: int
    tokens: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]

    @property
    def max_draft_tokens(self) -> int:
        """The largest K that may be chosen."""
        return len(self.tokens) - 1

    def up_to(self, k_max: int) -> Outlook:
        """The outlook without the K above."""
        if k_max >= self.max_draft_tokens:
            return self
        end = k_max + 1
        columns = self.tokens[:end], self.verify_seconds[:end], self.draft_seconds[:end]
        return Outlook(self.batch_size, self.num_draft_tokens, *columns)

    def step_seconds(self, k: int) -> float:
        """Seconds of a step at K = k."""
        return self.verify_seconds[k] + self.draft_seconds[k]

    def goodput(self, k: int) -> float:
        """Tokens a request and second at K = k."""
        return self.tokens[k] / self.step_seconds(k)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that verified the drafts of a K and drafted with the same K: what that K is worth.

    Attributes:
        batch_size: Requests in the step.
        num_draft_tokens: K.
        num_emitted: Tokens that all responses got.
        num_drafted: Draft tokens verified.
        num_accepted: Of them accepted.
        step_seconds: Seconds of the step.
    """

    batch_size: int
    num_draft_tokens: int
    num_emitted: int
    num_drafted: int
    num_accepted: int
    step_seconds: float


class Chooser(Protocol):
    """Chooses K; what surrounds the choice (exploration, switch price, floor, health) is the controller's."""

    explores: bool
    """Whether it tries other K itself; the controller then leaves exploring to it."""

    def choose(self, outlook: Outlook) -> int:
        """K, from 0 to `outlook.max_draft_tokens`."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step."""
        ...
