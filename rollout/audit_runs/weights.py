"""Owns the weights check: after a policy update tokens, logprobs and cached prompts are the new policy's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlspec.audit.verdicts import Check, CheckResult, Verdict, decided
from rlspec.config import InFlightMode
from rlspec.types import FinishReason, Rollout
from rollout.audit_runs.bench import AuditEngine, Bench
from rollout.audit_runs.exactness import logprob_errors, max_logprob_error
from rollout.reference import ReferenceModel

SAMPLING: Mapping[str, Any] = {"temperature": 1.0}
LENGTHS = (8, 60)
"""`max_tokens` in turn: the short responses end, and the update comes while the long ones run."""
NUM_SAMPLES = 2
MODES: tuple[InFlightMode, ...] = ("drain", "abort", "keep")


def run(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Update to the other policy and back, with requests in flight, in each mode."""
    other = bench.subject.other_policy
    if other is None:
        yield _result(engine, "update", Verdict.SKIPPED, "-", "no second checkpoint of this policy is given")
        return
    policies = (bench.subject.policy_path, other)
    references = (bench.reference, bench.other_reference)
    versions = {engine.engine.policy_version: references[0]}
    for index, mode in enumerate(MODES):
        before = engine.draw(bench.subject.prompts, {**SAMPLING, "max_tokens": 2})  # fills the prefix cache
        stream = engine.stream(
            bench.subject.prompts, SAMPLING, num_samples=NUM_SAMPLES, varied_lengths=LENGTHS
        )
        rollouts = [next(stream)]
        version = engine.engine.policy_version + 1
        versions[version] = references[(index + 1) % 2]
        engine.engine.update_policy(policies[(index + 1) % 2], version, mode)
        rollouts += stream
        after = engine.draw(bench.subject.prompts, {**SAMPLING, "max_tokens": 8})
        yield _in_flight(engine, mode, rollouts, versions, version)
        yield _cached(engine, mode, before.rollouts, after.rollouts, versions[version])


def _in_flight(
    engine: AuditEngine,
    mode: InFlightMode,
    rollouts: Sequence[Rollout],
    versions: Mapping[int, ReferenceModel],
    version: int,
) -> CheckResult:
    """Each token's logprob against the policy whose version it carries."""
    errors = [error for rollout in rollouts for error in _errors(rollout, versions)]
    tolerance = max_logprob_error(engine)
    num_mixed = sum(len(rollout.policy_spans) > 1 for rollout in rollouts)
    num_aborted = sum(rollout.finish_reason is FinishReason.ABORT for rollout in rollouts)
    num_old = sum(rollout.policy_version < version for rollout in rollouts)
    happened = {"drain": num_old > 1, "abort": num_aborted > 0, "keep": num_mixed > 0}[mode]
    return _result(
        engine,
        f"requests in flight: {mode}",
        decided(max(errors) <= tolerance and happened),
        f"max |dlogp| = {max(errors):.1e}",
        f"{len(errors)} tokens of {len(rollouts)} responses: {num_old} begun under the old policy, "
        f"{num_mixed} across both, {num_aborted} aborted",
        f"<= {tolerance:g}, and requests in flight",
    )


def _cached(
    engine: AuditEngine,
    mode: InFlightMode,
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    reference: ReferenceModel,
) -> CheckResult:
    """Prompts that were cached under the old policy, drawn from again."""
    versions = {after[0].policy_version: reference}
    errors = [error for rollout in after for error in _errors(rollout, versions)]
    tolerance = max_logprob_error(engine)
    is_right = max(errors) <= tolerance
    num_cached = engine.num_cached_tokens(before[-1].prompt_token_ids)
    return _result(
        engine,
        f"cached prompts, after {mode}",
        decided(is_right) if num_cached or not is_right else Verdict.SKIPPED,
        f"max |dlogp| = {max(errors):.1e}",
        f"{len(errors)} tokens; a repeated prompt of {len(before[-1].prompt_token_ids)} tokens takes "
        f"{num_cached} from the prefix cache{'' if num_cached else ', so there was nothing to go stale'}",
        f"<= {tolerance:g}",
    )


def _errors(rollout: Rollout, versions: Mapping[int, ReferenceModel]) -> list[float]:
    """|dlogp| of each token to the reference of the version it was sampled under."""
    tokens = list(rollout.completion_token_ids)
    errors: list[float] = []
    begin = 0
    for span in rollout.policy_spans:
        end = begin + span.num_tokens
        prefix = [*rollout.prompt_token_ids, *tokens[:begin]]
        reference, logprobs = versions[span.policy_version], rollout.logprobs[begin:end]
        errors += logprob_errors(reference, prefix, tokens[begin:end], logprobs, SAMPLING)
        begin = end
    return errors


def _result(
    engine: AuditEngine, case: str, verdict: Verdict, statistic: str, detail: str, threshold: str = "-"
) -> CheckResult:
    return CheckResult(
        check=Check.WEIGHTS,
        case=f"{engine.drafter.name}; {case}",
        verdict=verdict,
        statistic=statistic,
        threshold=threshold,
        false_alarm_rate=0.0,
        detail=detail,
    )
