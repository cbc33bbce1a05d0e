"""Owns the scheduler that vLLM runs: asks a policy for K in every step and records what the step did.

    vLLM's engine core, one step:
        schedule()             consumes waiting and running requests, produces the step's work and K
        (the model runs)
        update_from_output()   consumes sampled tokens, produces outputs and one StepFacts

Given to vLLM as `scheduler_cls`. The caller reaches it through `EngineCore.rlspec_call`, which this module
attaches: in process directly, else as a utility call of vLLM's own client.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from rlspec.speculation.policies import PolicySpec, build_policy, fixed_spec
from rlspec.types import Decision, Load, Reason, StepFacts
from rollout.audit_recorder import AuditRecorder, VerificationRow
from rollout.sampling import unmark_plain

logger = logging.getLogger("rlspec.rollout.scheduler")

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

MAX_KEPT_STEPS = 100_000
"""Steps kept for a caller that does not fetch them: about 100 MB at batch 32, then the oldest go."""

NO_DRAFTER = Decision(0, Reason.OFF)


@dataclass(slots=True)
class _ScheduledStep:
    """A step on its way through the model."""

    started_seconds: float
    num_waiting: int
    decision: Decision


class _DraftLengths:
    """Stands in for vLLM's list of K by batch size: asks the policy when the step is scheduled."""

    def __init__(self, scheduler: _LiveScheduling) -> None:
        self._scheduler = scheduler

    def __getitem__(self, batch_size: int) -> int:
        return self._scheduler.rlspec_decide(batch_size).num_draft_tokens


