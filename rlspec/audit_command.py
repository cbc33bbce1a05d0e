"""Owns `rlspec audit`: what is audited, the table of verdicts, their JSON. Part of the composition root."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import provenance
from rlspec.audit.verdicts import Check, CheckResult, Verdict
from rlspec.config import Config, parse_config
from rlspec.console import print_rows
from rlspec.errors import ConfigError, InputError, missing_engine, nearest
from rlspec.rollout_files import write_text

DEFAULT_NUM_DRAFT_TOKENS = 3
MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class AuditJob:
    """What `rlspec audit` was asked to do.

    Attributes:
        is_full: Find errors of 0.02 instead of being quick.
        model, drafter, method: The user's policy and drafter; without a model and a configuration file the
            tiny random policy is audited with every kind of drafter.
        has_config: A configuration file, or a key of its policy or drafter, was given.
        checks: Names by comma; None is all.
        seed: Of sampling, of K, of the tiny policy.
        out: Where the results go as JSON.
    """

    is_full: bool = False
    model: str | None = None
    drafter: str | None = None
    method: str | None = None
    has_config: bool = False
    checks: str | None = None
    seed: int = 0
    out: Path | None = None


def run_audit_job(config: Config, job: AuditJob) -> bool:
    """Run the audit, print its table, write its results; whether nothing failed.

    Raises:
        RlspecError: Something given is not accepted.
    """
    checks = parse_checks(job.checks)
    if not 0 <= job.seed <= MAX_SEED:
        raise InputError("--seed", given=job.seed, allowed=f"0 to {MAX_SEED}", fix="Give a smaller one.")
    if job.out is not None and job.out.is_dir():
        raise InputError("--out", given=str(job.out), allowed="a file", fix="Name a file in that folder.")
    try:
        from rollout.audit_runs.run import run_audit
        from rollout.audit_runs.subjects import policy_subject, tiny_subjects
    except ImportError as error:
        raise missing_engine(error) from error
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rlspec-audit-") as folder:
        if job.model is None and job.drafter is None and job.method is None and not job.has_config:
            subjects = tiny_subjects(Path(folder), job.seed, config)
        else:
            subjects = (policy_subject(_with_models(config, job), Path(folder), job.seed, job.is_full),)
        print(
            f"auditing {subjects[0].name}, {'full' if job.is_full else 'quick'}, seed {job.seed}", flush=True
        )
        results = run_audit(subjects, checks, seed=job.seed, is_full=job.is_full, on_result=_print_line)
    seconds = time.perf_counter() - started
    failed = [result for result in results if result.verdict is Verdict.FAILED]
    _print_table(results, checks, seconds)
    if job.out is not None:
        _write(job, subjects[0].name, results, checks, seconds)
    return not failed


def parse_checks(names: str | None) -> list[Check]:
    """The checks by their names.

    Raises:
        InputError: A name is unknown.
    """
    if names is None:
        return list(Check)
    given = [name.strip() for name in names.split(",") if name.strip()]
    known = [check.value for check in Check]
    bad = next((name for name in given if name not in known), None)
    if bad is not None or not given:
        fix = nearest(bad or "", known)
        raise InputError("--checks", given=bad or names, allowed=f"names of {', '.join(known)}", fix=fix)
    return [check for check in Check if check.value in given]


def _with_models(config: Config, job: AuditJob) -> Config:
    """The configuration with the policy and drafter of the command line."""
    tree = config.model_dump(exclude_unset=True)
    if job.drafter is not None and not Path(job.drafter).is_dir():
        fix = "Name the drafter's checkpoint."
        raise InputError("--drafter", given=job.drafter, allowed="a directory", fix=fix)
    if job.model is not None:
        tree["policy"] = {**tree.get("policy", {}), "model": job.model}
    if job.method is not None or job.drafter is not None:
        method = job.method or "draft_model"
        if method != "ngram" and job.drafter is None:
            fix = "Add --drafter, or use --method ngram."
            raise ConfigError("--method", given=method, allowed="ngram, or a method with --drafter", fix=fix)
        speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": DEFAULT_NUM_DRAFT_TOKENS}
        if job.drafter is not None:
            speculative["model"] = job.drafter
        else:
            speculative |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
        tree["drafter"] = {"speculative_config": speculative}
    return parse_config(tree)


def _print_line(result: CheckResult) -> None:
    print(f"{result.verdict:8} {result.check:20} {result.case}: {result.statistic}", flush=True)


def _print_table(results: Sequence[CheckResult], checks: Sequence[Check], seconds: float) -> None:
    rows = [
        (
            result.check.value,
            result.case,
            result.verdict.value if result.verdict is not Verdict.FAILED else "FAILED",
            result.statistic,
            result.threshold,
            f"{result.false_alarm_rate:.0e}" if result.false_alarm_rate else "0",
        )
        for result in results
    ]
    headers = ("check", "case", "verdict", "statistic", "must keep to", "false alarms")
    print_rows(f"rlspec audit, {provenance.now()}, {provenance.hardware()}", headers, rows)
    for result in results:
        if result.verdict in (Verdict.FAILED, Verdict.SKIPPED):
            print(
                f"{result.verdict}: {result.check}, {result.case}: {result.detail.rstrip('.')}. {result.fix}"
            )
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in Verdict}
    rate = sum(result.false_alarm_rate for result in results)
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    if counts[Verdict.REFUSED]:
        print("refused: rejected by name before anything is drawn, which is safe; --out has each reason")
    missing = [check.value for check in Check if check not in checks]
    if missing:
        print(f"NOT run: {', '.join(missing)}")
    chance = f"at most {rate:.0e} of such audits" if rate else "no such audit"
    print(f"a correct engine fails {chance}; {seconds:.0f} s")


def _write(
    job: AuditJob, subject: str, results: Sequence[CheckResult], checks: Sequence[Check], seconds: float
) -> None:
    assert job.out is not None
    tree = {
        "subject": subject,
        "mode": "full" if job.is_full else "quick",
        "seed": job.seed,
        "seconds": seconds,
        "checks_run": [check.value for check in checks],
        "num_checks": len(results),
        **{f"num_{verdict.value}": sum(r.verdict is verdict for r in results) for verdict in Verdict},
        "command": provenance.command(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "date": provenance.now(),
        "checks": [result.to_dict() for result in results],
    }
    write_text(job.out, json.dumps(tree, indent=1) + "\n")
    print(job.out)
