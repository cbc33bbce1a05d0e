"""The controller on a simulated engine: what it promises, whatever the noise. All tests are seeded."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlspec.speculation.build import build_policy, fixed_spec
from rlspec.speculation.guard import GuardedPolicy
from rlspec.types import Decision, EventKind, Load, Reason, StepFacts
from tests.unit.simulated_engine import SimulatedEngine, controller, heavy_tailed, seconds_of

GOLDEN = Path(__file__).parents[1] / "golden" / "controller_trace.json"
UPDATE_GOLDEN = "RLSPEC_UPDATE_GOLDEN"

NOISE_OF_A_RUN = 0.02
"""Runs of equal decisions differ by this much at most here: 8 % noise a step, hundreds of steps."""


def always(rate: float) -> SimulatedEngine:
    return SimulatedEngine(lambda step: [rate] * 5)


def plain_seconds(engine: SimulatedEngine, lengths: list[int], seed: int = 0) -> float:
    return seconds_of(engine.run(build_policy(fixed_spec(0)), lengths, seed=seed))


def loads() -> st.SearchStrategy[Load]:
    def make(rooms: list[int], contexts: list[int], num_tokens: int) -> Load:
        size = min(len(rooms), len(contexts))
        ids = tuple(f"r{index}" for index in range(size))
        return Load(0, 0, size + num_tokens, ids, tuple(contexts[:size]), tuple(rooms[:size]))

    sizes = {"min_size": 1, "max_size": 40}
    return st.builds(
        make,
        st.lists(st.integers(0, 9), **sizes),
        st.lists(st.integers(1, 40_000), **sizes),
        st.integers(0, 4000),
    )


@given(st.lists(loads(), min_size=1, max_size=30), st.floats(0.0, 1.0), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_k_stays_within_the_drafter_and_the_model_length(
    many: list[Load], rate: float, max_draft_tokens: int
) -> None:
    policy = controller(max_draft_tokens=max_draft_tokens)
    SimulatedEngine(lambda step: [rate] * max_draft_tokens).run(
        policy, [60] * 4
    )  # so that something is known
    for load in many:
        decision = policy.decide(load)
        assert 0 <= decision.num_draft_tokens <= min(max_draft_tokens, max(load.num_room))
        assert decision.reason is not Reason.CONTROLLER_FAILED
        if decision.caps is not None:
            assert all(0 <= cap <= decision.num_draft_tokens for cap in decision.caps)


@pytest.mark.parametrize("seed", range(3))
def test_off_where_no_k_pays(seed: int) -> None:
    engine = always(0.05)
    assert engine.best_k(1) == 0
    steps = engine.run(controller(), [400] * 4, seed=seed)
    assert sum(step.num_draft_tokens > 0 for step in steps[200:]) <= 0.05 * len(steps[200:])


@pytest.mark.parametrize("seed", range(3))
def test_k_of_a_constant_load_comes_to_the_best_goodput(seed: int) -> None:
    """Within 10 % of the best K's goodput, which neighbours of the best K reach."""
    engine = always(0.8)
    policy = controller()
    engine.run(policy, heavy_tailed(), seed=seed)
    steps = engine.run(policy, [300] * 2, seed=seed + 10)
    best = engine.run(build_policy(fixed_spec(engine.best_k(2))), [300] * 2, seed=seed + 10)
    assert seconds_of(steps) <= 1.1 * seconds_of(best)


def test_k_does_not_fall_as_acceptance_rises() -> None:
    chosen = []
    for rate in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95):
        engine = SimulatedEngine(lambda step, rate=rate: [rate] * 5, noise=0.0)  # type: ignore[misc]
        steps = engine.run(controller(), [2500], seed=1)
        late = [step.num_draft_tokens for step in steps[-200:-10] if step.reason is not Reason.EXPLORING]
        chosen.append(sum(late) / len(late))
    assert chosen == sorted(chosen)
    assert chosen[0] == 0.0
    assert chosen[-1] >= 3.0


