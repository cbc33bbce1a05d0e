"""Owns the scheduler that vLLM runs: asks a policy for K in every step and records what the step did.

    vLLM's engine core, one step:
        schedule()             consumes waiting and running requests, produces the step's work and K
        (the model runs)
        update_from_output()   consumes sampled tokens, produces outputs and one StepFacts

Given to vLLM as `scheduler_cls`. The caller reaches it through `EngineCore.rlspec_call`, which this module
attaches: in process directly, else as a utility call of vLLM's own client.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from rlspec.speculation.build import PolicySpec, build_policy, fixed_spec, learns
from rlspec.speculation.guard import GuardedPolicy
from rlspec.speculation.policies.base import DraftLengthPolicy
from rlspec.types import Decision, Event, Reason, StepFacts
from rollout.audit_recorder import AuditRecorder, VerificationRow
from rollout.parent_watch import end_with_parent
from rollout.sampling import unmark_plain
from rollout.step_reading import read_contexts, read_load, read_verified
from rollout.vllm_args import METHODS_THAT_NEED_DRAFTS

logger = logging.getLogger("rlspec.rollout.scheduler")

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

MAX_KEPT_STEPS = 100_000
"""Steps kept for a caller that does not fetch them: about 100 MB at batch 32, then the oldest go."""

NO_DRAFTER = Decision(0, Reason.OFF)


@dataclass(frozen=True, slots=True)
class _ScheduledStep:
    """A step on its way through the model."""

    started_seconds: float
    num_waiting: int
    num_offered: tuple[int, ...]
    decision: Decision


class _LiveScheduling:
    """What is added to vLLM's scheduler, synchronous or asynchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduled: deque[_ScheduledStep] = deque()
        self._last_update_seconds = 0.0
        self._steps: deque[StepFacts] = deque(maxlen=MAX_KEPT_STEPS)
        self._recorder: AuditRecorder | None = None
        self._plain_ids: set[str] = set()  # requests that get no drafts
        self._offered: dict[str, int] = {}  # draft tokens that a request's last step lets it have
        speculative = self.vllm_config.speculative_config
        self._can_trim = speculative is not None and speculative.method not in METHODS_THAT_NEED_DRAFTS
        self._learning: dict[str, GuardedPolicy] = {}  # by spec; what they learnt is kept from run to run
        self.rlspec_begin(fixed_spec(self.num_spec_tokens))
        if self.num_spec_tokens:
            # vLLM's list of K by batch size: while there is one it neither pads drafts nor compiles for one
            # K only. What it says is overwritten when the step is scheduled.
            self.dynamic_sd_lookup = [0] * (self.max_num_running_reqs + 1)
        end_with_parent()

    def rlspec_begin(self, policy_spec: PolicySpec) -> None:
        """Start a run: step 0, no steps kept; a policy that learns goes on where it was."""
        self._policy = self._policy_of(policy_spec)
        self._num_steps = 0
        self._num_decided = 0
        self._scheduled.clear()  # of a step that failed
        self._steps.clear()

    def _policy_of(self, spec: PolicySpec) -> DraftLengthPolicy:
        if not learns(spec):
            return build_policy(spec)
        key = json.dumps(spec, sort_keys=True)
        if key not in self._learning:
            self._learning[key] = build_policy(spec)
        return self._learning[key]

    def rlspec_take_steps(self) -> tuple[list[StepFacts], list[Event]]:
        """The steps and events since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps, self._policy.take_events()

    def rlspec_take_step_rows(self) -> tuple[list[list[object]], list[list[object]]]:
        """`rlspec_take_steps` as plain values, for another process."""
        steps, events = self.rlspec_take_steps()
        return [facts.as_row() for facts in steps], [event.as_row() for event in events]

    def rlspec_mark(self, cause: str) -> None:
        """The policy or the drafter changed: what was learnt of acceptance is old."""
        for policy in self._learning.values():
            policy.mark(cause)

    def rlspec_learnt(self, policy_spec: PolicySpec) -> dict[str, Any] | None:
        """What the policy of this spec has learnt, as plain values; None: nothing that can be kept."""
        policy = self._policy_of(policy_spec)
        return policy.state() if learns(policy_spec) else None

    def rlspec_learn_costs(self, policy_spec: PolicySpec, rows: list[list[object]]) -> None:
        """Teach the policy of this spec the costs of steps that another one decided."""
        if learns(policy_spec):
            self._policy_of(policy_spec).learn_costs([StepFacts.from_row(row) for row in rows])

    def rlspec_restore(self, policy_spec: PolicySpec, state: dict[str, Any]) -> str | None:
        """Let the policy of this spec go on with what an earlier run learnt; else why it cannot."""
        return self._policy_of(policy_spec).restore(state)

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

    def add_request(self, request: Request) -> None:
        # Before the worker sees the parameters; vLLM's front has refused them by then, or not seen them.
        if request.sampling_params is not None and unmark_plain(request.sampling_params):
            self._plain_ids.add(request.request_id)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._schedule_started = time.perf_counter()
        self._num_waiting = len(self.waiting)
        return super().schedule(*args, **kwargs)  # calls _update_after_schedule

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if not scheduler_output.total_num_scheduled_tokens:
            super()._update_after_schedule(scheduler_output)
            return
        decision = self._decide(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = decision.num_draft_tokens
        super()._update_after_schedule(scheduler_output)  # asynchronous scheduling places drafts here
        self._trim(scheduler_output.num_scheduled_tokens)

    def _decide(self, scheduled: SchedulerOutput) -> Decision:
        """Ask the policy for K, and note what each request was and will be offered."""
        self._plain_ids -= scheduled.finished_req_ids
        for request_id in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._offered.pop(request_id, None)
        load = read_load(
            self._num_decided,
            self._num_waiting,
            scheduled,
            self.requests,
            self._plain_ids,
            self.max_model_len,
        )
        decision = self._policy.decide(load) if self.num_spec_tokens else NO_DRAFTER
        k = decision.num_draft_tokens
        assert 0 <= k <= self.num_spec_tokens, decision
        num_offered = tuple(self._offered.get(request_id, 0) for request_id in load.request_ids)
        offers = (k if k < room else room for room in load.num_room)
        if decision.caps is not None:
            offers = map(min, offers, decision.caps)
        self._offered.update(zip(load.request_ids, offers, strict=True))
        self._scheduled.append(
            _ScheduledStep(self._schedule_started, self._num_waiting, num_offered, decision)
        )
        self._num_decided += 1
        return decision

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)  # called by synchronous scheduling
        self._trim(draft_token_ids.req_ids)

    def _trim(self, request_ids: Iterable[str]) -> None:
        """Take from requests the drafts beyond what they were offered."""
        if not self._can_trim:
            return
        for request_id in request_ids:
            request, num_offered = self.requests.get(request_id), self._offered.get(request_id, 0)
            if request is not None and len(request.spec_token_ids) > num_offered:
                request.spec_token_ids = request.spec_token_ids[:num_offered]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return super().update_from_output(scheduler_output, model_runner_output)
        contexts = read_contexts(scheduler_output, self.requests)
        # Before vLLM cuts the sampled tokens at a stop, as its own counters do.
        verified = read_verified(scheduler_output, model_runner_output)
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
        decision = step.decision
        facts = StepFacts(
            step_index=self._num_steps,
            started_seconds=step.started_seconds,
            # With asynchronous scheduling a step is scheduled while the one before still runs.
            step_seconds=ended_seconds - max(step.started_seconds, self._last_update_seconds),
            num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            num_waiting=step.num_waiting,
            num_draft_tokens=decision.num_draft_tokens,
            reason=decision.reason,
            expected_tokens=decision.expected_tokens,
            expected_seconds=decision.expected_seconds,
            plain_seconds=decision.plain_seconds,
            predicted_seconds=decision.predicted_seconds,
            request_ids=request_ids,
            num_offered=step.num_offered,
            num_drafted=verified[0],
            num_accepted=verified[1],
            num_emitted=tuple(emitted.get(request_id, 0) for request_id in request_ids),
            context_lengths=contexts,
            num_preempted=len(scheduler_output.preempted_req_ids or ()),
        )
        self._last_update_seconds = ended_seconds
        self._num_steps += 1
        self._policy.observe(facts)
        self._steps.append(facts)


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
