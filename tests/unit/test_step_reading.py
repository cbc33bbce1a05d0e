"""The load of a step and what is trimmed, from vLLM's scheduler objects made by hand."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rlspec.types import Decision, Reason
from rollout.step_reading import read_load

MAX_MODEL_LEN = 100


def _request(num_tokens: int, **values: Any) -> SimpleNamespace:
    fields = {
        "num_tokens": num_tokens,
        "num_computed_tokens": num_tokens - 1,
        "num_output_placeholders": 0,
        "num_output_tokens": 10,
        "max_tokens": 50,
        "spec_token_ids": [],
    }
    return SimpleNamespace(**{**fields, **values})


def _scheduled(**num_scheduled_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        finished_req_ids=set(),
        preempted_req_ids=None,
    )


def _room(request: SimpleNamespace, num_tokens: int = 1, is_plain: bool = False) -> int:
    plain_ids = {"a"} if is_plain else set()
    load = read_load(0, 0, _scheduled(a=num_tokens), {"a": request}, plain_ids, MAX_MODEL_LEN)
    return load.num_room[0]


def test_room_is_what_is_left_after_this_step_and_the_next_token() -> None:
    assert _room(_request(20)) == 50 - 10 - 2
    assert _room(_request(20, max_tokens=12)) == 0
    assert _room(_request(20, max_tokens=13)) == 1
    assert _room(_request(95)) == 100 - 95 - 2
    assert _room(_request(99)) == 0


def test_asynchronous_steps_have_a_token_on_its_way() -> None:
    assert _room(_request(20, num_output_placeholders=1, num_computed_tokens=20)) == 50 - 10 - 2 - 1


def test_no_room_in_a_prefill_and_for_a_plain_request() -> None:
    prefill = _request(20, num_computed_tokens=0, num_output_tokens=0)
    assert _room(prefill, num_tokens=19) == 0
    assert _room(prefill, num_tokens=20) == 48
    assert _room(_request(20), is_plain=True) == 0


def test_columns_follow_the_order_of_the_step() -> None:
    requests = {"a": _request(20), "b": _request(30)}
    load = read_load(7, 2, _scheduled(b=1, a=3), requests, {"b"}, MAX_MODEL_LEN)
    assert load.request_ids == ("b", "a")
    assert load.context_lengths == (30, 20)
    assert load.num_room == (0, 38)
    assert (load.step_index, load.num_waiting, load.num_scheduled_tokens, load.batch_size) == (7, 2, 4, 2)


class _Policy:
    def __init__(self, *decisions: Decision) -> None:
        self.decisions = deque(decisions)

    def decide(self, load: object) -> Decision:
        return self.decisions.popleft()


@pytest.fixture
def scheduler() -> Any:
    pytest.importorskip("vllm")
    from rollout.scheduler import LiveScheduler

    scheduler: Any = object.__new__(LiveScheduler)
    scheduler._offered, scheduler._plain_ids, scheduler._scheduled = {}, set(), deque()
    scheduler._num_decided = scheduler._num_waiting = 0
    scheduler._schedule_started, scheduler._can_trim = 0.0, True
    scheduler.num_spec_tokens, scheduler.max_model_len = 3, MAX_MODEL_LEN
    return scheduler


def test_offers_are_bounded_by_k_caps_and_room(scheduler: Any) -> None:
    scheduler.requests = {"a": _request(20), "b": _request(20), "c": _request(20, max_tokens=13)}
    scheduler._policy = _Policy(Decision(3, Reason.FIXED, caps=(3, 0, 3)), Decision(1, Reason.FIXED))
    scheduler._decide(_scheduled(a=1, b=1, c=1))
    for request in scheduler.requests.values():
        request.spec_token_ids = [5, 6, 7]
    scheduler._trim(scheduler.requests)
    assert [request.spec_token_ids for request in scheduler.requests.values()] == [[5, 6, 7], [], [5]]
    scheduler._decide(_scheduled(a=4, b=1, c=2))
    assert [step.num_offered for step in scheduler._scheduled] == [(0, 0, 0), (3, 0, 1)]


def test_a_preempted_request_has_no_offer(scheduler: Any) -> None:
    scheduler.requests = {"a": _request(20)}
    scheduler._policy = _Policy(*[Decision(3, Reason.FIXED)] * 3)
    scheduler._decide(_scheduled(a=1))
    resumed = _scheduled(a=1)
    resumed.preempted_req_ids = {"a"}
    scheduler._decide(resumed)
    assert scheduler._scheduled[-1].num_offered == (0,)


def test_plain_requests_get_no_drafts_and_are_forgotten(scheduler: Any) -> None:
    scheduler.requests = {
        "plain": _request(20, spec_token_ids=[1]),
        "other": _request(20, spec_token_ids=[2]),
    }
    scheduler._policy = _Policy(*[Decision(3, Reason.FIXED)] * 2)
    scheduler._plain_ids = {"plain", "gone"}
    step = _scheduled(plain=1, other=1)
    step.finished_req_ids = {"gone"}
    scheduler._decide(step)
    scheduler._trim(step.num_scheduled_tokens)
    assert scheduler.requests["plain"].spec_token_ids == []
    assert scheduler.requests["other"].spec_token_ids == [2]
    assert scheduler._plain_ids == {"plain"}