@pytest.mark.parametrize("rate", [0.15, 0.2, 0.25, 0.3])
def test_no_oscillation_near_break_even(rate: float) -> None:
    """At batch 1 K = 1 pays from 0.23 on. Trials apart, K changes at most twice in 100 steps."""
    policy = controller()
    steps = always(rate).run(policy, [3000], seed=2)[300:]
    changes = sum(
        (a.num_draft_tokens > 0) != (b.num_draft_tokens > 0)
        for a, b in pairwise(steps)
        if Reason.EXPLORING not in (a.reason, b.reason)
    )
    assert changes <= len(steps) / 50


def test_a_collapse_turns_it_off_and_it_comes_back() -> None:
    sick = range(300, 1500)
    engine = SimulatedEngine(lambda step: [0.0 if step in sick else 0.7] * 5)
    policy = controller()
    engine.run(policy, heavy_tailed(16, 60, 200), seed=0)
    began = engine.num_steps
    steps = engine.run(policy, [6000], seed=1, max_steps=3500)
    found = {began + step.step_index: step for step in steps}
    assert sum(step.num_draft_tokens > 0 for number, step in found.items() if number < 300) > 50
    during = [step for number, step in found.items() if number in sick]
    assert sum(step.num_draft_tokens > 0 for step in during[:60]) <= 20
    assert sum(step.num_draft_tokens > 0 for step in during[60:]) <= 0.05 * len(during)
    after = [step for number, step in found.items() if number > 3000]
    assert sum(step.num_draft_tokens > 0 for step in after) > 0.8 * len(after)


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_never_matches_costs_little(seed: int) -> None:
    lengths = [1200, 600, 300, 150]
    engine = always(0.0)
    policy = controller()
    steps = engine.run(policy, lengths, seed=seed)
    assert len(steps) >= 600
    tried = [step for step in steps if step.num_draft_tokens]
    assert tried
    assert {step.reason for step in tried} == {Reason.EXPLORING}
    lost = sum(
        step.step_seconds - engine.step_seconds(step.batch_size, 0, step.batch_size)
        for step in steps[1:]
        if step.num_draft_tokens or any(step.num_drafted)
    )
    assert lost < 0.03 * seconds_of(steps)


def test_trials_begin_in_the_tail() -> None:
    steps = always(0.6).run(controller(), heavy_tailed(), seed=3)
    first = next(step for step in steps if step.num_draft_tokens)
    assert first.reason is Reason.EXPLORING
    assert first.batch_size <= 24


def test_without_exploration_nothing_is_tried() -> None:
    steps = always(0.9).run(controller(exploration_fraction=0.0), [500])
    assert {step.num_draft_tokens for step in steps} == {0}


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_no_slower_than_plain_and_faster_where_it_pays(rate: float) -> None:
    engine, lengths = always(rate), heavy_tailed()
    policy = controller()
    engine.run(policy, lengths, seed=0)
    ratio = seconds_of(engine.run(policy, lengths, seed=1)) / plain_seconds(engine, lengths, seed=1)
    assert ratio <= 1.02 + NOISE_OF_A_RUN
    if rate >= 0.7:
        assert ratio <= 0.9


def test_stalls_of_the_machine_change_little() -> None:
    engine = SimulatedEngine(lambda step: [0.7] * 5, stall_share=0.02)
    policy = controller()
    engine.run(policy, heavy_tailed(), seed=0)
    steps = engine.run(policy, [400] * 2, seed=1)
    assert sum(step.num_draft_tokens > 0 for step in steps) > 0.8 * len(steps)


