"""Owns what happens when a policy fails: speculation goes off, the rollout goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec.speculation.policies.base import LearningPolicy
from rlspec.types import Decision, Event, EventKind, Load, Reason, StepFacts

logger = logging.getLogger("rlspec.speculation")

FAILED = Decision(0, Reason.CONTROLLER_FAILED)


class GuardedPolicy:
    """A policy that cannot stop generation: its first exception turns speculation off for good.

    This is the one place of rlspec that catches every `Exception`: a decision about speed must not cost a
    rollout, whatever is wrong with it. The event, the log's traceback and the reason of every step say so.
    """

    def __init__(self, policy: LearningPolicy, max_draft_tokens: int) -> None:
        self.policy = policy
        self._max_draft_tokens = max_draft_tokens
        self._events: list[Event] = []
        self._has_failed = False

    def decide(self, load: Load) -> Decision:
        """The policy's decision; K = 0 once it has failed."""
        if self._has_failed:
            return FAILED
        try:
            decision = self.policy.decide(load)
            if not 0 <= decision.num_draft_tokens <= self._max_draft_tokens:
                raise ValueError(f"K = {decision.num_draft_tokens}, allowed: 0 to {self._max_draft_tokens}")
            if decision.caps is not None and len(decision.caps) != load.batch_size:
                raise ValueError(f"{len(decision.caps)} caps for {load.batch_size} requests")
        except Exception as error:  # noqa: BLE001 - see the class
            self._fail(error, load.step_index)
            return FAILED
        return decision

    def observe(self, facts: StepFacts) -> None:
        """Let the policy learn, unless it has failed."""
        if self._has_failed:
            return
        try:
            self.policy.observe(facts)
        except Exception as error:  # noqa: BLE001 - see the class
            self._fail(error, facts.step_index)

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = [*self.policy.take_events(), *self._events], []
        return events

    def mark(self, cause: str) -> None:
        """Tell the policy of a change, and give one that failed no second chance."""
        self.policy.mark(cause)

    def learn_costs(self, steps: Sequence[StepFacts]) -> None:
        """Let the policy learn what steps cost that another one decided."""
        self.policy.learn_costs(steps)

    def state(self) -> dict[str, Any] | None:
        """What the policy has learnt, as plain values; None if it failed."""
        return None if self._has_failed else self.policy.state()

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Go on with what an earlier run learnt; returns why it cannot be used, and then starts afresh."""
        try:
            self.policy.restore(state)
        except (KeyError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _fail(self, error: Exception, step_index: int) -> None:
        self._has_failed = True
        logger.error("the draft-length policy failed, K = 0 from now on", exc_info=error)
        text = f"{type(error).__name__}: {error}; speculation is off until the engine is made again"
        self._events.append(Event(EventKind.CONTROLLER_FAILED, step_index, text))
