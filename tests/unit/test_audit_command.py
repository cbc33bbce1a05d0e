"""`rlspec audit`: what it refuses before an engine starts, and how failures are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec.audit.verdicts import FIXES, Check, CheckResult, Verdict, failed_checks
from rlspec.audit_command import AuditJob, parse_checks, run_audit_job
from rlspec.cli import main
from rlspec.config import Config
from rlspec.errors import ConfigError, InputError


def result(check: Check, verdict: Verdict) -> CheckResult:
    return CheckResult(check, "case", verdict, "p = 0.5", "p > 0.1", 0.1, "detail")


def test_names_of_checks() -> None:
    assert parse_checks(None) == list(Check)
    assert parse_checks(" logprobs,distribution ") == [Check.DISTRIBUTION, Check.LOGPROBS]
    for given in ("logprob", ",", "all"):
        with pytest.raises(InputError, match="--checks"):
            parse_checks(given)
    with pytest.raises(InputError, match="Did you mean 'logprobs'"):
        parse_checks("logprob")


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_seeds_that_vllm_cannot_take(seed: int) -> None:
    with pytest.raises(InputError, match="--seed"):
        run_audit_job(Config(), AuditJob(seed=seed))


def test_out_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--out"):
        run_audit_job(Config(), AuditJob(out=tmp_path))


def test_a_method_needs_its_drafter() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="--drafter"):
        run_audit_job(Config(), AuditJob(model="embedded", method="eagle3"))


def test_exit_code_of_a_refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlspec.cli.restart_with_openmp", lambda: None)
    assert main(["audit", "--checks", "everything"]) == 2
    assert "--checks" in capsys.readouterr().err


def test_failures_say_what_to_do_and_others_do_not() -> None:
    results = [result(Check.LOGPROBS, Verdict.FAILED), result(Check.WEIGHTS, Verdict.REFUSED)]
    assert failed_checks(results) == [Check.LOGPROBS]
    assert [r.fix for r in results] == [FIXES[Check.LOGPROBS], ""]
    assert set(FIXES) == set(Check)
    assert results[0].to_dict()["verdict"] == "failed"
