"""Accounting: what adds up passes, and each way of not adding up is found by its own count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlspec.audit.accounting import VerifiedDrafts, check_accounting
from rlspec.types import Reason, StepFacts
from tests.unit.test_rollout_files import ROLLOUT

RESPONSE = (7, 8, 9, 4, 5)


def facts(index: int, drafted: int, accepted: int, emitted: int, context: int) -> StepFacts:
    return StepFacts(
        step_index=index,
        started_seconds=0.0,
        step_seconds=0.1,
        num_scheduled_tokens=1 + drafted,
        num_waiting=0,
        num_draft_tokens=3,
        reason=Reason.FIXED,
        expected_tokens=0.0,
        expected_seconds=0.0,
        plain_seconds=0.0,
        predicted_seconds=0.0,
        request_ids=("0-a",),
        num_offered=(drafted,),
        num_drafted=(drafted,),
        num_accepted=(accepted,),
        num_emitted=(emitted,),
        context_lengths=(context,),
    )


STEPS = (facts(0, 0, 0, 1, 4), facts(1, 2, 2, 3, 5), facts(2, 3, 0, 1, 8))
VERIFIED = (VerifiedDrafts("0-a", (8, 9), (8, 9, 4)), VerifiedDrafts("0-a", (1, 2, 3), (5,)))
COUNTERS = {"num_drafts": 2, "num_draft_tokens": 5, "num_accepted_tokens": 2}
ROLLOUTS = (replace(ROLLOUT, completion_token_ids=RESPONSE, num_drafted=5, num_accepted=2),)


def test_what_adds_up_passes() -> None:
    faults = check_accounting(ROLLOUTS, STEPS, VERIFIED, COUNTERS)
    assert faults.num_faults == 0
    assert faults.num_verifications == 2


def test_a_dropped_bonus_token_is_a_wrong_emission() -> None:
    dropped = (replace(VERIFIED[0], sampled_token_ids=(8, 9)), VERIFIED[1])
    assert check_accounting(ROLLOUTS, STEPS, dropped, COUNTERS).num_wrong_emission == 1


def test_a_rejected_draft_that_was_emitted_all_the_same_is_a_wrong_emission() -> None:
    wrong = (VERIFIED[0], replace(VERIFIED[1], sampled_token_ids=(5, 2)))
    assert check_accounting(ROLLOUTS, STEPS, wrong, COUNTERS).num_wrong_emission == 1


@pytest.mark.parametrize("context", [7, 9])
def test_repeated_and_missing_positions_are_gaps(context: int) -> None:
    steps = (*STEPS[:2], replace(STEPS[2], context_lengths=(context,)))
    assert check_accounting(ROLLOUTS, steps, VERIFIED, COUNTERS).num_gaps == 1


def test_lost_tokens_are_found() -> None:
    short = (replace(ROLLOUTS[0], completion_token_ids=RESPONSE[:-1]),)
    assert check_accounting(short, STEPS, VERIFIED, COUNTERS).num_wrong_lengths == 1


@pytest.mark.parametrize("name", sorted(COUNTERS))
def test_each_counter_is_compared(name: str) -> None:
    counters = {**COUNTERS, name: COUNTERS[name] + 1}
    faults = check_accounting(ROLLOUTS, STEPS, VERIFIED, counters)
    assert [wrong[0] for wrong in faults.wrong_counters] == [name]
    assert name in str(faults)
    assert check_accounting(ROLLOUTS, STEPS, VERIFIED, {}).num_faults == 3
