"""Owns the adaptive policy: what is learnt of costs and acceptance, and the guards around the choice of K.

    decide   load ─► outlook ─► chooser ─► settle ─► K, reason              (guards may say 0 or a trial)
    observe  facts ─► step cost, acceptance, health, floor, exploration

A step verifies the drafts of the step before and drafts for the next one, so a step's seconds belong to
two K. Only steps that neither compute prompts nor change between K = 0 and drafting teach the costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec.savings import plain_seconds_estimate
from rlspec.speculation.acceptance import Acceptance
from rlspec.speculation.exploration import Exploration
from rlspec.speculation.floor import Floor
from rlspec.speculation.health import DrafterHealth
from rlspec.speculation.outlook import outlook_for
from rlspec.speculation.policies.base import Chooser, Outcome, Outlook
from rlspec.speculation.settings import ControllerSettings
from rlspec.speculation.step_cost import StepCost
from rlspec.speculation.switching import WakePrice, settle
from rlspec.types import Decision, Event, EventKind, Load, Reason, StepFacts

MIN_EVIDENCE = 16.0
"""Request-steps with drafts before an estimate of acceptance may turn speculation on by itself."""

MAX_EXTRAPOLATION = 2.0
"""K is taken without a trial if it verifies at most so many times the tokens of the largest step measured."""

TAIL_SHARE = 0.75
"""Trials begin at batches up to this share of the largest token count measured, so that the cost of K = 1 is
measured, or next to what is measured."""

PATIENCE_STEPS = 500
"""Plain steps in a row after which a batch is tried whose draft tokens nobody has measured: trials wait for
the tail, where they are cheap, but not for ever."""

KEEP_AFTER_CHANGE = 0.25
"""Evidence on acceptance that a new policy or drafter, or another run, leaves: 400 request-steps become
100."""

PROBE_EVERY_STEPS, PROBE_STEPS = 256, 5
"""After so many speculating steps so many plain ones: what draft tokens cost beside the target would else be
told from the target's own cost by assumption only. At a gain of 30 % that gives up 0.6 %."""

OUTLOOK_STEPS = 4
"""Steps that an outlook is used for while the load stays the same: estimates move by 1 % in so many."""

NOTHING_KNOWN = Outlook(0, 0, (1.0,), (1.0,), (0.0,))

FADE_STEPS, FADE = 1000, 0.5
"""So many plain steps in a row leave this share of the evidence, so that old bad news is tried again."""


