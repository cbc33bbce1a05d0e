"""Runs the audit in every way the docs speak of: docs/results/audit.json and audit_defects.json.

    full      the tiny policy with every drafter, errors of 0.02 seen (more than half an hour)
    policy    the embedded policy, full
    quick     one quick audit, timed
    unpatched one quick audit with every patch of vLLM off
    repeats   20 quick audits with other seeds, all of which must pass
    defects   each patch off, each check in a process of its own: which check sees which defect

Parts run one after the other; `--parts` names some of them, results of others are kept in `--work`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlspec.audit.verdicts import Check
from rlspec.provenance import write_result
from rollout.vllm_patches import PATCHES
from rollout.vllm_support import DISABLE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "correctness.md"
TABLE_BEGIN, TABLE_END = "<!-- defects: written by benchmarks/audit.py -->\n", "<!-- end of defects -->"
NUM_REPEATS = 20
TIMEOUT_SECONDS = 3600


class Parts:
    """Runs audits as a user would and keeps what each one wrote."""

    def __init__(self, work: Path) -> None:
        self._work = work
        work.mkdir(parents=True, exist_ok=True)

    def audit(self, name: str, *arguments: str, disabled: str = "") -> dict[str, Any]:
        """The JSON of `rlspec audit`, run once; afterwards from the work folder."""
        out = self._work / f"{name}.json"
        if not out.exists():
            program = [sys.executable, "-m", "rlspec.cli", "audit", *arguments, "--out", str(out)]
            environment = {**os.environ, DISABLE_VARIABLE: disabled}
            done = subprocess.run(
                program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
            if not out.exists():  # the process itself ended badly: that is a finding, too
                tail = (done.stdout + done.stderr)[-2000:]
                out.write_text(json.dumps({"num_checks": 0, "num_failed": 1, "seconds": 0.0, "crash": tail}))
        found: dict[str, Any] = json.loads(out.read_text())
        print(
            f"{name}: {found['num_failed']} of {found['num_checks']} failed, {found['seconds']:.0f} s",
            flush=True,
        )
        return found

    def full(self) -> dict[str, Any]:
        return self.audit("full", "--full")

    def policy(self) -> dict[str, Any]:
        return self.audit("policy", "--full", "--model", "embedded")

    def quick(self) -> dict[str, Any]:
        return self.audit("quick")

    def unpatched(self) -> dict[str, Any]:
        return self.audit("unpatched", disabled="all")

    def repeats(self) -> dict[str, Any]:
        runs = [self.audit(f"seed_{seed}", "--seed", str(seed)) for seed in range(1, NUM_REPEATS + 1)]
        return {"seeds": [_figures(run) | {"seed": run.get("seed")} for run in runs]}

    def defects(self) -> dict[str, Any]:
        """Failed lines by patch that is off and check."""
        return {
            patch.name: {
                check.value: self.audit(
                    f"without_{patch.name}_{check}", "--checks", check, disabled=patch.name
                )["num_failed"]
                for check in Check
            }
            for patch in PATCHES
        }


def defects_table(defects: dict[str, dict[str, int]]) -> str:
    """Markdown: a row a defect, a column a check."""
    rows = [
        ["patch off", *(f"`{check}`" for check in Check)],
        ["---"] * (len(Check) + 1),
        *(
            [f"`{name}`", *(f"**{found[check]}**" if found[check] else "." for check in Check)]
            for name, found in defects.items()
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_table(page: Path, table: str) -> None:
    """Put the table between its two marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(TABLE_BEGIN)
    page.write_text(before + TABLE_BEGIN + table + TABLE_END + rest.partition(TABLE_END)[2], encoding="utf-8")


def _figures(audit: dict[str, Any]) -> dict[str, Any]:
    return {name: audit[name] for name in ("num_checks", "num_failed", "seconds")}


def write_audit(found: dict[str, Any]) -> None:
    """The audits of one subject each, in docs/results/audit.json."""
    seeds = found["repeats"]["seeds"]
    summary = {
        "num_checks": found["full"]["num_checks"],
        "num_failed": found["full"]["num_failed"],
        "unpatched_num_failed": found["unpatched"]["num_failed"],
        "quick_seconds": found["quick"]["seconds"],
        "full_seconds": found["full"]["seconds"],
        "policy_num_checks": found["policy"]["num_checks"],
        "policy_num_failed": found["policy"]["num_failed"],
        "policy_full_seconds": found["policy"]["seconds"],
        "num_repeats": len(seeds),
        "num_repeats_failed": sum(run["num_failed"] > 0 for run in seeds),
    }
    write_result(
        RESULTS / "audit.json", summary=summary, raw=found, command_line="python benchmarks/audit.py"
    )
    print(summary)


def write_defects(defects: dict[str, dict[str, int]]) -> None:
    """The table of defects, in docs/results/audit_defects.json and in the docs."""
    num_caught = sum(any(checks.values()) for checks in defects.values())
    summary = {"num_defects": len(defects), "num_caught": num_caught}
    command = "python benchmarks/audit.py --parts defects"
    write_result(RESULTS / "audit_defects.json", summary=summary, raw=defects, command_line=command)
    write_table(PAGE, defects_table(defects))
    print(summary)


def main() -> None:
    """Run the parts; write the results whose parts are all there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="full,policy,quick,unpatched,repeats,defects")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "audit")
    arguments = parser.parse_args()
    parts = Parts(arguments.work)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "full": parts.full,
        "policy": parts.policy,
        "quick": parts.quick,
        "unpatched": parts.unpatched,
        "repeats": parts.repeats,
        "defects": parts.defects,
    }
    found = {name: runs[name]() for name in arguments.parts.split(",")}
    defects = found.pop("defects", None)
    if defects is not None:
        write_defects(defects)
    if len(found) == len(runs) - 1:
        write_audit(found)


if __name__ == "__main__":
    main()
