"""What is counted of a request: which policy version gave which tokens, whatever a stop cut off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from rlspec.config_sampling import SamplingConfig
from rlspec.types import PolicySpan
from rollout.requests import InFlight, RolloutRequest
from rollout.sampling import RequestSampling

SAMPLING = RequestSampling(SamplingConfig(), SamplingParams())


def in_flight(version: int = 0) -> InFlight:
    return InFlight(RolloutRequest("g", 0, (1, 2), SAMPLING), "0-a", None, 0.0, version)


def test_tokens_belong_to_the_version_of_their_step() -> None:
    record = in_flight(3)
    record.add_step(0, 0, 0)  # a prefill chunk
    record.add_step(0, 0, 1)
    record.add_step(3, 2, 3)
    record.policy_version = 5
    record.policy_version = 8  # version 5 gave no token
    record.add_step(3, 0, 1)
    assert record.policy_spans(5) == (PolicySpan(3, 4), PolicySpan(8, 1))
    assert (record.num_tokens, record.num_steps) == (5, 3)


def test_a_stop_cuts_tokens_off_the_last_versions() -> None:
    record = in_flight()
    record.add_step(3, 3, 4)
    record.policy_version = 1
    record.add_step(3, 1, 2)
    assert record.policy_spans(4) == (PolicySpan(0, 4),)
    assert record.policy_spans(3) == (PolicySpan(0, 3),)
    assert record.policy_spans(0) == ()
    with pytest.raises(AssertionError):
        record.policy_spans(7)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans())), st.data())
def test_spans_add_up_in_rising_versions(steps: list[tuple[int, bool]], data: st.DataObject) -> None:
    record = in_flight()
    for num_emitted, is_updated in steps:
        record.policy_version += is_updated
        record.add_step(4, max(num_emitted - 1, 0), num_emitted)
    num_tokens = data.draw(st.integers(0, record.num_tokens))
    spans = record.policy_spans(num_tokens)
    assert sum(span.num_tokens for span in spans) == num_tokens
    assert all(span.num_tokens > 0 for span in spans)
    versions = [span.policy_version for span in spans]
    assert versions == sorted(set(versions))
