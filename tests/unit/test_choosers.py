"""Choosers: what each promises of K, in worlds whose best K is known. All randomness is seeded."""

from __future__ import annotations

import inspect
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlspec.config import parse_config
from rlspec.errors import ConfigError
from rlspec.policy_specs import configured_spec
from rlspec.speculation.build import build_policy
from rlspec.speculation.policies import CHOOSERS
from rlspec.speculation.policies.base import Chooser, Outcome, Outlook
from rlspec.speculation.policies.goodput import GoodputChooser
from rlspec.speculation.policies.roofline import RooflineChooser
from tests.unit.bandit_world import PAYS, World, play

EVERY = sorted(CHOOSERS)
MICROSECONDS = dict.fromkeys(EVERY, 40.0) | {"goodput": 10.0}
GUARD = 5.0
"""Factor on the bound for shared, slow machines."""


@st.composite
def outlooks(draw: st.DrawFn, max_draft_tokens: int | None = None) -> Outlook:
    """Any batch; acceptance and costs by K that rise."""
    k_max = draw(st.integers(0, 7)) if max_draft_tokens is None else max_draft_tokens
    acceptance = draw(st.lists(st.floats(0.0, 1.0), min_size=k_max, max_size=k_max))
    steps = draw(st.lists(st.floats(0.0, 1.0), min_size=k_max, max_size=k_max))
    cost = [1.0]
    for step in steps:
        cost.append(cost[-1] + step)
    return World(tuple(acceptance), tuple(cost)).outlook(draw(st.integers(1, 600)))


OUTCOMES = st.builds(
    Outcome,
    batch_size=st.integers(0, 600),
    num_draft_tokens=st.integers(0, 9),
    num_emitted=st.integers(0, 4000),
    num_drafted=st.integers(0, 4000),
    num_accepted=st.integers(0, 4000),
    step_seconds=st.sampled_from([0.0, 1e-7, 0.02, 2.0, 3600.0]),
)


@pytest.mark.parametrize("name", EVERY)
@given(events=st.lists(st.one_of(outlooks(), OUTCOMES), max_size=60))
@settings(max_examples=60, deadline=None)
def test_k_is_allowed_and_equal_choosers_choose_the_same(name: str, events: list[Outlook | Outcome]) -> None:
    first, second = CHOOSERS[name](), CHOOSERS[name]()
    for event in events:
        if isinstance(event, Outcome):
            first.observe(event)
            second.observe(event)
            continue
        k = first.choose(event)
        assert 0 <= k <= event.max_draft_tokens
        assert second.choose(event) == k
        for chooser in (first, second):
            chooser.observe(Outcome(event.batch_size, k, event.batch_size, 0, 0, event.step_seconds(k)))


@pytest.mark.parametrize("name", EVERY)
def test_outcomes_of_a_batch_never_chosen_for_change_nothing(name: str) -> None:
    first, second = CHOOSERS[name](), CHOOSERS[name]()
    generator = random.Random(0)
    for index in range(200):
        outlook = PAYS.outlook(16)
        k = first.choose(outlook)
        assert second.choose(outlook) == k
        outcome = PAYS.outcome(k, 16, generator)
        first.observe(outcome)
        second.observe(outcome)
        if name != "roofline":  # whose ladder goes by acceptance, whatever the batch
            second.observe(PAYS.outcome(index % 6, 300, generator))


@given(outlooks())
@settings(deadline=None)
def test_goodput_is_the_smallest_of_the_best(outlook: Outlook) -> None:
    k = GoodputChooser().choose(outlook)
    assert all(outlook.goodput(k) > outlook.goodput(smaller) for smaller in range(k))
    assert all(outlook.goodput(k) >= outlook.goodput(any_k) for any_k in range(outlook.max_draft_tokens + 1))


@pytest.mark.parametrize("chooser", [GoodputChooser, RooflineChooser])
@given(outlook=outlooks())
@settings(deadline=None)
def test_0_where_no_k_pays(chooser: Callable[[], Chooser], outlook: Outlook) -> None:
    pays = any(outlook.goodput(k) > outlook.goodput(0) for k in range(outlook.max_draft_tokens + 1))
    if not pays:
        assert chooser().choose(outlook) == 0


@st.composite
def worlds_and_better(draw: st.DrawFn) -> tuple[World, World]:
    """Two worlds of equal costs; in the second one acceptance, given all before, is higher at each position.

    Higher survival alone is not enough: where only the first position gets better, K = 1 may beat K = 2.
    """
    cost = [1.0]
    for step in draw(st.lists(st.floats(0.0, 0.8), min_size=5, max_size=5)):
        cost.append(cost[-1] + step)
    low = draw(st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5))
    gain = draw(st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5))
    high = tuple(rate + (1.0 - rate) * part for rate, part in zip(low, gain, strict=True))
    return World(tuple(low), tuple(cost)), World(high, tuple(cost))


