"""Owns a run in a few rows for people: stretches of steps with the same K and reason, and the events."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlspec.savings import savings
from rlspec.step_files import Record
from rlspec.types import Event, EventKind, Reason, StepFacts

REASON_TEXTS: dict[Reason, str] = {
    Reason.OFF: "speculation is off",
    Reason.FIXED: "a fixed K",
    Reason.TABLE: "K by batch size, from a table",
    Reason.REPLAYED: "K of an earlier run, replayed",
    Reason.REPLAY_EXHAUSTED: "the replayed run had no more steps",
    Reason.PAYS: "drafting is expected to pay",
    Reason.PLAIN_IS_FASTER: "plain decoding is expected to be faster",
    Reason.HELD: "kept: another K would gain too little to change",
    Reason.EXPLORING: "trying a K to measure it",
    Reason.COOLING_DOWN: "plain for a while, after drafting cost time",
    Reason.DRAFTER_UNHEALTHY: "too few drafts are accepted to go on",
    Reason.CONTROLLER_FAILED: "the controller failed; plain decoding goes on",
    Reason.NO_ROOM: "no request has room for a draft",
}
"""Each reason in words."""

MAX_ROWS = 40
"""A screen or two; a run with more changes of K shows its longer stretches."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps, mostly with one K for one reason.

    Attributes:
        first_step, last_step: Counted through the file, from 0.
        begin_seconds, end_seconds: From the start of the first step of the file.
        min_active, max_active: Requests in a step.
        max_waiting: Requests waiting.
        num_draft_tokens, reason: Of most of the steps; ties go to the first.
        min_draft_tokens, max_draft_tokens: The K that occur.
        majority: Share of the steps with that K and reason.
        num_drafted, num_accepted: Draft tokens verified and accepted.
        tokens_per_request_step: Tokens a request that got any, and step.
        median_seconds: Of the steps.
        predicted_seconds, expected_seconds, plain_seconds: Medians of what the controller said, over the
            steps for which it did; 0: for none.
        saved_seconds: Against plain decoding; None where no step can be compared.
    """

    first_step: int
    last_step: int
    begin_seconds: float
    end_seconds: float
    min_active: int
    max_active: int
    max_waiting: int
    num_draft_tokens: int
    reason: Reason
    min_draft_tokens: int
    max_draft_tokens: int
    majority: float
    num_drafted: int
    num_accepted: int
    tokens_per_request_step: float
    median_seconds: float
    predicted_seconds: float
    expected_seconds: float
    plain_seconds: float
    saved_seconds: float | None

    @property
    def num_steps(self) -> int:
        """Steps in this stretch."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True, slots=True)
class Happening:
    """An event, and those of its kind that followed in the same stretch.

    Attributes:
        step: After which step it stands in the file, counted through the file.
        seconds: When that step began.
        kind, text: Of the first event.
        num_more: How many of its kind followed.
    """

    step: int
    seconds: float
    kind: EventKind
    text: str
    num_more: int


Row = Stretch | Happening


def timeline(records: Sequence[Record], max_rows: int = MAX_ROWS) -> list[Row]:
    """The stretches of a run, at most `max_rows`, each followed by what happened in it.

    Without merging, a stretch has one K, one reason and batches between two powers of two. Where that gives
    too many, stretches of fewer steps than a limit are joined with their neighbours; the limit doubles
    until the rest fits. A joined stretch shows the K and reason of most of its steps.
    """
    steps = [record for record in records if isinstance(record, StepFacts)]
    starts = start_seconds(steps)
    happenings = _events_with_steps(records)
    rows: list[Row] = []
    for begin, end in _bounds(steps, max_rows):
        rows.append(_stretch(steps, starts, begin, end))
        inside = [(step, event) for step, event in happenings if begin <= step < end]
        rows += _happenings(inside, starts)
    return rows


def start_seconds(steps: Sequence[StepFacts]) -> list[float]:
    """When each step was scheduled, from the first; a call begins where the one before it ended.

    The clocks of two processes have nothing in common, so the time between calls is left out.
    """
    starts: list[float] = []
    offset = ended = 0.0
    for previous, facts in zip([None, *steps], steps, strict=False):
        if previous is None or facts.step_index <= previous.step_index:
            offset = ended - facts.started_seconds
        starts.append(facts.started_seconds + offset)
        ended = max(ended, starts[-1] + facts.step_seconds)
    return starts


