"""The greedy identity verdict: a difference outside a tie fails."""

from dataclasses import replace

from rlspec.audit.greedy_identity import TIE_TOLERANCE, first_differences, judge
from rlspec.types import Rollout
from tests.unit.test_rollout_files import ROLLOUT


def response(*token_ids: int) -> Rollout:
    return replace(ROLLOUT, completion_token_ids=token_ids)


def test_first_difference_and_its_prefix() -> None:
    found = first_differences([response(3, 4, 5), response(7, 8)], [response(3, 9, 5), response(7, 8)])
    assert [(difference.position, difference.prefix_token_ids) for difference in found] == [(1, (1, 2, 3))]


def test_a_shorter_response_differs_at_its_end() -> None:
    (difference,) = first_differences([response(3, 4)], [response(3, 4, 5)])
    assert difference.position == 2


def test_ties_pass_and_others_fail() -> None:
    assert judge(4, []).passed
    tied = judge(4, [TIE_TOLERANCE / 2])
    assert tied.passed
    assert (tied.num_identical, tied.num_ties) == (3, 1)
    wrong = judge(4, [TIE_TOLERANCE / 2, 0.5])
    assert not wrong.passed
    assert "FAILED" in str(wrong)
