"""The statistics of a run, checked by hand, and for runs that are empty or had no drafts."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlspec.statistics import (
    active_requests_over_time,
    bootstrap_upper_bound,
    concatenate,
    summarise,
    tokens_per_second_over_time,
)
from rlspec.types import FinishReason, Rollout
from tests.unit.test_rollout_files import ROLLOUT
from tests.unit.test_types import FACTS

OTHER = replace(
    ROLLOUT,
    sample_index=1,
    completion_token_ids=(3,) * 9,
    finish_reason=FinishReason.LENGTH,
    num_drafted=3,
    num_accepted=3,
    num_drafted_by_position=(1, 1, 1),
    num_accepted_by_position=(1, 1, 1),
    num_steps=6,
    started_seconds=0.0,
    seconds=4.0,
    data={},
)
STEPS = [FACTS, replace(FACTS, step_index=5, started_seconds=11.0, num_draft_tokens=0, num_emitted=(1, 1))]


def test_numbers_by_hand() -> None:
    found = summarise([ROLLOUT, OTHER], STEPS, seconds=6.0)
    assert (found.num_rollouts, found.num_prompt_tokens, found.num_completion_tokens) == (2, 2, 12)
    assert found.tokens_per_second == 2.0
    assert (found.num_drafted, found.num_accepted) == (7, 4)
    assert found.acceptance_length == 1 + 4 / 3
    assert found.acceptance_by_position == (2 / 3, 1 / 3, 1.0)
    assert found.tokens_per_request_step == 12 / 8
    assert found.steps_by_k == {0: 1, 3: 1}
    assert found.steps_by_reason == {"fixed": 2}
    assert (found.num_steps, found.mean_step_seconds) == (2, 0.25)
    assert found.last_finished_seconds == 4.0
    assert (found.length_p50, found.length_max) == (6.0, 9)
    assert found.finish_reasons == {"length": 1, "stop": 1}
    assert found.mean_reward == 1.0
    assert found.to_dict()["steps_by_k"] == {"0": 1, "3": 1}


def test_empty_run_has_no_nan() -> None:
    found = summarise([], [], seconds=0.0)
    assert found.acceptance_length == 1.0
    assert found.mean_reward is None
    numbers = [value for value in found.to_dict().values() if isinstance(value, float)]
    assert not any(math.isnan(value) for value in numbers)
    assert active_requests_over_time([]) == tokens_per_second_over_time([], 1.0) == ([], [])


def test_run_without_drafts() -> None:
    plain = replace(
        ROLLOUT, num_drafted=0, num_accepted=0, num_drafted_by_position=(), num_accepted_by_position=()
    )
    found = summarise([plain], STEPS, seconds=1.0)
    assert (found.acceptance_length, found.acceptance_by_position) == (1.0, ())


def test_runs_follow_each_other() -> None:
    rollouts, steps, seconds = concatenate([([ROLLOUT], STEPS, 5.0), ([ROLLOUT], STEPS, 7.0)])
    assert seconds == 12.0
    assert [rollout.started_seconds for rollout in rollouts] == [0.5, 5.5]
    assert [facts.started_seconds for facts in steps] == [0.0, 0.5, 5.0, 5.5]


def test_time_series() -> None:
    assert active_requests_over_time(STEPS) == ([0.0, 0.5], [2, 2])
    middles, rates = tokens_per_second_over_time(STEPS, window_seconds=0.5)
    assert middles == [0.25, 0.75]
    assert rates == [8.0, 4.0]


@pytest.mark.parametrize("window_seconds", [0.0, -1.0, math.nan])
def test_window_must_be_positive(window_seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        tokens_per_second_over_time(STEPS, window_seconds)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=30), st.floats(0.01, 5.0))
def test_windows_lose_no_token(step_seconds: list[float], window_seconds: float) -> None:
    steps = [replace(FACTS, started_seconds=7.0, step_seconds=seconds) for seconds in step_seconds]
    _, rates = tokens_per_second_over_time(steps, window_seconds)
    assert sum(rates) * window_seconds == pytest.approx(4 * len(steps))


def test_end_just_past_a_window_by_rounding_is_kept() -> None:
    end = math.nextafter(3 * 0.3, 1.0)
    _, rates = tokens_per_second_over_time([replace(FACTS, step_seconds=end)], window_seconds=0.3)
    assert sum(rates) * 0.3 == pytest.approx(4)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_acceptance_adds_up(accepted: list[int]) -> None:
    rollouts: list[Rollout] = [
        replace(
            ROLLOUT,
            num_drafted=4,
            num_accepted=count,
            num_drafted_by_position=(1, 1, 1, 1),
            num_accepted_by_position=tuple(int(count > position) for position in range(4)),
        )
        for count in accepted
    ]
    found = summarise(rollouts, [], 1.0)
    assert found.num_accepted == sum(accepted)
    assert sum(found.acceptance_by_position) == pytest.approx(found.acceptance_length - 1)
    assert list(found.acceptance_by_position) == sorted(found.acceptance_by_position, reverse=True)


def test_bootstrap_bound_covers_the_median() -> None:
    """Statistic: how often the bound lies above the true median of 15 normal values; threshold 90 % of 200
    draws. At the coverage of 94.2 % (measured, 6,000 draws) 1 seed in 140 fails; the seed is fixed."""
    generator = np.random.default_rng(1)
    covered = [
        bootstrap_upper_bound(generator.normal(1.0, 0.1, 15).tolist(), num_resamples=500) >= 1.0
        for _ in range(200)
    ]
    assert np.mean(covered) >= 0.9
    assert bootstrap_upper_bound([1.0] * 15) == 1.0


def test_bootstrap_needs_values() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_upper_bound([])


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20), st.floats(0.5, 0.99))
def test_bootstrap_bound_lies_among_the_values_and_repeats(values: list[float], confidence: float) -> None:
    bound = bootstrap_upper_bound(values, confidence, num_resamples=50)
    assert min(values) <= bound <= max(values)
    assert bound == bootstrap_upper_bound(values, confidence, num_resamples=50)


@pytest.mark.parametrize(
    ("reward", "mean"),
    [(0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (math.nan, None), (math.inf, None), ("1", None)],
)
def test_rewards_that_count(reward: object, mean: float | None) -> None:
    found = summarise([replace(ROLLOUT, data={"reward": reward})], [], 1.0)
    assert found.mean_reward == mean
    json.dumps(found.to_dict(), allow_nan=False)
