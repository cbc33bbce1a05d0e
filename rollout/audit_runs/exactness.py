"""Owns the checks that need no statistics: greedy identity, accounting, logprobs, acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlspec.audit.accounting import check_accounting
from rlspec.audit.exact import probabilities
from rlspec.audit.greedy_identity import TIE_TOLERANCE, first_differences, judge
from rlspec.audit.verdicts import Check, CheckResult, Verdict, decided
from rlspec.types import Rollout
from rollout.audit_runs.bench import AuditEngine, Bench
from rollout.reference import ReferenceModel

GREEDY = {"temperature": 0.0, "max_tokens": 40}
NUM_TOKENS = 24
NUM_SAMPLES = 8

LOGPROB_CASES: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 8},
    {"temperature": 0.7, "top_p": 0.9},
)

MAX_LOGPROB_ERROR = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}
"""Largest |dlogp| to the reference in fp32, by the engine's dtype. fp32: 3e-6 was measured, a wrong
distribution is off by more than 0.01. The half precisions are bounds on rounding in the model, not measured
here: there the mean matters, which `LogprobDrift` watches."""

MIN_ACCEPTANCE = 0.999
"""A drafter equal to the policy is accepted but for rounding: min(1, p / q) differs from 1 by about 1e-6."""


def greedy_identity(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Same tokens with and without speculation, K fixed and K random.

    The plain engine is started and closed beside the speculating one, which must not mind.
    """
    if bench.plain_greedy is None:
        with bench.engine(bench.subject.drafters[0]) as plain:
            bench.plain_greedy = plain.draw(bench.subject.prompts, GREEDY).rollouts
    for random_k in (False, True):
        rollouts = engine.draw(bench.subject.prompts, GREEDY, random_k=random_k).rollouts
        differences = first_differences(bench.plain_greedy, rollouts)
        gaps = [bench.reference.top_two_gap(difference.prefix_token_ids) for difference in differences]
        verdict = judge(len(rollouts), gaps)
        yield CheckResult(
            check=Check.GREEDY_IDENTITY,
            case=f"{engine.drafter.name}; K {'random' if random_k else 'fixed'}",
            verdict=decided(verdict.passed),
            statistic=f"{verdict.num_wrong} of {verdict.num_compared} differ, {verdict.num_ties} ties",
            threshold=f"0 differ but at ties within {TIE_TOLERANCE:g}",
            false_alarm_rate=0.0,
            detail=f"{_accepted(rollouts)}; {verdict}",
        )


def accounting(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Each verification gives accepted + 1 tokens, positions have no gap, sums equal vLLM's counters."""
    for random_k, temperature in ((False, 0.0), (True, 1.0)):
        drawn = engine.draw_recorded(
            bench.subject.prompts,
            {"temperature": temperature, "max_tokens": NUM_TOKENS},
            num_samples=NUM_SAMPLES if temperature else 1,
            random_k=random_k,
        )
        faults = check_accounting(drawn.rollouts, drawn.steps, drawn.verified, drawn.counts)
        is_vacuous = not faults.num_verifications
        yield CheckResult(
            check=Check.ACCOUNTING,
            case=f"{engine.drafter.name}; temperature {temperature:g}, K {'random' if random_k else 'fixed'}",
            verdict=Verdict.SKIPPED
            if is_vacuous and not faults.num_faults
            else decided(not faults.num_faults),
            statistic=f"{faults.num_faults} faults in {faults.num_verifications} verifications",
            threshold="0 faults",
            false_alarm_rate=0.0,
            detail=f"{faults}{'; the drafter drafted nothing' if is_vacuous else ''}",
        )


def processed_logprobs(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Logprobs after temperature, top_k and top_p against the reference."""
    for sampling in LOGPROB_CASES:
        yield _logprobs(bench, engine, sampling, is_raw=False)


def raw_logprobs(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Logprobs of the unscaled logits against the reference, at a temperature that must not show."""
    yield _logprobs(bench, engine, {"temperature": 0.7}, is_raw=True)


def acceptance(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """A drafter equal to the policy, with sampled drafts, is always accepted."""
    for temperature in (1.0, 0.7):
        sampling = {"temperature": temperature, "max_tokens": NUM_TOKENS}
        rollouts = engine.draw(bench.subject.prompts, sampling, num_samples=NUM_SAMPLES).rollouts
        num_drafted, num_accepted = (
            sum(getattr(rollout, name) for rollout in rollouts) for name in ("num_drafted", "num_accepted")
        )
        rate = num_accepted / num_drafted if num_drafted else 0.0
        yield CheckResult(
            check=Check.ACCEPTANCE,
            case=f"{engine.drafter.name}; temperature {temperature:g}",
            verdict=decided(rate >= MIN_ACCEPTANCE),
            statistic=f"accepted {rate:.5f}",
            threshold=f">= {MIN_ACCEPTANCE}",
            false_alarm_rate=0.0,
            detail=f"{num_accepted} of {num_drafted} draft tokens accepted",
        )


def max_logprob_error(engine: AuditEngine) -> float:
    """The tolerance of this engine's dtype."""
    return MAX_LOGPROB_ERROR[engine.engine.dtype]


def logprob_errors(
    reference: ReferenceModel,
    prefix: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    sampling: Mapping[str, Any],
) -> list[float]:
    """|dlogp| to the reference of each token after a prefix, under these sampling parameters."""
    exact = probabilities(reference.completion_logits(prefix, tokens), **sampling)
    with np.errstate(divide="ignore"):  # an impossible token is infinitely wrong
        expected = np.log(exact[np.arange(len(tokens)), list(tokens)])
    errors: list[float] = np.abs(np.array(logprobs) - expected).tolist()
    return errors


def _logprobs(bench: Bench, engine: AuditEngine, sampling: Mapping[str, Any], is_raw: bool) -> CheckResult:
    drawn = engine.draw(
        bench.subject.prompts, {**sampling, "max_tokens": NUM_TOKENS}, num_samples=2, random_k=True
    )
    shown = {"temperature": 1.0} if is_raw else sampling
    errors = [
        error
        for rollout in drawn.rollouts
        for error in logprob_errors(
            bench.reference, rollout.prompt_token_ids, rollout.completion_token_ids, rollout.logprobs, shown
        )
    ]
    tolerance = max_logprob_error(engine)
    names = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    return CheckResult(
        check=Check.LOGPROBS,
        case=f"{engine.drafter.name}; {'raw' if is_raw else 'processed'}, {names}",
        verdict=decided(max(errors) <= tolerance),
        statistic=f"max |dlogp| = {max(errors):.1e}",
        threshold=f"<= {tolerance:g}",
        false_alarm_rate=0.0,
        detail=f"{len(errors)} tokens, {_accepted(drawn.rollouts)}; mean |dlogp| = {np.mean(errors):.1e}",
    )


def _accepted(rollouts: Sequence[Rollout]) -> str:
    return (
        f"{sum(r.num_accepted for r in rollouts)} of {sum(r.num_drafted for r in rollouts)} drafts accepted"
    )
