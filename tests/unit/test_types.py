"""The vocabulary: facts cross a process boundary unchanged and stay frozen."""

import dataclasses
import json

import pytest

from rlspec.types import Reason, StepFacts

FACTS = StepFacts(
    step_index=4,
    started_seconds=10.5,
    step_seconds=0.25,
    num_scheduled_tokens=6,
    num_waiting=1,
    num_draft_tokens=3,
    reason=Reason.FIXED,
    expected_tokens=2.5,
    expected_seconds=0.25,
    plain_seconds=0.125,
    predicted_seconds=0.375,
    request_ids=("a", "b"),
    num_offered=(3, 0),
    num_drafted=(3, 0),
    num_accepted=(2, 0),
    num_emitted=(3, 1),
    context_lengths=(20, 31),
)


def test_row_reads_back_also_through_json() -> None:
    assert StepFacts.from_row(FACTS.as_row()) == FACTS
    assert StepFacts.from_row(json.loads(json.dumps(FACTS.as_row()))) == FACTS


def test_facts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FACTS.step_index = 5  # type: ignore[misc]


def test_batch_size() -> None:
    assert FACTS.batch_size == 2
