"""Seconds saved, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlspec.savings import cumulative_savings, plain_seconds_estimate, savings
from tests.unit.test_types import FACTS

# Three requests, 2 drafts each verified: 6 tokens for 3 requests, so 2 plain steps of 0.1 s in 0.15 s.
SPECULATING = replace(
    FACTS,
    step_seconds=0.15,
    num_scheduled_tokens=9,
    num_draft_tokens=2,
    plain_seconds=0.1,
    request_ids=("a", "b", "c"),
    num_offered=(2, 2, 2),
    num_drafted=(2, 2, 2),
    num_accepted=(2, 1, 0),
    num_emitted=(3, 2, 1),
    context_lengths=(9, 9, 9),
)
PLAIN = replace(
    SPECULATING,
    step_seconds=0.12,
    num_scheduled_tokens=3,
    num_draft_tokens=0,
    num_drafted=(0, 0, 0),
    num_accepted=(0, 0, 0),
    num_emitted=(1, 1, 1),
)
PREFILL = replace(PLAIN, num_scheduled_tokens=4, step_seconds=0.5)
UNKNOWN = replace(PLAIN, plain_seconds=0.0, step_seconds=0.25)
NOTHING_EMITTED = replace(PLAIN, num_emitted=(0, 0, 0), step_seconds=0.25)
NOT_COMPARABLE = [PREFILL, UNKNOWN, NOTHING_EMITTED]


def test_a_step_stands_for_the_plain_steps_of_its_tokens() -> None:
    assert plain_seconds_estimate(SPECULATING) == pytest.approx(0.2)
    assert plain_seconds_estimate(PLAIN) == pytest.approx(0.1)
    # The request without a token does not count: 5 tokens for 2 requests.
    assert plain_seconds_estimate(replace(SPECULATING, num_emitted=(3, 2, 0))) == pytest.approx(0.25)


@pytest.mark.parametrize("facts", NOT_COMPARABLE)
def test_steps_that_cannot_be_compared(facts: object) -> None:
    assert plain_seconds_estimate(facts) is None  # type: ignore[arg-type]


def test_savings_add_up() -> None:
    found = savings([SPECULATING, *NOT_COMPARABLE, PLAIN, SPECULATING])
    assert found.plain_seconds == pytest.approx(0.5)
    assert found.actual_seconds == pytest.approx(0.42)
    assert found.saved_seconds == pytest.approx(0.08)
    assert found.not_comparable_seconds == pytest.approx(1.0)
    counts = (found.num_comparable_steps, found.num_speculating_steps, found.num_not_comparable_steps)
    assert counts == (3, 2, 3)


def test_steps_that_only_verify_or_only_draft_speculate() -> None:
    assert savings([replace(SPECULATING, num_draft_tokens=0)]).num_speculating_steps == 1
    assert savings([replace(PLAIN, num_draft_tokens=2)]).num_speculating_steps == 1


def test_the_curve_ends_at_the_sum() -> None:
    curve = cumulative_savings([SPECULATING, PREFILL, PLAIN])
    assert curve == pytest.approx([0.05, 0.05, 0.03])
    assert cumulative_savings([]) == []
    assert savings([]).saved_seconds == 0.0
