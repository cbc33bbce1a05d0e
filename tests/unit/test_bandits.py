"""The bandits: how soon they settle on the best K and follow a change, by bucket. All is seeded."""

from __future__ import annotations

import random
import statistics

import pytest

from rlspec.speculation.policies import CHOOSERS, Chooser
from rlspec.speculation.policies.buckets import (
    MAX_WAITED_STEPS,
    RETRY_OUTCOMES,
    ROUND_REQUEST_STEPS,
    bucket_of,
)
from tests.unit.bandit_world import NONE_PAYS, PAYS, World, play, share

BANDITS = ["beg_mab", "exp3", "ucb"]

SETTLES_WITHIN = {"beg_mab": 100, "ucb": 100, "exp3": 500}
"""Rounds to the best K of PAYS or NONE_PAYS; 12 seeds needed at most 20, 20 and 360."""
FOLLOWS_WITHIN = {"beg_mab": 1400, "ucb": 400, "exp3": 1400}
"""The same after the best K has changed; 12 seeds needed at most 920, 220 and 920."""
NUM_LATE = 300
SETTLED = 0.85
"""Share of NUM_LATE rounds: BEG-MAB draws the best K in 1 - epsilon (1 - 1 / arms) = .917 of its rounds, with
a standard deviation of .016."""
SETTLED_AT_0, NUM_LATE_AT_0 = 0.9, 3000
"""The same over more rounds, with a standard deviation of .005."""


def seeded(name: str, seed: int) -> Chooser:
    """The chooser with its defaults, and the seed if it draws."""
    make = CHOOSERS[name]
    return make() if name == "ucb" else make(seed=seed)


@pytest.mark.parametrize("world", [PAYS, NONE_PAYS], ids=["pays", "none_pays"])
@pytest.mark.parametrize("name", BANDITS)
def test_bandits_settle_on_the_best_k_and_follow_a_change(name: str, world: World) -> None:
    other = NONE_PAYS if world is PAYS else PAYS
    for seed in range(4):
        chooser, generator = seeded(name, seed), random.Random(seed)
        play(chooser, world, SETTLES_WITHIN[name], generator)
        assert share(play(chooser, world, NUM_LATE, generator), world.best_k) >= SETTLED
        play(chooser, world, 1000, generator)
        play(chooser, other, FOLLOWS_WITHIN[name], generator)
        assert share(play(chooser, other, NUM_LATE, generator), other.best_k) >= SETTLED


@pytest.mark.parametrize("name", BANDITS)
def test_bandits_settle_on_0_where_no_k_pays(name: str) -> None:
    chooser, generator = seeded(name, 0), random.Random(0)
    play(chooser, NONE_PAYS, SETTLES_WITHIN[name], generator)
    assert share(play(chooser, NONE_PAYS, NUM_LATE_AT_0, generator), 0) >= SETTLED_AT_0


@pytest.mark.parametrize("name", BANDITS)
def test_bandits_settle_at_one_request_whose_steps_are_luck(name: str) -> None:
    """A step of one request gives 1 to 6 tokens: 95 % of the best speedup, in rounds of 16 steps."""
    chooser, generator = seeded(name, 1), random.Random(1)
    num_steps = ROUND_REQUEST_STEPS * SETTLES_WITHIN[name]
    play(chooser, PAYS, num_steps, generator, batch_size=1)
    late = play(chooser, PAYS, ROUND_REQUEST_STEPS * NUM_LATE, generator, batch_size=1)
    mean = statistics.fmean(PAYS.speedups[k] for k in late)
    assert mean >= 0.95 * max(PAYS.speedups)


@pytest.mark.parametrize("name", BANDITS)
def test_bandits_learn_in_each_bucket_for_itself(name: str) -> None:
    chooser, generator = seeded(name, 0), random.Random(0)
    for _ in range(SETTLES_WITHIN[name]):
        play(chooser, PAYS, 1, generator, batch_size=16)
        play(chooser, NONE_PAYS, 1, generator, batch_size=32)
    assert share(play(chooser, PAYS, NUM_LATE, generator, batch_size=16), PAYS.best_k) >= SETTLED
    assert share(play(chooser, NONE_PAYS, NUM_LATE, generator, batch_size=32), 0) >= SETTLED


@pytest.mark.parametrize("name", BANDITS)
def test_an_arm_without_outcomes_is_left_alone_for_a_while(name: str) -> None:
    """Only K = 0 gives outcomes, as where one request may not speculate."""
    chooser, generator = seeded(name, 0), random.Random(0)
    chosen = []
    for _ in range(1000):
        chosen.append(chooser.choose(PAYS.outlook(16)))
        if chosen[-1] == 0:
            chooser.observe(PAYS.outcome(0, 16, generator))
    num_arms = len(PAYS.cost) - 1
    worst = num_arms * MAX_WAITED_STEPS / (RETRY_OUTCOMES + num_arms * MAX_WAITED_STEPS)
    assert share(chosen, 0) >= 1.0 - worst - 0.02


def test_buckets_are_powers_of_two() -> None:
    edges = [1, 2, 4, 8, 16, 32]
    assert [bucket_of(size) for size in edges] == list(range(6))
    assert [bucket_of(size + 1) for size in edges] == list(range(1, 7))


def test_beg_mab_verifies_no_more_than_it_may() -> None:
    chooser = CHOOSERS["beg_mab"](max_verify_tokens=48)
    assert set(play(chooser, PAYS, 300, random.Random(0), batch_size=16)) == {0, 1, 2}
    assert set(play(chooser, PAYS, 300, random.Random(0), batch_size=49)) == {0}