class _LiveScheduling:
    """What is added to vLLM's scheduler, synchronous or asynchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decision = NO_DRAFTER
        self._scheduled: deque[_ScheduledStep] = deque()
        self._last_update_seconds = 0.0
        self._steps: deque[StepFacts] = deque(maxlen=MAX_KEPT_STEPS)
        self._recorder: AuditRecorder | None = None
        self._plain_ids: set[str] = set()  # requests that get no drafts
        self.rlspec_begin(fixed_spec(self.num_spec_tokens))
        if self.num_spec_tokens:
            self.dynamic_sd_lookup = _DraftLengths(self)
        if parent := multiprocessing.parent_process():
            threading.Thread(target=_end_with, args=(parent,), name="rlspec-parent", daemon=True).start()

    def rlspec_begin(self, policy_spec: PolicySpec) -> None:
        """Start a run: a new policy, step 0, no steps kept."""
        self._policy = build_policy(policy_spec)
        self._num_steps = 0
        self._num_decided = 0
        self._scheduled.clear()  # of a step that failed
        self._steps.clear()

    def rlspec_take_steps(self) -> list[StepFacts]:
        """The steps since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps

    def rlspec_take_step_rows(self) -> list[list[object]]:
        """`rlspec_take_steps` as plain values, for another process."""
        return [facts.as_row() for facts in self.rlspec_take_steps()]

    def rlspec_start_recording(self) -> None:
        """Record drafts, sampled tokens and vLLM's own counts, for the correctness audit."""
        self._recorder = AuditRecorder()

    def rlspec_end_recording(self) -> tuple[list[VerificationRow], dict[str, int]]:
        """What was recorded since `start_recording`."""
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        return recorder.row()

    def rlspec_forget_kv(self) -> bool:
        """Drop every key and value computed so far; running requests will compute theirs again.

        Called while the engine is paused. False when vLLM cannot drop them all.
        """
        try:
            return bool(self.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
        except RuntimeError as error:  # vLLM's refusal while requests wait for another engine's KV cache
            logger.error("%s", error)
            return False

    def rlspec_decide(self, batch_size: int) -> Decision:
        """Ask the policy for this step's K, bounded by what the drafter was built for."""
        load = Load(step_index=self._num_decided, batch_size=batch_size, num_waiting=len(self.waiting))
        decision = self._policy.decide(load)
        assert 0 <= decision.num_draft_tokens <= self.num_spec_tokens, decision
        self._decision = decision
        return decision

    def add_request(self, request: Request) -> None:
        # Before the worker sees the parameters; vLLM's front has refused them by then, or not seen them.
        if request.sampling_params is not None and unmark_plain(request.sampling_params):
            self._plain_ids.add(request.request_id)
        super().add_request(request)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)  # called by synchronous scheduling
        self._drop_drafts_of_plain()

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)  # asynchronous scheduling places drafts here
        self._drop_drafts_of_plain()

    def _drop_drafts_of_plain(self) -> None:
        for request_id in tuple(self._plain_ids):
            request = self.requests.get(request_id)
            if request is None:
                self._plain_ids.remove(request_id)
            elif request.spec_token_ids:
                request.spec_token_ids = []

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        started_seconds = time.perf_counter()
        num_waiting = len(self.waiting)
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._scheduled.append(_ScheduledStep(started_seconds, num_waiting, self._decision))
            self._num_decided += 1
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return super().update_from_output(scheduler_output, model_runner_output)
        contexts = self._context_lengths(scheduler_output)
        # Before vLLM cuts the sampled tokens at a stop, as its own counters do.
        verified = _verified(scheduler_output, model_runner_output)
        if self._recorder is not None:
            self._recorder.add_verifications(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        emitted = {
            output.request_id: len(output.new_token_ids)
            for client_outputs in outputs.values()
            for output in client_outputs.outputs
        }
        self._record(scheduler_output, verified, contexts, emitted)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if self._recorder is not None:
            self._recorder.add_stats(stats)
        return stats

    def _context_lengths(self, scheduler_output: SchedulerOutput) -> tuple[int, ...]:
        requests = (self.requests.get(request_id) for request_id in scheduler_output.num_scheduled_tokens)
        return tuple(request.num_tokens if request is not None else 0 for request in requests)

    def _record(
        self,
        scheduler_output: SchedulerOutput,
        verified: tuple[tuple[int, ...], tuple[int, ...]],
        contexts: tuple[int, ...],
        emitted: dict[str, int],
    ) -> None:
        step = self._scheduled.popleft()
        ended_seconds = time.perf_counter()
        request_ids = tuple(scheduler_output.num_scheduled_tokens)
        facts = StepFacts(
            step_index=self._num_steps,
            started_seconds=step.started_seconds,
            # With asynchronous scheduling a step is scheduled while the one before still runs.
            step_seconds=ended_seconds - max(step.started_seconds, self._last_update_seconds),
            num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            num_waiting=step.num_waiting,
            num_draft_tokens=step.decision.num_draft_tokens,
            reason=step.decision.reason,
            request_ids=request_ids,
            num_drafted=verified[0],
            num_accepted=verified[1],
            num_emitted=tuple(emitted.get(request_id, 0) for request_id in request_ids),
            context_lengths=contexts,
        )
        self._last_update_seconds = ended_seconds
        self._num_steps += 1
        self._policy.observe(facts)
        self._steps.append(facts)


def _end_with(parent: BaseProcess) -> None:
    """End this engine core when its caller's process has ended; vLLM 0.32 leaves it running for ever."""
    parent.join()
    os._exit(1)


def _verified(
    scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drafted and accepted tokens of each request of the step, counted as vLLM counts them."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    sampled = model_runner_output.sampled_token_ids
    index = model_runner_output.req_id_to_index
    drafted, accepted = [], []
    for request_id in scheduler_output.num_scheduled_tokens:
        num_sampled = len(sampled[index[request_id]]) if sampled and request_id in drafts else 0
        drafted.append(len(drafts[request_id]) - invalid.get(request_id, 0) if num_sampled else 0)
        accepted.append(max(num_sampled - 1, 0))
    return tuple(drafted), tuple(accepted)


class LiveScheduler(_LiveScheduling, Scheduler):
    """The synchronous scheduler; CPU engines and n-gram drafting use it."""


class LiveAsyncScheduler(_LiveScheduling, AsyncScheduler):
    """The asynchronous scheduler, vLLM's default on GPUs."""


def live_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> LiveScheduler | LiveAsyncScheduler:
    """Given to vLLM as `scheduler_cls`: the scheduler of the kind that vLLM resolved for this engine."""
    kind = LiveAsyncScheduler if vllm_config.scheduler_config.async_scheduling else LiveScheduler
    return kind(vllm_config, *args, **kwargs)


def _call_scheduler(self: EngineCore, method: str, *args: Any) -> Any:
    """Call one `rlspec_` method of the scheduler."""
    return getattr(self.scheduler, f"rlspec_{method}")(*args)


EngineCore.rlspec_call = _call_scheduler
