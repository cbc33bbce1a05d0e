"""The audit as its user runs it: one process, its table, its JSON and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.vllm_support import DISABLE_VARIABLE

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 500


def audit(out: Path, *arguments: str, disabled: str = "") -> tuple[int, dict[str, Any], str]:
    program = [sys.executable, "-m", "rlspec.cli", "audit", *arguments, "--out", str(out)]
    environment = {**os.environ, DISABLE_VARIABLE: disabled}
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_a_sound_engine_passes(tmp_path: Path) -> None:
    code, found, shown = audit(tmp_path / "audit.json", "--checks", "patches,accounting,acceptance")
    assert code == 0
    assert (found["num_failed"], found["mode"], found["subject"]) == (0, "quick", "tiny")
    assert {check["check"] for check in found["checks"]} == {"patches", "accounting", "acceptance"}
    assert {"seed", "versions", "hardware", "command"} <= set(found)
    assert "0 failed" in shown


def test_a_defect_fails_the_audit_and_says_what_to_do(tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    code, found, shown = audit(out, "--checks", "patches,acceptance", disabled="expand_kernel")
    assert code == 1
    failed = {check["check"] for check in found["checks"] if check["verdict"] == "failed"}
    assert failed == {"patches", "acceptance"}
    assert all(check["fix"] for check in found["checks"] if check["verdict"] == "failed")
    assert "FAILED" in shown


@pytest.mark.slow
def test_the_whole_quick_audit_passes(tmp_path: Path) -> None:
    code, found, _ = audit(tmp_path / "audit.json", "--seed", "77")
    assert (code, found["num_failed"]) == (0, 0)
    assert found["num_checks"] > 100
