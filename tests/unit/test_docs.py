"""What the docs say of measurements is what the result files hold."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
AUDIT, DEFECTS = RESULTS / "audit.json", RESULTS / "audit_defects.json"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    pytest.importorskip("vllm")
    spec = importlib.util.spec_from_file_location("benchmark_audit", ROOT / "benchmarks" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_defects_is_that_of_the_result_file(benchmark: ModuleType) -> None:
    defects = json.loads(DEFECTS.read_text())["raw"]
    page = (ROOT / "docs" / "correctness.md").read_text()
    assert benchmark.TABLE_BEGIN + benchmark.defects_table(defects) + benchmark.TABLE_END in page
    assert set(defects) == {patch.name for patch in benchmark.PATCHES}
    for name, checks in defects.items():
        assert sum(checks.values()) > 0, name


def test_the_patched_engine_passes() -> None:
    summary = json.loads(AUDIT.read_text())["summary"]
    assert (summary["num_failed"], summary["policy_num_failed"], summary["num_repeats_failed"]) == (0, 0, 0)
    assert summary["num_repeats"] == 20
    assert summary["unpatched_num_failed"] > 0
    assert summary["quick_seconds"] < 180


def test_the_page_tells_what_was_measured() -> None:
    summary = json.loads(AUDIT.read_text())["summary"]
    page = (ROOT / "docs" / "correctness.md").read_text()
    rows = [
        f"| quick, tiny policy | {summary['num_checks']} | 0 | {summary['quick_seconds']:.0f} |",
        f"| full, tiny policy | {summary['num_checks']} | 0 | {summary['full_seconds']:,.0f} |",
        f" | {summary['policy_num_checks']} | 0 | {summary['policy_full_seconds']:.0f} |",
        f" | {summary['unpatched_num_failed']} | |",
    ]
    assert [row for row in rows if row not in page] == []
