"""The quick audit on a GPU, with synchronous and asynchronous scheduling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlspec.audit.verdicts import Check, failed_checks
from rlspec.config import parse_config
from rollout.audit_runs.run import run_audit
from rollout.audit_runs.subjects import tiny_subjects

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
    ),
]

CHECKS = set(Check) - {Check.WEIGHTS}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_quick_audit(tmp_path: Path, async_scheduling: bool) -> None:
    """Distribution at its stated false-alarm rate, 1 in 1,000 audits; the rest is exact."""
    config = parse_config({"engine": {"vllm_args": {"async_scheduling": async_scheduling}}})
    subjects = tiny_subjects(tmp_path, 0, config)
    results = run_audit(subjects[:1], CHECKS, seed=0, is_full=False, on_result=print)
    assert failed_checks(results) == []
