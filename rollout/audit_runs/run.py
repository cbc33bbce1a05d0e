"""Owns one audit from end to end: which engines, which checks on each, and what becomes of one that dies.

for each drafter: start an engine ─► its checks, the one that changes weights last ─► results
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

from vllm.plugins import load_general_plugins

from rlspec.audit.verdicts import TOTAL_FALSE_ALARM_RATE, Check, CheckResult, Verdict, decided
from rlspec.errors import EngineError
from rollout.audit_runs import distribution, exactness, parameters, weights
from rollout.audit_runs.bench import AuditEngine, Bench
from rollout.audit_runs.subjects import Drafter, Subject
from rollout.vllm_patches import PATCHES, patch_statuses

OnResult = Callable[[CheckResult], None]

CheckRun = Callable[[Bench, AuditEngine], Iterator[CheckResult]]

ON_EACH_ENGINE: dict[Check, CheckRun] = {
    Check.DISTRIBUTION: distribution.run,
    Check.GREEDY_IDENTITY: exactness.greedy_identity,
    Check.ACCOUNTING: exactness.accounting,
    Check.LOGPROBS: exactness.processed_logprobs,
    Check.SAMPLING_PARAMETERS: parameters.run,
    Check.ACCEPTANCE: exactness.acceptance,
    Check.WEIGHTS: weights.run,
}
"""In this order; the last one changes the engine's policy."""


def run_audit(
    subjects: Sequence[Subject], checks: Collection[Check], *, seed: int, is_full: bool, on_result: OnResult
) -> list[CheckResult]:
    """Run checks on subjects; each result is handed to `on_result` as soon as it is known."""
    alpha = TOTAL_FALSE_ALARM_RATE / sum(distribution.num_tests(subject) for subject in subjects)
    results: list[CheckResult] = []
    for result in itertools.chain(
        _patches() if Check.PATCHES in checks else (),
        *(_on_subject(Bench(subject, seed, is_full, alpha), checks) for subject in subjects),
    ):
        results.append(result)
        on_result(result)
    return results


def _on_subject(bench: Bench, checks: Collection[Check]) -> Iterator[CheckResult]:
    for drafter in bench.subject.drafters:
        wanted = {
            check: run for check, run in ON_EACH_ENGINE.items() if check in checks and check in drafter.checks
        }
        yield from _on_engines(bench, drafter, wanted)
        if Check.LOGPROBS in wanted:
            raw = {Check.LOGPROBS: exactness.raw_logprobs}
            yield from _on_engines(bench, drafter, raw, logprobs_mode="raw_logprobs")


def _on_engines(
    bench: Bench, drafter: Drafter, wanted: dict[Check, CheckRun], **vllm_args: str
) -> Iterator[CheckResult]:
    """Checks on one engine; a new one is started after a check that killed it."""
    todo = list(wanted)
    while todo:
        check = todo[0]
        try:
            with bench.engine(drafter, **vllm_args) as engine:
                while todo:
                    check = todo.pop(0)
                    yield from wanted[check](bench, engine)
        except EngineError as error:
            todo = [left for left in todo if left is not check]
            yield CheckResult(
                check=check,
                case=f"{drafter.name}; engine",
                verdict=Verdict.FAILED,
                statistic="engine failed",
                threshold="an engine that starts and runs",
                false_alarm_rate=0.0,
                detail=f"{error} Where a line of `patches` failed, that is the cause, not the policy",
            )


def _patches() -> Iterator[CheckResult]:
    """What rlspec's own checks of its patches find in this process."""
    load_general_plugins()
    symptoms = {patch.name: patch.symptom for patch in PATCHES}
    for status in patch_statuses():
        yield CheckResult(
            check=Check.PATCHES,
            case=status.name,
            verdict=decided(status.fault is None),
            statistic="applied" if status.applied else "not applied",
            threshold="the behaviour is right",
            false_alarm_rate=0.0,
            detail=f"{status.fault} Symptom: {symptoms[status.name].rstrip('.')}"
            if status.fault
            else "as it should be",
        )