class Controller:
    """Chooses K by measured costs and acceptance, within limits; a pure state machine.

    Attributes:
        cost: Step costs.
        acceptance: Acceptance by position.
        health: The drafter's health.
    """

    def __init__(
        self,
        chooser: Chooser,
        settings: ControllerSettings,
        cost: StepCost,
        acceptance: Acceptance,
        health: DrafterHealth,
    ) -> None:
        self.cost, self.acceptance, self.health = cost, acceptance, health
        self._chooser = chooser
        self._settings = settings
        self._exploration = Exploration(settings.exploration_fraction)
        self._floor = Floor(settings.max_slowdown)
        self._wake = WakePrice(settings.catch_up_tokens)
        self._events: list[Event] = []
        self._num_steps = 0  # of all runs
        self._num_plain_in_a_row = 0
        self._num_since_probe = 0
        self._k_decided = 0
        self._mean: Outlook = NOTHING_KNOWN
        self._outlook_key: tuple[int, ...] = ()
        self._outlook_age = 0
        self._k_observed = 0
        self._reason_observed = Reason.OFF

    def decide(self, load: Load) -> Decision:
        """K for the step being scheduled."""
        context = sum(load.context_lengths)
        mean = self._outlook(load, context)
        k, reason = self._choose(load, mean, context // load.batch_size)
        seconds = self.cost.verify_seconds(load.num_scheduled_tokens, context)
        seconds += mean.draft_seconds[k]
        if k and not self._k_decided:
            seconds += self._wake.seconds(load.batch_size, mean.draft_seconds[1])
        self._wake.observe(load.batch_size, k)
        self._k_decided = k
        return Decision(
            num_draft_tokens=k,
            reason=reason,
            expected_tokens=mean.tokens[k],
            expected_seconds=mean.step_seconds(k),
            plain_seconds=mean.step_seconds(0),
            predicted_seconds=seconds,
        )

    def _outlook(self, load: Load, context: int) -> Outlook:
        """What is expected of each K; the one of some steps before while neither load nor K has changed."""
        k_max = min(self._settings.max_draft_tokens, max(load.num_room))
        key = (load.batch_size, load.num_drafting, k_max, self._k_decided)
        self._outlook_age += 1
        if key != self._outlook_key or self._outlook_age >= OUTLOOK_STEPS:
            estimate = self.acceptance.estimate(context // load.batch_size)
            self._mean = outlook_for(load, self.cost, estimate, estimate.mean, self._k_decided, k_max)
            self._outlook_key, self._outlook_age = key, 0
        return self._mean

    def _choose(self, load: Load, mean: Outlook, context_length: int) -> tuple[int, Reason]:
        """K and why; the first guard that has something to say decides."""
        if not mean.max_draft_tokens:
            return 0, Reason.NO_ROOM
        if not self.health.is_healthy:
            may_try = self.health.may_try(self._num_steps)
            return (1, Reason.EXPLORING) if may_try else (0, Reason.DRAFTER_UNHEALTHY)
        if self._floor.is_cooling:
            return 0, Reason.COOLING_DOWN
        if self._chooser.explores:
            k = self._chooser.choose(mean)
            return k, Reason.PAYS if k else Reason.PLAIN_IS_FASTER
        price = self._wake.seconds(load.batch_size, mean.draft_seconds[1]) if not self._k_decided else 0.0
        known = self._known_part(load, mean)
        chosen = self._chooser.choose(known)
        settled = settle(known, chosen, self._settings.switch_margin, price, self._wake.horizon_steps())
        if k := self._trial(load, mean, context_length, settled, price):
            return k, Reason.EXPLORING
        if settled and self._is_probing():
            return 0, Reason.EXPLORING
        if settled != chosen:
            return settled, Reason.HELD
        return settled, Reason.PAYS if settled else Reason.PLAIN_IS_FASTER

    def _known_part(self, load: Load, mean: Outlook) -> Outlook:
        """The outlook of those K that rest on measurements."""
        k_max = 0
        if self.acceptance.num_effective >= MIN_EVIDENCE:
            num_spare = MAX_EXTRAPOLATION * self.cost.max_measured_tokens - load.batch_size
            k_max = max(min(mean.max_draft_tokens, int(num_spare / load.num_drafting)), 0)
        return mean.up_to(k_max)

    def _is_probing(self) -> bool:
        """Whether plain decoding is measured in this step, as its estimate is the yardstick of all others."""
        self._num_since_probe += 1
        if self._num_since_probe >= PROBE_EVERY_STEPS + PROBE_STEPS:
            self._num_since_probe = 0
        return self._num_since_probe >= PROBE_EVERY_STEPS

    def _trial(self, load: Load, mean: Outlook, context_length: int, settled: int, price: float) -> int:
        """K of the trial that goes on or begins; 0: none."""
        exploration = self._exploration
        trial_k = min(exploration.trial_k, mean.max_draft_tokens)
        if trial_k or (exploration.may_begin and self._outlook_age == 0):
            is_measured = load.batch_size <= TAIL_SHARE * self.cost.max_measured_tokens
            if trial_k or is_measured:
                estimate = self.acceptance.estimate(context_length)
                optimistic = outlook_for(
                    load, self.cost, estimate, estimate.upper, self._k_decided, mean.max_draft_tokens
                )
            if trial_k and not exploration.is_blind and optimistic.goodput(trial_k) < mean.goodput(0):
                exploration.end()  # hopeless already
                return 0
            if not trial_k and is_measured:
                exploration.begin(mean, optimistic, settled, self._settings.switch_margin, price)
            elif not trial_k and self._num_plain_in_a_row >= PATIENCE_STEPS:
                exploration.begin_blind(mean, price)
            trial_k = min(exploration.trial_k, mean.max_draft_tokens)
        if trial_k:
            exploration.advance()
        return trial_k

    def observe(self, facts: StepFacts) -> None:
        """Learn from one finished step."""
        self._num_steps += 1
        k, num_drafted = facts.num_draft_tokens, sum(facts.num_drafted)
        is_decoding = facts.is_decoding
        if is_decoding:
            self._learn_cost(facts)
        if num_drafted or any(facts.num_offered):
            self._learn_acceptance(facts)
        self._exploration.observe(facts.step_seconds)
        if facts.is_speculating:
            self._num_plain_in_a_row = 0
            self._judge(facts)
        else:
            self._floor.observe_plain()
            self._num_since_probe = 0 if facts.reason is not Reason.EXPLORING else self._num_since_probe
            self._fade()
        if is_decoding and k == self._k_observed and facts.num_offered.count(k) == facts.batch_size:
            self._chooser.observe(
                Outcome(
                    batch_size=facts.batch_size,
                    num_draft_tokens=k,
                    num_emitted=sum(facts.num_emitted),
                    num_drafted=num_drafted,
                    num_accepted=sum(facts.num_accepted),
                    step_seconds=facts.step_seconds,
                )
            )
        self._k_observed, self._reason_observed = k, facts.reason

    def _learn_cost(self, facts: StepFacts) -> None:
        """Teach the costs where the drafter's state is the same before and after; else the price of
        waking."""
        k, batch_size, tokens = facts.num_draft_tokens, facts.batch_size, facts.num_scheduled_tokens
        context = sum(facts.context_lengths)
        if (k > 0) == (self._k_observed > 0):
            self.cost.observe(tokens, context, k, batch_size, facts.step_seconds)
        elif k:
            expected = self.cost.verify_seconds(tokens, context) + self.cost.draft_seconds(k, batch_size)
            self._wake.learn(facts.step_seconds - expected, facts.step_seconds)

    def _learn_acceptance(self, facts: StepFacts) -> None:
        self.acceptance.observe(
            facts.num_offered, facts.num_drafted, facts.num_accepted, facts.context_lengths
        )
        event = self.health.observe(self._num_steps, facts.num_offered, facts.num_drafted, facts.num_accepted)
        if event is not None:
            self._events.append(dataclasses.replace(event, step_index=facts.step_index))

    def _judge(self, facts: StepFacts) -> None:
        """Hold a speculating step against plain decoding: the budget of trials, or the floor."""
        plain_seconds = plain_seconds_estimate(facts)
        if plain_seconds is None:
            return
        if Reason.EXPLORING in (facts.reason, self._reason_observed):
            self._exploration.observe_trial(facts.step_seconds - plain_seconds)
        elif self.cost.max_measured_tokens >= facts.batch_size:
            verdict = self._floor.observe(facts.step_seconds, plain_seconds, facts.plain_seconds)
            if verdict is not None:
                self._events.append(Event(EventKind.FLOOR_BROKEN, facts.step_index, str(verdict)))

    def _fade(self) -> None:
        self._num_plain_in_a_row += 1
        if self._num_plain_in_a_row % FADE_STEPS == 0:
            self.acceptance.forget(FADE)

    def mark(self, cause: str) -> None:
        """The policy or the drafter changed: keep some of what is known of acceptance, watch it anew."""
        self.acceptance.forget(KEEP_AFTER_CHANGE)
        self.health.mark(cause)
        self._exploration.renew()

    def learn_costs(self, steps: Sequence[StepFacts]) -> None:
        """Learn what steps cost that another policy decided, as `rlspec profile` measures them."""
        k_observed, self._k_observed = self._k_observed, 0
        for facts in steps:
            if facts.is_decoding:
                self._learn_cost(facts)
            self._k_observed = facts.num_draft_tokens
        self._k_observed = k_observed

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def state(self) -> dict[str, Any]:
        """What was learnt of costs and acceptance, as plain JSON values."""
        return {"cost": self.cost.state(), "acceptance": self.acceptance.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what an earlier run learnt.

        Raises:
            ValueError: It is no such state.
        """
        cost, acceptance = StepCost.from_state(state["cost"]), Acceptance.from_state(state["acceptance"])
        if acceptance.max_draft_tokens == self.acceptance.max_draft_tokens:
            acceptance.forget(KEEP_AFTER_CHANGE)
            self.acceptance = acceptance
        self.cost = cost
