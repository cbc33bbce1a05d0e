"""The timeline: stretches with their numbers, few rows for many changes, events in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlspec.timeline import REASON_TEXTS, Happening, Stretch, num_calls, start_seconds, timeline
from rlspec.types import Event, EventKind, Reason, StepFacts
from tests.unit.test_savings import PLAIN, SPECULATING


def step(index: int, k: int = 2, reason: Reason = Reason.PAYS, base: StepFacts = SPECULATING) -> StepFacts:
    return replace(
        base,
        step_index=index,
        started_seconds=100.0 + 0.2 * index,
        num_draft_tokens=k,
        reason=reason,
        num_waiting=index,
        predicted_seconds=0.0 if index % 2 else 0.14,
    )


def event(index: int, text: str, kind: EventKind = EventKind.FLOOR_BROKEN) -> Event:
    return Event(kind, index, text)


def stretches(steps: list[StepFacts], max_rows: int) -> list[Stretch]:
    return [row for row in timeline(steps, max_rows) if isinstance(row, Stretch)]


def test_every_reason_has_words() -> None:
    assert set(REASON_TEXTS) == set(Reason)
    assert len(set(REASON_TEXTS.values())) == len(Reason)


def test_numbers_of_a_stretch_by_hand() -> None:
    steps = [step(0), step(1), step(2, 0, Reason.PLAIN_IS_FASTER, PLAIN)]
    first, second = stretches(steps, 40)
    assert (first.first_step, first.last_step, first.num_steps) == (0, 1, 2)
    assert (first.begin_seconds, first.end_seconds) == pytest.approx((0.0, 0.35))
    assert (first.min_active, first.max_active, first.max_waiting) == (3, 3, 1)
    assert (first.num_draft_tokens, first.reason, first.majority) == (2, Reason.PAYS, 1.0)
    assert (first.num_drafted, first.num_accepted) == (12, 6)
    assert first.tokens_per_request_step == 2.0
    assert first.predicted_seconds == 0.14  # the unknown one does not count
    assert first.plain_seconds == 0.1
    assert first.saved_seconds == pytest.approx(0.1)
    assert (second.num_draft_tokens, second.reason) == (0, Reason.PLAIN_IS_FASTER)
    assert second.saved_seconds == pytest.approx(-0.02)


def test_a_smaller_batch_begins_a_stretch_and_a_new_call_does_not() -> None:
    columns = ("request_ids", "num_offered", "num_drafted", "num_accepted", "num_emitted", "context_lengths")
    one = replace(step(2), **{name: getattr(SPECULATING, name)[:1] for name in columns})
    assert [row.max_active for row in stretches([step(0), step(1), one], 40)] == [3, 1]
    assert len(stretches([step(0), step(1), step(0)], 40)) == 1


def test_a_blip_is_swallowed_and_shown_as_range() -> None:
    steps = [step(index, 4 if index == 10 else 2) for index in range(30)]
    assert [row.num_draft_tokens for row in stretches(steps, 40)] == [2, 4, 2]
    (row,) = stretches(steps, 2)
    assert (row.num_draft_tokens, row.min_draft_tokens, row.max_draft_tokens) == (2, 2, 4)
    assert row.majority == pytest.approx(29 / 30)


def test_long_stretches_survive_a_restless_one() -> None:
    restless = [step(100 + index, index % 3) for index in range(100)]
    steps = [step(index, 5) for index in range(100)] + restless + [step(200 + i, 7) for i in range(100)]
    rows = stretches(steps, 8)
    assert len(rows) <= 8
    long = [row for row in rows if row.num_draft_tokens in (5, 7)]
    assert [row.num_draft_tokens for row in long] == [5, 7]
    assert all(100 <= row.num_steps < 110 for row in long)  # the last restless steps go to the next row


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Reason)), min_size=1), st.integers(1, 9))
def test_rows_cover_every_step_once_and_are_few(choices: list[tuple[int, Reason]], max_rows: int) -> None:
    rows = stretches([step(index, k, reason) for index, (k, reason) in enumerate(choices)], max_rows)
    assert len(rows) <= max_rows
    assert [row.first_step for row in rows] == [0, *(row.last_step + 1 for row in rows[:-1])]
    assert rows[-1].last_step == len(choices) - 1


def test_events_follow_their_stretch_one_row_a_kind() -> None:
    other = event(1, "d", EventKind.DRAFTER_COLLAPSED)
    records = [step(0), event(0, "a"), step(1), event(1, "b"), other, step(2, 0), event(2, "c")]
    rows = timeline(records)
    assert [type(row) for row in rows] == [Stretch, Happening, Happening, Stretch, Happening]
    happenings = [row for row in rows if isinstance(row, Happening)]
    assert [(row.step, row.text, row.num_more) for row in happenings] == [
        (0, "a", 1),
        (1, "d", 0),
        (2, "c", 0),
    ]
    assert isinstance(timeline([event(0, "first"), step(0)])[1], Happening)


def test_calls_follow_each_other_without_the_time_between() -> None:
    steps = [step(0), step(1), replace(step(0), started_seconds=3.0)]
    assert start_seconds(steps) == pytest.approx([0.0, 0.2, 0.35])
    assert (num_calls(steps), num_calls([])) == (2, 0)


def test_nothing_has_no_rows() -> None:
    assert timeline([]) == []