def assert_not_above(larger_k: int, k: int, outlook: Outlook) -> None:
    """K <= larger_k, but for rounding where both are equally good by `outlook`."""
    if k > larger_k:
        assert outlook.goodput(k) == pytest.approx(outlook.goodput(larger_k), rel=1e-12)


@given(worlds_and_better())
@settings(deadline=None)
def test_goodput_does_not_fall_as_acceptance_rises(pair: tuple[World, World]) -> None:
    before, after = (world.outlook(8) for world in pair)
    assert_not_above(GoodputChooser().choose(after), GoodputChooser().choose(before), after)


def test_goodput_may_fall_where_only_the_first_position_gets_better() -> None:
    costs = (1.0, 1.3, 1.61)
    before, after = World((0.5, 0.8), costs), World((0.9, 0.45), costs)
    assert all(high >= low for low, high in zip(before.tokens, after.tokens, strict=True))
    assert [GoodputChooser().choose(world.outlook(8)) for world in (before, after)] == [2, 1]


@given(outlooks(max_draft_tokens=6), st.floats(0.0, 2.0))
@settings(deadline=None)
def test_goodput_does_not_rise_as_draft_tokens_cost_more(outlook: Outlook, more: float) -> None:
    seconds = outlook.verify_seconds
    steeper = Outlook(
        outlook.batch_size,
        outlook.num_draft_tokens,
        outlook.tokens,
        tuple(value * (1.0 + more * k) for k, value in enumerate(seconds)),
        tuple(value * (1.0 + more * k) for k, value in enumerate(outlook.draft_seconds)),
    )
    assert_not_above(GoodputChooser().choose(outlook), GoodputChooser().choose(steeper), steeper)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("beg_mab", {"epsilon": 1.5}),
        ("beg_mab", {"epsilon": "0.1"}),
        ("beg_mab", {"window_rounds": 0}),
        ("beg_mab", {"max_verify_tokens": 0}),
        ("beg_mab", {"seed": 1.5}),
        ("ucb", {"reward_spread": -0.1}),
        ("ucb", {"reward_spread": float("nan")}),
        ("ucb", {"window_rounds": True}),
        ("exp3", {"exploration": -0.1}),
        ("exp3", {"learning_rate": float("inf")}),
        ("roofline", {"ladder": []}),
        ("roofline", {"ladder": [7, 5]}),
        ("roofline", {"ladder": [0, 5]}),
        ("roofline", {"ladder": "57"}),
        ("roofline", {"window_steps": 0}),
        ("roofline", {"min_speedup": -1.0}),
        ("roofline", {"acceptance_up": 0.5}),
        ("goodput", {"epsilon": 0.1}),
    ],
)
def test_arguments_that_mean_nothing_are_refused(name: str, arguments: dict[str, object]) -> None:
    speculation = {"policy": name, "policy_arguments": arguments}
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        spec_of(speculation)


def test_arguments_of_the_configuration_reach_the_chooser() -> None:
    ladder = {"policy": "roofline", "policy_arguments": {"ladder": [2, 3], "min_speedup": 1.2}}
    build_policy(spec_of(ladder))


@pytest.mark.parametrize("name", EVERY)
def test_choosing_takes_microseconds(name: str) -> None:
    chooser, generator = CHOOSERS[name](), random.Random(0)
    play(chooser, PAYS, 400, generator)
    outlook, microseconds = PAYS.outlook(16), []
    for _ in range(1000):
        started = time.perf_counter()
        k = chooser.choose(outlook)
        microseconds.append(1e6 * (time.perf_counter() - started))
        chooser.observe(PAYS.outcome(k, 16, generator))
    assert statistics.median(microseconds) <= GUARD * MICROSECONDS[name]


@pytest.mark.parametrize("name", EVERY)
def test_the_docs_list_each_argument_and_its_default(name: str) -> None:
    rows = (Path(__file__).parents[2] / "docs" / "policies.md").read_text().splitlines()
    row = next(row for row in rows if row.startswith(f"| `{name}`"))
    arguments = inspect.signature(CHOOSERS[name]).parameters
    for argument in arguments.values():
        default = {None: "(each K from 1)" if argument.name == "ladder" else "none"}.get(
            argument.default, argument.default
        )
        assert f"`{argument.name}` {default}" in row
    if not arguments:
        assert row.endswith("| none |")


def spec_of(speculation: dict[str, object]) -> object:
    """The spec of a configuration with a drafter."""
    speculative = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5}
    raw = {
        "policy": {"model": "m"},
        "drafter": {"speculative_config": speculative},
        "speculation": speculation,
    }
    return configured_spec(parse_config(raw))
