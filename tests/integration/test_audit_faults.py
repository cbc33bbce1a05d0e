"""Faults are injected into the real engine, and the check that is there for each one catches it.

Each test also runs the checks that the fault must not disturb, so that the right one is known to catch it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rlspec.audit.verdicts import Check, CheckResult, Verdict, failed_checks
from rlspec.config import parse_config
from rollout import run as rollout_run
from rollout.audit_runs.run import run_audit
from rollout.audit_runs.subjects import Subject, tiny_subjects
from rollout.scheduler import _LiveScheduling

QUIET = parse_config({"observability": {"vllm_log_level": "error"}})

UNDISTURBED = {Check.GREEDY_IDENTITY, Check.ACCOUNTING}
"""What most faults of sampling leave alone."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return tiny_subjects(tmp_path_factory.mktemp("audit"), 0, QUIET)[0]


def failing(subject: Subject, drafter: str, checks: Collection[Check]) -> list[Check]:
    """The checks that fail on one drafter of the subject."""
    (chosen,) = (candidate for candidate in subject.drafters if candidate.name == drafter)
    narrowed = replace(subject, drafters=(subject.drafters[0], chosen))
    # The plain engine is only what greedy identity compares with.
    narrowed = replace(narrowed, drafters=(replace(narrowed.drafters[0], checks=frozenset()), chosen))
    results: list[CheckResult] = run_audit([narrowed], checks, seed=0, is_full=False, on_result=print)
    assert any(result.verdict is not Verdict.SKIPPED for result in results)
    return failed_checks(results)


SAMPLED = "draft_model, sampled drafts"


def test_without_a_fault_nothing_fails(subject: Subject) -> None:
    checks = {*UNDISTURBED, Check.DISTRIBUTION, Check.LOGPROBS, Check.WEIGHTS, Check.SAMPLING_PARAMETERS}
    assert failing(subject, SAMPLED, checks) == []


def test_temperature_ignored_for_draft_tokens(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", lambda logits, *rest: logits)
    assert failing(subject, SAMPLED, {*UNDISTURBED, Check.DISTRIBUTION}) == [Check.DISTRIBUTION]


def test_one_draft_position_accepted_unconditionally(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = rejection_sampler.generate_uniform_probs

    def always_accept_the_second(num_tokens: int, num_drafts: list[int], *rest: Any) -> torch.Tensor:
        uniform = original(num_tokens, num_drafts, *rest)
        begin = 0
        for count in num_drafts:
            uniform[begin + 1 : begin + 2] = 0.0 if count >= 2 else uniform[begin + 1 : begin + 2]
            begin += count
        return uniform

    monkeypatch.setattr(rejection_sampler, "generate_uniform_probs", always_accept_the_second)
    assert failing(subject, SAMPLED, {*UNDISTURBED, Check.DISTRIBUTION}) == [Check.DISTRIBUTION]


def test_bonus_token_dropped(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    original = rejection_sampler.rejection_sample

    def without_bonus(draft_token_ids: torch.Tensor, num_drafts: list[int], *rest: Any, **more: Any) -> Any:
        tokens = original(draft_token_ids, num_drafts, *rest, **more)
        for row, count in enumerate(num_drafts):
            if count and tokens[row, count] >= 0:
                tokens[row, count] = rejection_sampler.PLACEHOLDER_TOKEN_ID
        return tokens

    monkeypatch.setattr(rejection_sampler, "rejection_sample", without_bonus)
    checks = {*UNDISTURBED, Check.DISTRIBUTION, Check.LOGPROBS}
    assert failing(subject, SAMPLED, checks) == [Check.ACCOUNTING]


def test_logprobs_of_drafted_tokens_from_the_drafter(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, logprobs = RejectionSampler.forward, RejectionSampler._get_logprobs_tensors
    seen: list[torch.Tensor | None] = []

    def remembering(self: Any, metadata: Any, draft_probs: Any, *rest: Any) -> Any:
        seen[:] = [draft_probs]
        return forward(self, metadata, draft_probs, *rest)

    def of_the_drafter(self: Any, count: int, metadata: Any, logits: Any, target: Any, *rest: Any) -> Any:
        drafted = target if seen[0] is None else seen[0].log()
        return logprobs(self, count, metadata, logits, drafted, *rest)

    monkeypatch.setattr(RejectionSampler, "forward", remembering)
    monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", of_the_drafter)
    assert failing(subject, SAMPLED, {*UNDISTURBED, Check.LOGPROBS}) == [Check.LOGPROBS]


def test_stale_prefix_cache_after_an_update(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_LiveScheduling, "rlspec_forget_kv", lambda self: True)
    assert failing(subject, SAMPLED, {*UNDISTURBED, Check.WEIGHTS}) == [Check.WEIGHTS]


def test_a_seed_ignored(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_run, "sample_seed", lambda *arguments: None)
    checks = {*UNDISTURBED, Check.SAMPLING_PARAMETERS}
    assert failing(subject, "ngram", checks) == [Check.SAMPLING_PARAMETERS]


def test_a_parameter_ignored(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties left out for draft tokens: the case the teacher-forced comparison is there for."""
    monkeypatch.setattr(RejectionSampler, "apply_penalties", staticmethod(lambda logits, *rest: logits))
    checks = {*UNDISTURBED, Check.SAMPLING_PARAMETERS}
    assert failing(subject, "ngram", checks) == [Check.SAMPLING_PARAMETERS]


def test_a_rejected_drafter_is_told_from_a_lossless_one(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model fed shifted tokens is lossless still; only its acceptance shows it."""
    from vllm.v1.spec_decode import llm_base_proposer

    original = llm_base_proposer.compute_probs_and_sample_next_token

    def flattened(logits: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return original(logits * 0.5, *rest, **more)

    monkeypatch.setattr(llm_base_proposer, "compute_probs_and_sample_next_token", flattened)
    checks = {Check.DISTRIBUTION, Check.ACCEPTANCE}
    assert failing(subject, "draft_model = policy, sampled drafts", checks) == [Check.ACCEPTANCE]
