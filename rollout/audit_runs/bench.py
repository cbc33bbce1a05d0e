"""Owns what every check works with: an engine to draw from, the reference, and the share of false alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlspec.audit.accounting import VerifiedDrafts
from rlspec.audit.exact import Array, ExactMarginals, exact_marginals
from rlspec.config import Config, with_sampling
from rlspec.metrics import Metrics
from rlspec.speculation.build import PolicySpec, fixed_spec, replay_spec
from rlspec.types import Rollout, StepFacts
from rollout.audit_runs.subjects import Drafter, Subject
from rollout.engine import RolloutEngine
from rollout.reference import ReferenceModel
from rollout.requests import RolloutRequest
from rollout.run import OnSteps
from rollout.sampling import RequestSampling

MAX_STEPS = 50_000
"""K is given for this many steps: more than any check takes."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One call of the engine: responses by prompt and sample, steps, and verifications if wanted."""

    rollouts: list[Rollout]
    steps: list[StepFacts]
    verified: list[VerifiedDrafts] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The responses."""
        return [rollout.completion_token_ids for rollout in self.rollouts]


class AuditEngine:
    """An engine as the product runs it, with a drafter of the subject."""

    def __init__(self, config: Config, drafter: Drafter, seed: int) -> None:
        self.drafter = drafter
        self.config = config
        self.engine = RolloutEngine(config, Metrics(), check_patches=False)
        self._random_k = np.random.default_rng((seed, 2))

    @property
    def tokenizer(self) -> Any:
        """The policy's, or None."""
        return self.engine.tokenizer

    def prepare(self, sampling: Mapping[str, Any]) -> RequestSampling:
        """Check sampling parameters; responses go on past the end-of-sequence token unless they say so.

        Raises:
            InputError, ConfigError: They are refused.
        """
        changes = {"ignore_eos": True, "detokenize": False, **sampling}
        return self.engine.prepare(with_sampling(self.config, changes))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        *,
        num_samples: int = 1,
        random_k: bool = False,
        varied_lengths: Sequence[int] = (),
        on_steps: OnSteps = lambda steps, events: None,
    ) -> Iterator[Rollout]:
        """Draw responses, each yielded when it has ended.

        Args:
            prompts: Token ids; a response's `group_id` is the prompt's index.
            sampling: vLLM's names.
            num_samples: Of each prompt.
            random_k: K is drawn anew for every step; else it is the drafter's largest.
            varied_lengths: `max_tokens` of the samples in turn, so that requests join and leave all the time.
            on_steps: Called with the engine's steps.
        """
        lengths = varied_lengths or (sampling["max_tokens"],)
        prepared = [self.prepare({**sampling, "max_tokens": length}) for length in lengths]
        requests = [
            RolloutRequest(str(group), i, tuple(prompt), prepared[i % len(prepared)])
            for group, prompt in enumerate(prompts)
            for i in range(num_samples)
        ]
        return self.engine.run(requests, self._policy(random_k), on_steps)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        **how: Any,
    ) -> Drawn:
        """As `stream`, ordered by prompt, then sample."""
        steps: list[StepFacts] = []
        rollouts = list(self.stream(prompts, sampling, on_steps=lambda new, events: steps.extend(new), **how))
        rollouts.sort(key=lambda rollout: (int(rollout.group_id), rollout.sample_index))
        return Drawn(rollouts, steps)

    def draw_recorded(self, *args: Any, **how: Any) -> Drawn:
        """As `draw`, with every verification and vLLM's own counts."""
        with self.engine.recording() as recording:
            drawn = self.draw(*args, **how)
        verified = [VerifiedDrafts(*row) for row in recording.verifications]
        return Drawn(drawn.rollouts, drawn.steps, verified, recording.counts)

    def draw_mixed(self, requests: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> list[Rollout]:
        """One response to each prompt with its own parameters, all in one batch, in the order given."""
        rows = [
            RolloutRequest(str(index), 0, tuple(prompt), self.prepare(sampling))
            for index, (prompt, sampling) in enumerate(requests)
        ]
        rollouts = self.engine.run(rows, self._policy(False), lambda steps, events: None)
        return sorted(rollouts, key=lambda rollout: int(rollout.group_id))

    def num_cached_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that the prefix cache serves when it comes again."""
        self.draw([prompt], {"max_tokens": 1})
        return self.draw_recorded([prompt], {"max_tokens": 1}).counts["prefix_cache_hits"]

    def _policy(self, random_k: bool) -> PolicySpec:
        largest = self.drafter.max_draft_tokens
        if not random_k:
            return fixed_spec(largest)
        return replay_spec(self._random_k.integers(0, largest + 1, MAX_STEPS).tolist())


@dataclass
class Bench:
    """What the checks share.

    Attributes:
        subject: What is audited.
        seed: Of sampling, of K, of the tiny policy.
        is_full: The long audit.
        alpha: p-value below which a statistical test fails.
        plain_greedy: Greedy responses without a drafter, once they are drawn.
    """

    subject: Subject
    seed: int
    is_full: bool
    alpha: float
    plain_greedy: list[Rollout] | None = None
    _marginals: dict[str, ExactMarginals] = field(default_factory=dict)

    @cached_property
    def reference(self) -> ReferenceModel:
        """The policy in transformers."""
        return ReferenceModel(self.subject.policy_path)

    @cached_property
    def other_reference(self) -> ReferenceModel:
        """The policy that is updated to."""
        assert self.subject.other_policy is not None
        return ReferenceModel(self.subject.other_policy)

    def greedy_response(self, num_tokens: int) -> list[int]:
        """The reference's most likely response to the first prompt."""
        return self.reference.greedy(self.subject.prompts[0], num_tokens)

    @cached_property
    def tree(self) -> tuple[Array, ...]:
        """Logits after every continuation of the first prompt by up to 3 tokens."""
        return self.reference.tree_logits(self.subject.prompts[0])

    def marginals(self, sampling: Mapping[str, Any]) -> ExactMarginals:
        """Exact marginals after the first prompt; computed once for each set of parameters."""
        key = repr(sampling)
        if key not in self._marginals:
            self._marginals[key] = exact_marginals(self.tree, sampling)
        return self._marginals[key]

    @contextmanager
    def engine(self, drafter: Drafter, **vllm_args: Any) -> Iterator[AuditEngine]:
        """An engine of the subject, closed afterwards."""
        engine = AuditEngine(self.subject.config_for(drafter, self.seed, vllm_args), drafter, self.seed)
        try:
            yield engine
        finally:
            engine.engine.close()