def num_calls(steps: Sequence[StepFacts]) -> int:
    """How many calls wrote these steps: `step_index` begins again with each."""
    restarts = sum(after.step_index <= before.step_index for before, after in itertools.pairwise(steps))
    return restarts + 1 if steps else 0


_Key = tuple[int, Reason, int]
"""K, reason and batch-size bucket."""


def _key(facts: StepFacts) -> _Key:
    return facts.num_draft_tokens, facts.reason, facts.batch_size.bit_length()


def _bounds(steps: Sequence[StepFacts], max_rows: int) -> list[tuple[int, int]]:
    """Where each stretch begins and ends, in steps."""
    keys = [_key(facts) for facts in steps]
    finest = _join_equal([(index, index + 1) for index in range(len(keys))], keys)
    stretches, min_steps = finest, 2
    while len(stretches) > max(max_rows, 1):
        stretches = _join_equal(_join_short(finest, min_steps), keys)
        min_steps *= 2
    return stretches


def _join_short(stretches: Sequence[tuple[int, int]], min_steps: int) -> list[tuple[int, int]]:
    """Each stretch of fewer steps is joined with the one after it, at the end with the one before."""
    joined: list[tuple[int, int]] = []
    for begin, end in stretches:
        if joined and joined[-1][1] - joined[-1][0] < min_steps:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    if len(joined) > 1 and joined[-1][1] - joined[-1][0] < min_steps:
        _, end = joined.pop()
        joined[-1] = (joined[-1][0], end)
    return joined


def _join_equal(stretches: Iterable[tuple[int, int]], keys: Sequence[_Key]) -> list[tuple[int, int]]:
    """Neighbours of which most steps have the same key are one."""
    joined: list[tuple[int, int]] = []
    before: _Key | None = None
    for begin, end in stretches:
        key = Counter(keys[begin:end]).most_common(1)[0][0]
        if key == before:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
        before = key
    return joined


def _stretch(steps: Sequence[StepFacts], starts: Sequence[float], begin: int, end: int) -> Stretch:
    part = steps[begin:end]
    choices = Counter((facts.num_draft_tokens, facts.reason) for facts in part)
    (k, reason), count = choices.most_common(1)[0]
    emitted = [tokens for facts in part for tokens in facts.num_emitted if tokens]
    saved = savings(part)
    return Stretch(
        first_step=begin,
        last_step=end - 1,
        begin_seconds=starts[begin],
        end_seconds=starts[end - 1] + part[-1].step_seconds,
        min_active=min(facts.batch_size for facts in part),
        max_active=max(facts.batch_size for facts in part),
        max_waiting=max(facts.num_waiting for facts in part),
        num_draft_tokens=k,
        reason=reason,
        min_draft_tokens=min(k for k, _ in choices),
        max_draft_tokens=max(k for k, _ in choices),
        majority=count / len(part),
        num_drafted=sum(sum(facts.num_drafted) for facts in part),
        num_accepted=sum(sum(facts.num_accepted) for facts in part),
        tokens_per_request_step=sum(emitted) / len(emitted) if emitted else 0.0,
        median_seconds=statistics.median(facts.step_seconds for facts in part),
        predicted_seconds=_median_of_known(facts.predicted_seconds for facts in part),
        expected_seconds=_median_of_known(facts.expected_seconds for facts in part),
        plain_seconds=_median_of_known(facts.plain_seconds for facts in part),
        saved_seconds=saved.saved_seconds if saved.num_comparable_steps else None,
    )


def _median_of_known(values: Iterable[float]) -> float:
    known = [value for value in values if value > 0]
    return statistics.median(known) if known else 0.0


def _events_with_steps(records: Sequence[Record]) -> list[tuple[int, Event]]:
    """Each event with the step after which it stands; one before all steps is given to the first."""
    found: list[tuple[int, Event]] = []
    num_steps = 0
    for record in records:
        if isinstance(record, Event):
            found.append((max(num_steps - 1, 0), record))
        else:
            num_steps += 1
    return found


def _happenings(events: Sequence[tuple[int, Event]], starts: Sequence[float]) -> list[Happening]:
    """One for each kind, at its first event."""
    firsts: dict[EventKind, tuple[int, Event]] = {}
    for step, event in events:
        firsts.setdefault(event.kind, (step, event))
    counts = Counter(event.kind for _, event in events)
    return [
        Happening(step, starts[step], kind, event.text, counts[kind] - 1)
        for kind, (step, event) in firsts.items()
    ]
