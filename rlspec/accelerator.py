"""Owns the one way in: `Accelerator(config)` puts engine, draft-length policy and metrics together.

With `cli.py` and `demo.py` it is the composition root: it knows every part, and no part knows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlspec.audit.drift_report import DriftReport
from rlspec.audit.logprob_drift import LogprobDrift
from rlspec.config import Config, InFlightMode, change_sampling, with_sampling
from rlspec.config_disable import without_drafter_if_disabled
from rlspec.config_files import load_config
from rlspec.config_sampling import SamplingConfig
from rlspec.errors import missing_engine
from rlspec.kv_memory import KvMemory
from rlspec.metrics import Metrics
from rlspec.policy_specs import check_k_trace, configured_spec
from rlspec.prompts import PromptLike, Rejected, as_prompts, first_error
from rlspec.remembering import recall, remember
from rlspec.speculation.build import PolicySpec, replay_spec
from rlspec.types import Event, Prompt, Rollout, StepFacts

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from rollout.encoding import EncodedPrompt
    from rollout.sampling import RequestSampling

logger = logging.getLogger("rlspec.accelerator")


class Accelerator:
    """Draws rollouts from a policy on stock vLLM, speculating as the configuration says.

    Not thread-safe; one call of `generate` or `stream` at a time.

    Args:
        config: The configuration, or the path of its YAML file; None is the embedded default policy.

    Attributes:
        config: The configuration.
        metrics: Prometheus metrics of this accelerator.
        steps: What each engine step of the last call did (about 1 kB a step at batch 32).
        events: What happened in them that a person should hear of; logged as warnings too.

    Raises:
        ConfigError, ModelError, SetupError: The configuration, a checkpoint or this machine is refused.
        EngineError: vLLM did not start.
    """

    def __init__(self, config: Config | str | Path | None = None) -> None:
        given = config if isinstance(config, Config) else load_config(config)
        self.config = without_drafter_if_disabled(given)
        self.metrics = Metrics()
        self._drift = LogprobDrift(self.config.drift)
        self.steps: list[StepFacts] = []
        self.events: list[Event] = []
        self._is_closed = False
        try:  # Here, so that `import rlspec` loads neither torch nor vLLM.
            from rollout.engine import RolloutEngine
        except ImportError as error:
            raise missing_engine(error) from error
        with ExitStack() as undo:
            undo.callback(self.metrics.close)  # frees the port when the engine does not start
            port = self.config.observability.prometheus_port
            if port is not None:
                logger.info("metrics on http://127.0.0.1:%d/metrics", self.metrics.serve(port))
            self._engine = RolloutEngine(self.config, self.metrics)
            undo.callback(self._engine.close)
            recall(self._engine, self.config)
            undo.pop_all()

    def generate(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingConfig | Mapping[str, Any] | None = None,
        *,
        k_trace: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Draw `sampling.n` samples of each prompt; groups in input order, samples in theirs.

        Args:
            prompts: Texts, token ids, chat messages or `Prompt`s.
            sampling: Parameters under vLLM's names; a mapping changes some of the configuration's.
            k_trace: K of each engine step, from `k_trace` of an earlier call: repeats a seeded run.

        Raises:
            InputError: A prompt or parameter is not accepted; nothing has been generated.
            EngineError: The engine died.
        """
        checked = as_prompts(prompts)
        order = {prompt.group_id: index for index, prompt in enumerate(checked)}
        rollouts = self._stream_checked(checked, sampling, k_trace)
        return sorted(rollouts, key=lambda rollout: (order[rollout.group_id], rollout.sample_index))

    def stream(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingConfig | Mapping[str, Any] | None = None,
        *,
        k_trace: Sequence[int] | None = None,
    ) -> Iterator[Rollout]:
        """As `generate`, but yields each rollout as soon as it is finished.

        Everything that can be refused is refused before this returns. Closing the iterator early aborts
        what is still running.
        """
        return self._stream_checked(as_prompts(prompts), sampling, k_trace)

    def encode(self, prompts: Sequence[Prompt]) -> tuple[list[EncodedPrompt], list[Rejected]]:
        """Token ids of each prompt, and the prompts that do not fit the policy with the reason."""
        from rollout.encoding import encode_prompts

        engine = self._engine
        accepted: list[EncodedPrompt]
        accepted, rejected = encode_prompts(
            prompts, engine.tokenizer, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size
        )
        return accepted, rejected

    def stream_encoded(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingConfig | Mapping[str, Any] | None = None,
        *,
        k_trace: Sequence[int] | None = None,
    ) -> Iterator[Rollout]:
        """As `stream`, for prompts that `encode` accepted."""
        from rollout.requests import RolloutRequest

        if isinstance(sampling, SamplingConfig):
            parameters = sampling
        else:
            parameters = with_sampling(self.config, sampling or {})
        samplings = self._prepare(prompts, parameters)
        requests = (
            RolloutRequest(prompt.group_id, index, prompt.token_ids, prepared, prompt.data)
            for prompt, prepared in zip(prompts, samplings, strict=True)
            for index in range(parameters.n)
        )
        steps: list[StepFacts] = []
        events: list[Event] = []

        def on_steps(new_steps: Sequence[StepFacts], new_events: Sequence[Event]) -> None:
            steps.extend(new_steps)
            events.extend(new_events)

        run: Iterator[Rollout] = self._engine.run(requests, self._policy_spec(k_trace), on_steps)
        self.steps, self.events = steps, events
        return run

    def observe_trainer_logprobs(
        self,
        rollouts: Sequence[Rollout],
        trainer_logprobs: Sequence[ArrayLike],
        *,
        trainer_version: int | None = None,
    ) -> DriftReport:
        """Compare the trainer's logprobs of rollouts with the engine's; warn when they part too far.

        Args:
            rollouts: From this accelerator.
            trainer_logprobs: For each rollout, the trainer's logprob of each completion token, at the
                temperature of the sampling.
            trainer_version: Version of the weights that computed them; None leaves versions uncompared.

        Raises:
            InputError: Lengths or values do not fit; nothing has been added to the window.
        """
        report = self._drift.observe(rollouts, trainer_logprobs, trainer_version=trainer_version)
        self.metrics.observe_drift(report)
        if report.verdict.new_crossings:
            logger.warning("%s", report)
        return report

    def update_policy(self, path: str | Path, *, version: int, in_flight: InFlightMode | None = None) -> None:
        """Replace the policy's weights by those of a checkpoint; what is drawn from now on is its.

        May be called between two rollouts of `stream`. Everything that can be refused is refused before the
        engine is touched: it then goes on under the old policy.

        Args:
            path: Directory of the checkpoint: config.json and safetensors, in one file or several.
            version: Its number, above that of the running policy; rollouts carry it.
            in_flight: What happens to requests that are running: `drain`, `abort` or `keep`. None is
                `policy.in_flight` of the configuration, which explains them.

        Raises:
            InputError: `version` or `in_flight` is not accepted.
            ModelError: The checkpoint is incomplete, not finite, or another model than the running policy.
            EngineError: The engine is closed or in a step, or loading failed half-way; then it must be made
                again.
        """
        mode = self.config.policy.in_flight if in_flight is None else in_flight
        self._engine.update_policy(path, version, mode)

    @property
    def policy_version(self) -> int:
        """Version of the policy's weights."""
        return int(self._engine.policy_version)

    @property
    def policy_path(self) -> str:
        """Path or hub name of the checkpoint that the policy's weights came from."""
        return str(self._engine.policy_path)

    def learn_costs(self, steps: Sequence[StepFacts]) -> None:
        """Teach measured steps to the policy that the configuration asks for, for this run and the next.

        Policies that do not learn take nothing from it.
        """
        self._engine.learn_costs(configured_spec(self.config), steps)

    @property
    def max_batch_size(self) -> int:
        """Requests in a batch at most: vLLM's `max_num_seqs`."""
        return int(self._engine.max_batch_size)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response at most."""
        return int(self._engine.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Token ids of the policy."""
        return int(self._engine.vocab_size)

    @property
    def kv_memory(self) -> KvMemory:
        """How many tokens the KV cache holds, and what the drafter's layers take of it."""
        memory: KvMemory = self._engine.kv_memory
        return memory

    @property
    def k_trace(self) -> list[int]:
        """K of each engine step of the last call; replays it when given to `generate`."""
        return [facts.num_draft_tokens for facts in self.steps]

    def close(self) -> None:
        """Stop the engine and free its memory; what was learnt of costs and acceptance is kept on disk."""
        self.metrics.close()
        if not self._is_closed:
            self._is_closed = True
            remember(self._engine, self.config)
        self._engine.close()

    def __enter__(self) -> Accelerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream_checked(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig | Mapping[str, Any] | None,
        k_trace: Sequence[int] | None,
    ) -> Iterator[Rollout]:
        accepted, rejected = self.encode(prompts)
        if rejected:
            raise first_error(rejected)
        return self.stream_encoded(accepted, sampling, k_trace=k_trace)

    def _prepare(self, prompts: Sequence[EncodedPrompt], sampling: SamplingConfig) -> list[RequestSampling]:
        """Checked sampling parameters of each prompt; prompts with the same ones share them."""
        common = self._engine.prepare(sampling)
        distinct: dict[str, RequestSampling] = {}
        samplings = []
        for prompt in prompts:
            prepared = common
            if prompt.sampling:
                own = change_sampling(sampling, prompt.sampling)
                key = own.model_dump_json()
                if key not in distinct:
                    where = f"prompt of group {prompt.group_id}: sampling"
                    distinct[key] = self._engine.prepare(own, where)
                prepared = distinct[key]
            samplings.append(prepared)
        return samplings

    def _policy_spec(self, k_trace: Sequence[int] | None) -> PolicySpec:
        if k_trace is None:
            return configured_spec(self.config)
        check_k_trace(k_trace, self.config)
        return replay_spec(k_trace)
