"""The static table: vLLM's own rule, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlspec.errors import ConfigError
from rlspec.speculation.build import build_policy, table_spec
from rlspec.speculation.policies.static_table import StaticTablePolicy
from rlspec.types import Load, Reason

MAX_BATCH_SIZE = 80


def load(batch_size: int) -> Load:
    ids = tuple(f"r{index}" for index in range(batch_size))
    return Load(0, 0, batch_size, ids, (8,) * batch_size, (9,) * batch_size)


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Ranges from batch size 1, some with gaps, in any order."""
    ranges, first = [], 1
    for _ in range(draw(st.integers(1, 6))):
        last = first + draw(st.integers(0, 20))
        ranges.append((first, last, draw(st.integers(0, 9))))
        first = last + 1 + draw(st.sampled_from([0, 0, 1, 5]))
    return draw(st.permutations(ranges))


@given(tables(), st.integers(1, 8))
@settings(deadline=None)
def test_k_is_what_vllm_looks_up(table: list[tuple[int, int, int]], max_draft_tokens: int) -> None:
    utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    expected = utils.build_dynamic_sd_schedule_lookup(table, MAX_BATCH_SIZE, max_draft_tokens)
    policy = build_policy(table_spec(table, max_draft_tokens))
    for batch_size in range(1, MAX_BATCH_SIZE + 1):
        decision = policy.decide(load(batch_size))
        assert decision.num_draft_tokens == expected[batch_size]
        assert decision.reason is (Reason.TABLE if expected[batch_size] else Reason.OFF)


def test_a_gap_and_the_end_keep_the_k_before() -> None:
    policy = StaticTablePolicy([[9, 16, 2], [1, 4, 5], [32, 64, 0]])
    found = {size: policy.decide(load(size)).num_draft_tokens for size in (0, 1, 4, 5, 8, 9, 16, 31, 32, 65)}
    assert found == {0: 5, 1: 5, 4: 5, 5: 5, 8: 5, 9: 2, 16: 2, 31: 2, 32: 0, 65: 0}


BOTH_REFUSE = [
    (None, "at least one range"),
    ([], "at least one range"),
    ("1", "at least one range"),
    ({1: 2}, "at least one range"),
    ([[1, 8]], "three integers"),
    ([[1, 8, 3, 4]], "three integers"),
    ([7], "three integers"),
    (["183"], "three integers"),
    ([[0, 8, 3]], "count from 1"),
    ([[-1, 8, 3]], "count from 1"),
    ([[8, 1, 3]], r"write \[1, 8, 3\]"),
    ([[1, 8, -1]], "0 is plain decoding"),
    ([[2, 8, 3]], "start at batch size 1, not 2"),
    ([[1, 8, 3], [8, 9, 1]], "ends at 8"),
    ([[1, 8, 3], [1, 8, 3]], "ends at 8"),
    ([[1, 9, 3], [2, 3, 1]], "ends at 9"),
]
ONLY_OURS = [
    ([[1, 8, 2.5]], "whole numbers"),
    ([[1, "8", 2]], "whole numbers"),
    ([[1, 8, True]], "whole numbers"),
]


@pytest.mark.parametrize(("table", "fix"), BOTH_REFUSE + ONLY_OURS)
def test_what_is_wrong_with_a_table_is_said(table: list[list[int]], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix) as error:
        StaticTablePolicy(table)
    assert error.value.field == "speculation.table"
    assert "ranges [first batch size, last batch size, K]" in error.value.allowed


@pytest.mark.parametrize(("table", "fix"), BOTH_REFUSE)
def test_vllm_refuses_it_too(table: object, fix: str) -> None:
    utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    with pytest.raises(ValueError, match=r".+"):
        utils.validate_and_normalize_dynamic_sd_schedule(table)


def test_the_largest_k_of_the_engine_is_the_limit() -> None:
    assert StaticTablePolicy([[1, 8, 9]], max_draft_tokens=3).decide(load(2)).num_draft_tokens == 3
    assert StaticTablePolicy([[1, 8, 9]]).decide(load(2)).num_draft_tokens == 9
