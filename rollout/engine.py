"""Owns one running vLLM engine and who may use it when: one run, or a policy update between its yields.

A run (`run.py`) may be closed half-way: what is still in the engine is then aborted.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, RequestOutput
from vllm.exceptions import VLLMError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from rlspec.config import Config, InFlightMode
from rlspec.config_sampling import SamplingConfig
from rlspec.errors import EngineError, InputError
from rlspec.metrics import Metrics
from rlspec.speculation.build import PolicySpec
from rlspec.speculation.estimates_file import EstimatesKey
from rlspec.types import Event, Rollout, StepFacts
from rollout.engine_core import EngineCoreLine
from rollout.engine_start import drafter_version, kv_memory, start_engine
from rollout.estimates_key import estimates_key
from rollout.policy_sync import PolicySync
from rollout.requests import Recording, RolloutRequest
from rollout.run import OnSteps, Run
from rollout.sampling import EngineTraits, RequestSampling, prepare_sampling, verify_params

logger = logging.getLogger("rlspec.rollout.engine")

STEP_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a step of vLLM in this process raises when it fails. Its state is unknown then: the engine is dead."""


class RolloutEngine:
    """A policy and its drafter on one stock vLLM engine. Not thread-safe; one run at a time.

    Raises:
        ConfigError, ModelError, SetupError: Configuration, checkpoint or machine do not allow it.
        EngineError: vLLM did not start.
    """

    def __init__(self, config: Config, metrics: Metrics, *, check_patches: bool = True) -> None:
        self.config = config
        self.metrics = metrics
        self._llm: LLM = start_engine(config, check_patches)
        self._core = EngineCoreLine(self._llm)
        self.drafter_version = drafter_version(config.drafter)
        model_config = self._llm.llm_engine.model_config
        self.max_model_len: int = model_config.max_model_len
        self.dtype: str = str(model_config.dtype).removeprefix("torch.")
        self.vocab_size: int = model_config.get_vocab_size()
        self.logprobs_mode: str = str(model_config.logprobs_mode)
        scheduling = self._llm.llm_engine.vllm_config.scheduler_config
        # Requests handed to vLLM at a time: two full batches, so that it never waits for one.
        self.max_batch_size: int = scheduling.max_num_seqs
        self.max_in_engine: int = 2 * scheduling.max_num_seqs
        speculative = config.drafter.speculative_config
        self._traits = EngineTraits(
            speculating=speculative is not None,
            samples_drafts=(speculative or {}).get("draft_sample_method") == "probabilistic",
            on_unsupported=config.speculation.on_unsupported,
            has_tokenizer=self.tokenizer is not None,
            can_rewind=not (current_platform.is_cpu() and scheduling.enable_chunked_prefill),
            vocab_size=self.vocab_size,
        )
        self.kv_memory = kv_memory(self._llm)
        logger.info("%s", self.kv_memory)
        metrics.set_kv_memory(self.kv_memory)
        self._request_numbers = itertools.count()
        self._policy = PolicySync(self._llm, self._core, metrics, version=config.policy.version)
        self._run: Run | None = None
        self._is_closed = False
        self._is_dead = False
        self._last_run: Generator[Rollout, None, None] | None = None

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer (transformers), or None with `skip_tokenizer_init`."""
        return self._llm.llm_engine.tokenizer

    def estimates_key(self) -> EstimatesKey:
        """What measured step costs and acceptance of this engine belong to."""
        return estimates_key(self._llm.llm_engine.vllm_config, self.config)

    @property
    def counts_steps(self) -> bool:
        """Whether the engine runs our scheduler; with `speculation.enabled: false` it does not."""
        return self._core.has_our_scheduler

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next step computes with."""
        return self._policy.version

    @property
    def policy_path(self) -> str:
        """Path or hub name of the checkpoint that these weights came from."""
        return self._policy.path

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
        on_steps: OnSteps,
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
        self._refuse_closed()
        self._refuse_second_run()
        self.require_intact()
        self._last_run = self._guarded(Run(self, requests, on_steps), policy)
        return self._last_run

    def update_policy(self, path: str | Path, version: int, in_flight: InFlightMode) -> None:
        """Give the engine other weights, between two rollouts of a run or outside one.

        Raises:
            InputError, ModelError: Refused; the engine goes on with the weights it has.
            EngineError: A step is being done, the engine is closed or died, or it must be made again.
        """
        self._refuse_closed()
        self.require_intact()
        if self._run is not None and not self._run.is_suspended:
            allowed, fix = "between two rollouts of a run", "Call it where the iterator has yielded."
            raise EngineError("update_policy", given="a call inside an engine step", allowed=allowed, fix=fix)
        checkpoint = self._policy.check(path, version, in_flight)
        with _named_death():
            self._policy.update(checkpoint, version, self._run, in_flight)

    def require_intact(self) -> None:
        """Raise if a policy update has failed half-way.

        Raises:
            EngineError: It has; its weights are neither the old nor the new ones.
        """
        self._policy.require_intact()

    def _guarded(self, run: Run, policy: PolicySpec) -> Generator[Rollout, None, None]:
        self._refuse_second_run()
        self._run = run
        try:
            with _named_death():
                if self.counts_steps:
                    self._core.call("begin", policy)
                yield from run.rollouts()
        finally:
            self._run = None

    def _refuse_closed(self) -> None:
        if self._is_closed or self._is_dead:
            given = "closed" if self._is_closed else "one that died while running"
            fix = "Make a new Accelerator."
            raise EngineError("engine", given=given, allowed="an open engine", fix=fix)

    def _refuse_second_run(self) -> None:
        if self._run is not None:
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
        params = copy.copy(request.sampling.params)  # vLLM makes the deep copy
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
        try:
            outputs = self._llm.llm_engine.step()
        except EngineDeadError:
            self._is_dead = True
            raise
        except STEP_FAULTS as error:
            self._is_dead = True
            raise EngineDeadError from error
        return [output for output in outputs if output.finished]

    def has_outputs(self) -> bool:
        """Whether a paused engine has outputs of steps that it has done; `step` takes them."""
        return self._core.has_outputs()

    def partial_outputs(self, internal_ids: Sequence[str]) -> list[RequestOutput]:
        """What running requests have so far, as vLLM ends them when it aborts; by vLLM's own ids.

        vLLM 0.32 makes this output itself, but hands it to asynchronous callers only.
        """
        states = self._llm.llm_engine.output_processor.request_states
        return [
            states[internal_id].make_request_output([], None, FinishReason.ABORT, None)
            for internal_id in internal_ids
        ]

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record every verification and vLLM's own counts; filled when the context ends."""
        self._core.call("start_recording")
        recording = Recording()
        yield recording
        rows, counts = self._core.call("end_recording")
        recording.verifications.extend((request_id, tuple(d), tuple(s)) for request_id, d, s in rows)
        recording.counts.update(counts)

    def drop(self, request_ids: Sequence[str]) -> None:
        """Take some requests out of vLLM; the others go on."""
        self._llm.llm_engine.abort_request(list(request_ids))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests that have not finished."""
        self._llm.llm_engine.abort_request(list(request_ids))
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def learnt(self, policy: PolicySpec) -> dict[str, Any] | None:
        """What the policy of this spec has learnt, as plain values; None: nothing that can be kept."""
        state: dict[str, Any] | None = None
        if self.counts_steps and not self._is_dead and not self._is_closed:
            state = self._core.call("learnt", policy)
        return state

    def restore(self, policy: PolicySpec, state: dict[str, Any]) -> str | None:
        """Let the policy of this spec go on with what an earlier run learnt; else why it cannot."""
        refusal: str | None = self._core.call("restore", policy, state)
        return refusal

    def learn_costs(self, policy: PolicySpec, steps: Sequence[StepFacts]) -> None:
        """Let the policy of this spec learn the costs of steps that another one decided."""
        self._core.call("learn_costs", policy, [facts.as_row() for facts in steps])

    def take_steps(self) -> tuple[list[StepFacts], list[Event]]:
        """The engine's steps since the last call, and what happened in them."""
        return self._core.take_steps()


@contextmanager
def _named_death() -> Iterator[None]:
    """Say what to do when the engine core's process has ended."""
    try:
        yield
    except EngineDeadError as error:
        cause = error.__cause__
        given = f"died while running: {type(cause).__name__}: {cause}" if cause else "died while running"
        fix = "See vLLM's log above for the cause; make a new Accelerator."
        raise EngineError("engine", given=given, allowed="alive", fix=fix) from error
