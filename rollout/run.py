"""Owns one run of an engine: requests taken lazily, rollouts out as they finish, also across a policy update.

    requests ─► in flight ─► engine steps ─► finished ─► ready ─► yielded
        ▲           └─► StepFacts ─► tallies by request, metrics, the caller
        └── requests without tokens, when a policy update aborts what is in flight

Between two yields a policy update may come in (`policy_sync.py`): it calls `drain`, `settle` and `cut`.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from rlspec.errors import EngineError
from rlspec.types import Event, FinishReason, Rollout, StepFacts
from rollout.requests import InFlight, RolloutRequest
from rollout.sampling import sample_seed

if TYPE_CHECKING:
    from rollout.engine import RolloutEngine

logger = logging.getLogger("rlspec.rollout.engine")

OnSteps = Callable[[Sequence[StepFacts], Sequence[Event]], None]
"""Called with the engine's steps as they become known, and with what happened in them."""

STEPS_BETWEEN_FETCHES = 64
"""The scheduler is asked for its steps at least this often; from another process a call costs about 1 ms."""


class Run:
    """One call of `RolloutEngine.run`.

    Attributes:
        is_suspended: Whether the caller has a rollout in hand and has not asked for the next.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Iterable[RolloutRequest],
        on_steps: OnSteps,
    ) -> None:
        self.is_suspended = False
        self._engine = engine
        self._requests = iter(requests)
        self._on_steps = on_steps
        self._in_flight: dict[str, InFlight] = {}
        self._request_ids: dict[str, str] = {}  # by vLLM's own id
        self._ready: deque[Rollout | EngineError] = deque()
        self._num_unfetched_steps = 0
        self._started = time.perf_counter()
        self._told_plain: set[str] = set()

    def rollouts(self) -> Iterator[Rollout]:
        """Submit, step and yield until every request is finished; abort the rest when closed early."""
        try:
            while self._ready or self._top_up():
                if self._ready:
                    yield from self._hand_over()
                else:
                    self._advance()
            self._fetch_steps()
        except EngineDeadError:
            self._engine.metrics.count_skipped("requests_lost_with_the_engine", len(self._in_flight))
            self._in_flight.clear()  # nobody is left to abort them
            raise
        finally:
            if self._in_flight:
                self._engine.abort(list(self._in_flight))
            if num_dropped := len(self._in_flight) + len(self._ready):
                self._engine.metrics.count_skipped("aborted_requests", num_dropped)

    def drain(self) -> int:
        """Finish what has begun, hand nothing new to vLLM; returns how many requests that was.

        Requests without a token yet wait again: they are drawn under the new policy. vLLM's own scheduler
        does not tell which those are, so with it all are finished.
        """
        self._fetch_steps()
        waiting = self._without_tokens() if self._engine.counts_steps else []
        self._engine.drop(waiting)
        self._begin_again(waiting)
        num_requests = len(self._in_flight)
        while self._in_flight:
            self._advance()
        return num_requests

    def settle(self) -> None:
        """Take in every step that a paused engine has done; what finished in them is ready."""
        outputs = []
        while self._engine.has_outputs():
            outputs += self._engine.step()
        self._fetch_steps()
        self._finish(outputs)

    def cut(self) -> tuple[int, int]:
        """End what is in flight of a settled run with the tokens it has; what has none is drawn anew.

        Returns:
            How many responses were cut, and how many requests wait again.
        """
        begun = [record.internal_id for record in self._in_flight.values() if record.num_tokens]
        waiting = self._without_tokens()
        outputs = self._engine.partial_outputs(begun)
        self._engine.abort(list(self._in_flight))
        self._finish(outputs)
        self._begin_again(waiting)
        return len(outputs), len(waiting)

    def go_on_under(self, policy_version: int) -> int:
        """Count what is sampled from now on as this version's; returns how many requests go on."""
        for record in self._in_flight.values():
            record.policy_version = policy_version
        return len(self._in_flight)

    def _hand_over(self) -> Iterator[Rollout]:
        rollout = self._ready.popleft()
        if isinstance(rollout, EngineError):
            raise rollout
        self._engine.metrics.observe_rollout(rollout)
        self.is_suspended = True
        yield rollout
        self.is_suspended = False

    def _top_up(self) -> bool:
        """Hand requests to vLLM up to the limit; whether any is in flight."""
        self._engine.require_intact()
        for request in itertools.islice(self._requests, self._engine.max_in_engine - len(self._in_flight)):
            seed = sample_seed(request.sampling.config.seed, request.group_id, request.sample_index)
            request_id, internal_id = self._engine.submit(request, seed)
            self._tell_plain(request)
            self._request_ids[internal_id] = request_id
            self._in_flight[request_id] = InFlight(
                request,
                internal_id,
                seed,
                time.perf_counter() - self._started,
                self._engine.policy_version,
            )
        return bool(self._in_flight)

    def _tell_plain(self, request: RolloutRequest) -> None:
        """Count a request that gets no drafts, and log each of the parameters once a run."""
        for name in request.sampling.plain_because:
            self._engine.metrics.count_skipped(f"drafts_with_{name}")
            if name not in self._told_plain:
                self._told_plain.add(name)
                logger.warning("requests with sampling.%s are drawn without drafts (K = 0)", name)

    def _advance(self) -> None:
        """One engine step; what finished in it is ready."""
        finished = self._engine.step()
        self._num_unfetched_steps += 1
        if finished or self._num_unfetched_steps >= STEPS_BETWEEN_FETCHES:
            self._fetch_steps()
        self._finish(finished)

    def _finish(self, outputs: Iterable[RequestOutput]) -> None:
        """Make rollouts; one that nobody can use is raised where it would be yielded."""
        for output in outputs:
            try:
                self._ready.append(self._rollout(output))
            except EngineError as error:
                self._ready.append(error)

    def _fetch_steps(self) -> None:
        self._num_unfetched_steps = 0
        steps, events = self._engine.take_steps()
        for facts in steps:
            columns = zip(
                facts.request_ids, facts.num_drafted, facts.num_accepted, facts.num_emitted, strict=True
            )
            for internal_id, *counts in columns:
                if internal_id in self._request_ids:
                    self._in_flight[self._request_ids[internal_id]].add_step(*counts)
        self._engine.metrics.observe_steps(steps)
        for event in events:
            self._engine.metrics.count_event(event)
            logger.warning("step %d: %s: %s", event.step_index, event.kind.value, event.text)
        self._on_steps(steps, events)

    def _without_tokens(self) -> list[str]:
        return [request_id for request_id, record in self._in_flight.items() if not record.num_tokens]

    def _begin_again(self, request_ids: Sequence[str]) -> None:
        """Put requests that vLLM no longer has before those that it never had."""
        again = [self._forget(request_id).request for request_id in request_ids]
        self._requests = itertools.chain(again, self._requests)

    def _forget(self, request_id: str) -> InFlight:
        record = self._in_flight.pop(request_id)
        del self._request_ids[record.internal_id]
        return record

    def _rollout(self, output: RequestOutput) -> Rollout:
        """The finished request as a rollout."""
        record = self._forget(output.request_id)
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        logprobs = tuple(
            position[token].logprob
            for position, token in zip(completion.logprobs or (), token_ids, strict=True)
        )
        _require_finite(logprobs, record.request.group_id)
        if not self._engine.counts_steps:
            record.count_all(len(token_ids))
        spans = record.policy_spans(len(token_ids))
        return Rollout(
            group_id=record.request.group_id,
            sample_index=record.request.sample_index,
            prompt_token_ids=record.request.prompt_token_ids,
            completion_token_ids=token_ids,
            logprobs=logprobs,
            logprobs_mode=self._engine.logprobs_mode,
            finish_reason=FinishReason(completion.finish_reason),
            stop_reason=completion.stop_reason,
            text=completion.text if self._engine.tokenizer is not None else None,
            seed=record.seed,
            policy_version=spans[0].policy_version if spans else record.policy_version,
            policy_spans=spans,
            drafter_version=self._engine.drafter_version,
            num_drafted=sum(record.drafted_by_position),
            num_accepted=sum(record.accepted_by_position),
            num_drafted_by_position=tuple(record.drafted_by_position),
            num_accepted_by_position=tuple(record.accepted_by_position),
            num_steps=record.num_steps,
            started_seconds=record.started_seconds,
            seconds=time.perf_counter() - self._started - record.started_seconds,
            data=record.request.data,
        )


def _require_finite(logprobs: Sequence[float], group_id: str) -> None:
    """Refuse what no trainer can use, and what only broken weights or parameters give."""
    bad = next((value for value in logprobs if not math.isfinite(value)), None)
    if bad is not None:
        fix = "Look for NaN in the policy's weights, and for extreme sampling parameters."
        given = f"{bad} in a response of group {group_id}"
        raise EngineError("logprobs", given=given, allowed="finite numbers", fix=fix)