def test_the_floor_ends_speculation_that_costs_more_than_expected() -> None:
    """Step costs that no table shows: each speculating step waits for something 60 ms long after a while."""

    class Waiting(SimulatedEngine):
        def step_seconds(self, num_tokens: int, k: int, batch_size: int) -> float:
            waits = 0.06 if self.num_steps > 600 and (k or num_tokens > batch_size) else 0.0
            return super().step_seconds(num_tokens, k, batch_size) + waits

    engine = Waiting(lambda step: [0.6] * 5)
    policy = controller()
    engine.run(policy, heavy_tailed(16, 60, 200), seed=0)
    steps = engine.run(policy, [3000], seed=1, max_steps=1500)
    assert sum(step.num_draft_tokens > 0 for step in steps[:200]) > 100
    late = steps[-400:]
    assert sum(step.num_draft_tokens > 0 for step in late) <= 0.2 * len(late)


def test_equal_runs_decide_alike_and_as_recorded() -> None:
    def trace() -> list[list[object]]:
        policy = controller()
        engine = SimulatedEngine(lambda step: [0.7, 0.6, 0.5, 0.4, 0.3], stall_share=0.01)
        runs = [engine.run(policy, heavy_tailed(16, 40, 160), seed=seed) for seed in range(3)]
        return [[step.num_draft_tokens, step.reason.value] for steps in runs for step in steps]

    found = trace()
    assert found == trace()
    if os.environ.get(UPDATE_GOLDEN):
        GOLDEN.write_text(json.dumps(found) + "\n")
    assert found == json.loads(GOLDEN.read_text()), f"decisions changed; if meant so, set {UPDATE_GOLDEN}=1"


def test_what_was_learnt_survives_as_json() -> None:
    engine, lengths = always(0.8), heavy_tailed()
    first = controller()
    engine.run(first, lengths)
    state = json.loads(json.dumps(first.state()))
    second = controller()
    assert second.restore(state) is None
    steps = engine.run(second, lengths, seed=1)
    speculating = next(step for step in steps if step.num_draft_tokens)
    assert speculating.reason is Reason.PAYS


@pytest.mark.parametrize("state", [{}, {"cost": {}, "acceptance": {}}, {"cost": 1, "acceptance": None}])
def test_a_state_that_is_none_is_refused_and_nothing_changes(state: dict[str, object]) -> None:
    policy = controller()
    before = policy.state()
    assert policy.restore(state) is not None
    assert policy.state() == before


class _Failing:
    def __init__(self, at: int) -> None:
        self._at = at

    def decide(self, load: Load) -> Decision:
        if load.step_index == self._at:
            raise ZeroDivisionError("broken")
        return Decision(3, Reason.PAYS)

    def observe(self, facts: StepFacts) -> None:
        pass

    def take_events(self) -> list[object]:
        return []

    def mark(self, cause: str) -> None:
        pass

    def state(self) -> dict[str, object]:
        return {}


def test_a_crash_turns_speculation_off_with_an_event(caplog: pytest.LogCaptureFixture) -> None:
    policy = GuardedPolicy(_Failing(at=20), 5)  # type: ignore[arg-type]
    steps = always(0.5).run(policy, [100])
    assert {(step.num_draft_tokens, step.reason) for step in steps[20:]} == {(0, Reason.CONTROLLER_FAILED)}
    assert sum(step.num_emitted[0] for step in steps) == 100
    events = policy.take_events()
    assert [(event.kind, event.step_index) for event in events] == [(EventKind.CONTROLLER_FAILED, 20)]
    assert "ZeroDivisionError: broken" in events[0].text
    assert "Traceback" in caplog.text
    assert policy.state() is None


@pytest.mark.parametrize("decision", [Decision(9, Reason.PAYS), Decision(2, Reason.PAYS, caps=(1, 2))])
def test_a_decision_out_of_bounds_is_a_crash(decision: Decision) -> None:
    failing = _Failing(at=-1)
    failing.decide = lambda load: decision  # type: ignore[method-assign]
    load = Load(0, 0, 1, ("a",), (10,), (5,))
    assert GuardedPolicy(failing, 5).decide(load).num_draft_tokens == 0  # type: ignore[arg-type]
