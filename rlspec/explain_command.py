"""Owns `rlspec explain`: a steps file in, a timeline, a summary and a page out.

steps.jsonl ─► read ─► timeline, summary ─► terminal, explain.html, JSON
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlspec.console import print_rows
from rlspec.errors import InputError
from rlspec.explain_page import write_explain_page
from rlspec.explanation import (
    REASON_HEADERS,
    TIMELINE_HEADERS,
    Explanation,
    explain,
    reason_rows,
    timeline_rows,
)
from rlspec.rollout_files import write_text
from rlspec.step_files import STEPS, read_step_file
from rlspec.timeline import MAX_ROWS, Row, Stretch, timeline


@dataclass(frozen=True)
class ExplainJob:
    """What `rlspec explain` was asked to do.

    Attributes:
        run: A run's folder, or its steps file.
        out: Where the page goes; None is explain.html beside the steps file.
        rows: Stretches shown at most; None is `MAX_ROWS`.
        json: Where summary and timeline go as JSON.
    """

    run: Path
    out: Path | None = None
    rows: int | None = None
    json: Path | None = None


def run_explain(job: ExplainJob) -> None:
    """Print the timeline and the summary of a run, write its page.

    Raises:
        RlspecError: Something given is not accepted.
    """
    max_rows = MAX_ROWS if job.rows is None else job.rows
    if max_rows < 1:
        raise InputError("--rows", given=max_rows, allowed="at least 1", fix="Ask for more rows.")
    path = find_steps_file(job.run)
    out = job.out or path.with_name(f"{path.name.removesuffix('.jsonl').removesuffix('steps')}explain.html")
    _check_outputs(path, out, job.json)
    file = read_step_file(path)
    if not file.steps:
        fix = "The run ended before its first step."
        raise InputError(str(path), given="no step", allowed="at least one step", fix=fix)
    explanation = explain(file)
    rows = timeline(file.records, max_rows)
    print_rows(f"rlspec explain {path}", TIMELINE_HEADERS, timeline_rows(rows))
    print_rows("Why K", REASON_HEADERS, reason_rows(explanation))
    for line in explanation.lines():
        print(line)
    write_explain_page(out, file=file, explanation=explanation, rows=rows, name=str(path))
    print(out)
    if job.json is not None:
        write_text(job.json, _to_json(path, explanation, rows))
        print(job.json)


def find_steps_file(run: Path) -> Path:
    """The steps file of a run: the path itself, or the one in that folder.

    Raises:
        InputError: There is none, or there are several.
    """
    if not run.is_dir():
        return run
    found = sorted(path for path in run.iterdir() if path.name == STEPS or path.name.endswith(f".{STEPS}"))
    if len(found) == 1:
        return found[0]
    if found:
        fix = f"Name one of {', '.join(path.name for path in found)}."
        raise InputError("RUN", given=f"{run}, with {len(found)} runs", allowed="one run", fix=fix)
    allowed = f"a folder with {STEPS} or NAME.{STEPS}, or that file"
    fix = "Name the folder of a run."
    raise InputError("RUN", given=f"{run}, without a steps file", allowed=allowed, fix=fix)


def _check_outputs(path: Path, out: Path, json_path: Path | None) -> None:
    """Refuse to write over the steps, over each other, or onto a folder."""
    taken = {path.resolve()}
    for field, output in (("--out", out), ("--json", json_path)):
        if output is None:
            continue
        if output.is_dir() or output.resolve() in taken:
            allowed = "a file of its own"
            raise InputError(field, given=str(output), allowed=allowed, fix="Name another file.")
        taken.add(output.resolve())


def _to_json(path: Path, explanation: Explanation, rows: Sequence[Row]) -> str:
    tree = {
        "steps_file": str(path),
        "summary": explanation.to_dict(),
        "timeline": [
            {"row": "stretch" if isinstance(row, Stretch) else "event", **asdict(row)} for row in rows
        ],
    }
    return json.dumps(tree, indent=1) + "\n"
