"""Owns one running vLLM engine: requests in, rollouts out, a record of every step.

One run:
    requests (lazily) ─► waiting ─► vLLM steps ─► finished ─► Rollout
                                       └─► StepFacts ─► tallies by request, metrics, the caller

A run may be closed half-way: what is still in the engine is then aborted.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from vllm import LLM, RequestOutput
from vllm.exceptions import VLLMError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import Counter

from rlspec.config import Config, SamplingConfig
from rlspec.errors import EngineError, InputError
from rlspec.metrics import Metrics
from rlspec.speculation.policies import PolicySpec
from rlspec.types import FinishReason, Rollout, StepFacts
from rollout.engine_core import EngineCoreLine
from rollout.engine_start import drafter_version, start_engine
from rollout.requests import InFlight, RolloutRequest
from rollout.sampling import EngineTraits, RequestSampling, prepare_sampling, sample_seed, verify_params

logger = logging.getLogger("rlspec.rollout.engine")

STEPS_BETWEEN_FETCHES = 64
"""The scheduler is asked for its steps at least this often; from another process a call costs about 1 ms."""


class RolloutEngine:
    """A policy and its drafter on one stock vLLM engine. Not thread-safe; one run at a time.

    Raises:
        ConfigError, ModelError, SetupError: Configuration, checkpoint or machine do not allow it.
        EngineError: vLLM did not start.
    """

    def __init__(self, config: Config, metrics: Metrics, *, check_patches: bool = True) -> None:
        self.config = config
        self.metrics = metrics
        self.policy_version = config.policy.version
        self._llm: LLM = start_engine(config, check_patches)
        self._core = EngineCoreLine(self._llm)
        self.drafter_version = drafter_version(config.drafter)
        model_config = self._llm.llm_engine.model_config
        self.policy_path: str = model_config.model
        self.max_model_len: int = model_config.max_model_len
        self.dtype: str = str(model_config.dtype).removeprefix("torch.")
        self.vocab_size: int = model_config.get_vocab_size()
        self.logprobs_mode: str = str(model_config.logprobs_mode)
        scheduling = self._llm.llm_engine.vllm_config.scheduler_config
        # Requests handed to vLLM at a time: two full batches, so that it never waits for one.
        self.max_in_engine: int = 2 * scheduling.max_num_seqs
        self._traits = EngineTraits(
            speculating=config.drafter.speculative_config is not None,
            on_unsupported=config.speculation.on_unsupported,
            has_tokenizer=self.tokenizer is not None,
            can_rewind=not (current_platform.is_cpu() and scheduling.enable_chunked_prefill),
            vocab_size=self.vocab_size,
        )
        self._request_numbers = itertools.count()
        self._is_running = False
        self._is_closed = False
        self._last_run: Generator[Rollout, None, None] | None = None

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer (transformers), or None with `skip_tokenizer_init`."""
        return self._llm.llm_engine.tokenizer

    def prepare(self, sampling: SamplingConfig, where: str = "sampling") -> RequestSampling:
        """Check sampling parameters and translate them, once for all requests that share them.

        Args:
            sampling: The parameters.
            where: What errors call them.

        Raises:
            UnsupportedSamplingError: A parameter that speculation cannot honour, with a drafter loaded.
            InputError: The parameters are not accepted.
        """
        prepared = prepare_sampling(sampling, self._traits, where)
        verify_params(prepared, self._llm.llm_engine.vllm_config, self.tokenizer, where)
        return prepared

    def run(
        self,
        requests: Iterable[RolloutRequest],
        policy: PolicySpec,
        on_steps: Callable[[Sequence[StepFacts]], None],
    ) -> Iterator[Rollout]:
        """Draw the requested samples and yield each when it is finished.

        Args:
            requests: Taken lazily; the engine holds at most two batches of them. `prepare` has accepted
                their sampling parameters.
            policy: Who chooses K.
            on_steps: Called with the engine's steps as they become known.

        Raises:
            EngineError: Another run is not finished, or the engine died (while iterating).
        """
        if self._is_closed:
            fix = "Make a new Accelerator."
            raise EngineError("engine", given="closed", allowed="an open engine", fix=fix)
        self._refuse_second_run()
        self._last_run = self._guarded(_Run(self, requests, on_steps), policy)
        return self._last_run

    def _guarded(self, run: _Run, policy: PolicySpec) -> Generator[Rollout, None, None]:
        self._refuse_second_run()
        self._is_running = True
        try:
            self._core.call("begin", policy)
            yield from run.rollouts()
        except EngineDeadError as error:
            fix = "See vLLM's log above for the cause; make a new Accelerator."
            raise EngineError("engine", given="died while running", allowed="alive", fix=fix) from error
        finally:
            self._is_running = False

    def _refuse_second_run(self) -> None:
        if self._is_running:
            fix = "Finish or close the iterator of the earlier call first."
            raise EngineError("run", given="a second run", allowed="one run at a time", fix=fix)

    def close(self) -> None:
        """Abort what runs, stop the engine and free its memory; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._last_run is not None:
                self._last_run.close()
            self._core.close()

    def submit(self, request: RolloutRequest, seed: int | None) -> tuple[str, str]:
        """Hand one request to vLLM; returns its id, which outputs name, and vLLM's own, which steps name."""
        params = request.sampling.params.clone()
        params.seed = seed
        prompt = tokens_input(list(request.prompt_token_ids))
        request_id = str(next(self._request_numbers))
        try:
            return request_id, self._llm.llm_engine.add_request(request_id, prompt, params)
        except (ValueError, VLLMError) as error:
            given = f"group {request.group_id}, {len(request.prompt_token_ids)} prompt tokens"
            fix = "Correct the prompt or the sampling parameters."
            raise InputError("request", given=given, allowed=str(error), fix=fix) from error

    def step(self) -> list[RequestOutput]:
        """One engine step; the requests that finished in it."""
        return [output for output in self._llm.llm_engine.step() if output.finished]

    def record_verifications(self, is_wanted: bool) -> None:
        """Keep draft and sampled tokens of every verification, or no longer."""
        self._core.call("record_verifications", is_wanted)

    def take_verifications(self) -> list[tuple[str, list[int], list[int]]]:
        """vLLM's request id, draft tokens and sampled tokens of each verification since the last call."""
        return [tuple(row) for row in self._core.call("take_verifications")]

    def counters(self) -> dict[str, int]:
        """vLLM's Prometheus counters of this process, without their prefix; empty without `log_stats`."""
        counters = (metric for metric in self._llm.get_metrics() if isinstance(metric, Counter))
        return {counter.name.removeprefix("vllm:"): counter.value for counter in counters}

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests that have not finished."""
        self._llm.llm_engine.abort_request(list(request_ids))
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def take_steps(self) -> list[StepFacts]:
        """The engine's steps since the last call."""
        return self._core.take_steps()


