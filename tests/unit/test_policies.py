"""Draft-length policies that do not learn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlspec.speculation.build import build_policy, fixed_spec, replay_spec
from rlspec.speculation.policies import POLICIES
from rlspec.types import Load, Reason


def load(step_index: int) -> Load:
    return Load(
        step_index=step_index,
        num_waiting=0,
        num_scheduled_tokens=4,
        request_ids=("a", "b", "c", "d"),
        context_lengths=(8,) * 4,
        num_room=(9,) * 4,
    )


def test_fixed_policy_says_why() -> None:
    assert build_policy(fixed_spec(3)).decide(load(0)).reason is Reason.FIXED
    assert build_policy(fixed_spec(0)).decide(load(0)).reason is Reason.OFF


@given(st.lists(st.integers(0, 9)))
def test_replay_gives_the_recorded_k_then_plain_decoding(k_trace: list[int]) -> None:
    policy = build_policy(replay_spec(k_trace))
    decisions = [policy.decide(load(index)) for index in range(len(k_trace))]
    assert [decision.num_draft_tokens for decision in decisions] == k_trace
    beyond = policy.decide(load(len(k_trace)))
    assert (beyond.num_draft_tokens, beyond.reason) == (0, Reason.REPLAY_EXHAUSTED)


def test_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        build_policy({"name": "none"})
    assert set(POLICIES) == {"fixed", "replay", "static_table"}
