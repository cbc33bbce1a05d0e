"""Owns what is read off vLLM's scheduler: the load before a decision, the counts of a finished step."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from rlspec.types import Load

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


def read_load(
    step_index: int,
    num_waiting: int,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    plain_ids: Container[str],
    max_model_len: int,
) -> Load:
    """The facts of a step that vLLM has scheduled, before it counts the scheduled tokens as computed.

    A step gives a request one token at least, and the next one gives it one beside its drafts; what is left
    after those two is room for drafts.
    """
    contexts, room = [], []
    for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
        request = requests[request_id]
        context, num_placeholders = request.num_tokens, request.num_output_placeholders
        contexts.append(context)
        is_prefill = request.num_computed_tokens + num_tokens < context + num_placeholders
        if is_prefill or request_id in plain_ids:
            room.append(0)
            continue
        left = min(request.max_tokens - request.num_output_tokens, max_model_len - context)
        in_flight = 1 if num_placeholders else 0  # asynchronous: at least one token is on its way
        room.append(max(0, left - 2 - in_flight))
    return Load(
        step_index=step_index,
        num_waiting=num_waiting,
        num_scheduled_tokens=scheduled.total_num_scheduled_tokens,
        request_ids=tuple(scheduled.num_scheduled_tokens),
        context_lengths=tuple(contexts),
        num_room=tuple(room),
    )


def read_verified(
    scheduled: SchedulerOutput, output: ModelRunnerOutput
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drafted and accepted tokens of each request of the step, counted as vLLM counts them."""
    drafts = scheduled.scheduled_spec_decode_tokens
    invalid = scheduled.num_invalid_spec_tokens or {}
    sampled = output.sampled_token_ids
    index = output.req_id_to_index
    drafted, accepted = [], []
    for request_id in scheduled.num_scheduled_tokens:
        num_sampled = len(sampled[index[request_id]]) if sampled and request_id in drafts else 0
        drafted.append(len(drafts[request_id]) - invalid.get(request_id, 0) if num_sampled else 0)
        accepted.append(max(num_sampled - 1, 0))
    return tuple(drafted), tuple(accepted)


def read_contexts(scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> tuple[int, ...]:
    """Tokens of each request of the step before its output; 0 for one that was aborted meanwhile."""
    found = (requests.get(request_id) for request_id in scheduled.num_scheduled_tokens)
    return tuple(request.num_tokens if request is not None else 0 for request in found)