class _Run:
    """One call of `RolloutEngine.run`."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Iterable[RolloutRequest],
        on_steps: Callable[[Sequence[StepFacts]], None],
    ) -> None:
        self._engine = engine
        self._requests = iter(requests)
        self._on_steps = on_steps
        self._in_flight: dict[str, InFlight] = {}
        self._request_ids: dict[str, str] = {}  # by vLLM's own id
        self._started = time.perf_counter()
        self._told_plain: set[str] = set()

    def rollouts(self) -> Iterator[Rollout]:
        """Submit, step and yield until every request is finished; abort the rest when closed early."""
        num_unfetched_steps = 0
        try:
            while self._top_up():
                finished = self._engine.step()
                num_unfetched_steps += 1
                if finished or num_unfetched_steps >= STEPS_BETWEEN_FETCHES:
                    self._fetch_steps()
                    num_unfetched_steps = 0
                for output in finished:
                    yield self._rollout(output)
            self._fetch_steps()
        except EngineDeadError:
            self._engine.metrics.count_skipped("requests_lost_with_the_engine", len(self._in_flight))
            self._in_flight.clear()  # nobody is left to abort them
            raise
        finally:
            if self._in_flight:
                self._engine.abort(list(self._in_flight))
                self._engine.metrics.count_skipped("aborted_requests", len(self._in_flight))

    def _top_up(self) -> bool:
        """Hand requests to vLLM up to the limit; whether any is in flight."""
        for request in itertools.islice(self._requests, self._engine.max_in_engine - len(self._in_flight)):
            seed = sample_seed(request.sampling.config.seed, request.group_id, request.sample_index)
            request_id, internal_id = self._engine.submit(request, seed)
            self._tell_plain(request)
            self._request_ids[internal_id] = request_id
            self._in_flight[request_id] = InFlight(
                request, internal_id, seed, time.perf_counter() - self._started
            )
        return bool(self._in_flight)

    def _tell_plain(self, request: RolloutRequest) -> None:
        """Count a request that gets no drafts, and log each of the parameters once a run."""
        for name in request.sampling.plain_because:
            self._engine.metrics.count_skipped(f"drafts_with_{name}")
            if name not in self._told_plain:
                self._told_plain.add(name)
                logger.warning("requests with sampling.%s are drawn without drafts (K = 0)", name)

    def _fetch_steps(self) -> None:
        steps = self._engine.take_steps()
        for facts in steps:
            columns = zip(
                facts.request_ids, facts.num_drafted, facts.num_accepted, facts.num_emitted, strict=True
            )
            for internal_id, *counts in columns:
                if internal_id in self._request_ids:
                    self._in_flight[self._request_ids[internal_id]].add_step(*counts)
        self._engine.metrics.observe_steps(steps)
        self._on_steps(steps)

    def _rollout(self, output: RequestOutput) -> Rollout:
        """The finished request as a rollout."""
        record = self._in_flight.pop(output.request_id)
        del self._request_ids[record.internal_id]
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        logprobs = tuple(
            position[token].logprob
            for position, token in zip(completion.logprobs or (), token_ids, strict=True)
        )
        _require_finite(logprobs, record.request.group_id)
        rollout = Rollout(
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
            policy_version=self._engine.policy_version,
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
        self._engine.metrics.observe_rollout(rollout)
        return rollout


def _require_finite(logprobs: Sequence[float], group_id: str) -> None:
    """Refuse what no trainer can use, and what only broken weights or parameters give."""
    bad = next((value for value in logprobs if not math.isfinite(value)), None)
    if bad is not None:
        fix = "Look for NaN in the policy's weights, and for extreme sampling parameters."
        given = f"{bad} in a response of group {group_id}"
        raise EngineError("logprobs", given=given, allowed="finite numbers", fix=fix)
