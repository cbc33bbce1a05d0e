"""`rlspec explain` on a synthetic run, through the command line: table, summary, page, JSON, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rlspec.cli import EXIT_REFUSED, main
from rlspec.rollout_command import RolloutJob, _recorded
from rlspec.step_files import StepWriter, read_steps
from rlspec.types import Event, EventKind, Reason, StepFacts
from tests.unit.test_report import Tags
from tests.unit.test_rollout_files import ROLLOUT
from tests.unit.test_savings import PLAIN, SPECULATING

PLAIN_STEPS = [
    replace(
        PLAIN,
        step_index=index,
        started_seconds=index / 4,
        reason=Reason.PLAIN_IS_FASTER,
        num_waiting=4,
        predicted_seconds=0.0,
    )
    for index in range(20)
]
SPECULATING_STEPS = [
    replace(
        SPECULATING,
        step_index=index,
        started_seconds=index / 4,
        num_draft_tokens=6,
        reason=Reason.PAYS,
        expected_seconds=0.16,
        predicted_seconds=0.165,
    )
    for index in range(20, 50)
]
SYNTHETIC = PLAIN_STEPS + SPECULATING_STEPS
EVENT = Event(EventKind.DRAFTER_COLLAPSED, step_index=30, text="0.1 <b>of</b> 0.6 accepted")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with StepWriter(tmp_path / "run" / "a.steps.jsonl") as writer:
        writer.write(SYNTHETIC, [EVENT])
    return tmp_path / "run"


def words(text: str) -> str:
    """What a table wraps, in one line: borders and line ends left out."""
    return re.sub(r"[\s│┃]+", " ", text)


def test_a_run_is_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run)]) == 0
    out = capsys.readouterr().out
    assert "plain_is_faster" in out
    assert "pays" in out
    assert "6: 30" in out
    assert "0-19" in out
    assert "20-49" in out
    assert "50% of 180" in words(out)
    assert "50 steps in 6.90 s; 30 of them drafted or verified drafts (60%)" in out
    # 20 steps at 0.1 - 0.12 and 30 at 0.2 - 0.15 seconds.
    assert "saved against plain decoding, estimated: 1.10 s of 8.00 s (14%) in 50 steps" in out
    assert "median |predicted - actual| / actual 10.0%" in out
    assert "events: drafter_collapsed 1" in out
    assert (run / "a.explain.html").exists()


def test_losses_and_unknowns_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("lost", PLAIN_STEPS), ("none", [replace(PLAIN_STEPS[0], plain_seconds=0.0)])):
        with StepWriter(tmp_path / name / "steps.jsonl") as writer:
            writer.write(steps)
    assert main(["explain", str(tmp_path / "lost")]) == 0
    out = capsys.readouterr().out
    assert "lost against plain decoding, estimated: 0.40 s of 2.00 s (20%)" in out
    assert "step time predicted: for no step" in out
    assert "events: none" in out
    assert main(["explain", str(tmp_path / "none" / "steps.jsonl")]) == 0
    assert "saved against plain decoding: unknown; 1 steps (0.12 s) are not" in capsys.readouterr().out
    assert (tmp_path / "none" / "explain.html").exists()


def test_page_is_self_contained_and_escaped(run: Path, tmp_path: Path) -> None:
    assert main(["explain", str(run), "--out", str(tmp_path / "deep" / "page.html")]) == 0
    page = (tmp_path / "deep" / "page.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.names.count("svg") == 5
    assert not {"script", "link", "img", "b"} & set(tags.names)
    assert all(address.startswith("#") for address in tags.addresses)
    assert not re.search(r"url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "0.1 &lt;b&gt;of&lt;/b&gt; 0.6 accepted" in page
    assert "drafting is expected to pay" in page
    assert not list(run.glob("*.html"))


def test_json_has_summary_and_timeline(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "explained.json"
    assert main(["explain", str(run), "--json", str(path), "--rows", "1"]) == 0
    tree = json.loads(path.read_text())
    assert [row["row"] for row in tree["timeline"]] == ["stretch", "event"]
    assert tree["timeline"][0]["reason"] == "pays"
    assert tree["summary"]["savings"]["saved_seconds"] == pytest.approx(1.1)
    assert tree["summary"]["reasons"][0]["steps_by_k"] == {"6": 30}


def _no_steps_file(run: Path) -> list[str]:
    return ["explain", str(run.parent)]


def _two_runs(run: Path) -> list[str]:
    (run / "steps.jsonl").touch()
    return ["explain", str(run)]


def _no_such_run(run: Path) -> list[str]:
    return ["explain", str(run / "none.jsonl")]


def _no_rows(run: Path) -> list[str]:
    return ["explain", str(run), "--rows", "0"]


def _over_the_steps(run: Path) -> list[str]:
    return ["explain", str(run), "--out", str(run / "a.steps.jsonl")]


def _one_file_for_both(run: Path) -> list[str]:
    return ["explain", str(run), "--out", str(run / "x"), "--json", str(run / "x")]


def _no_step(run: Path) -> list[str]:
    with StepWriter(run / "a.steps.jsonl"):
        return ["explain", str(run)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_no_steps_file, "without a steps file"),
        (_two_runs, "Name one of a.steps.jsonl, steps.jsonl"),
        (_no_such_run, "No such file"),
        (_no_rows, "--rows: got 0"),
        (_over_the_steps, "--out"),
        (_one_file_for_both, "--json"),
        (_no_step, "no step"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: Callable[[Path], list[str]], message: str
) -> None:
    given = arguments(run)
    before = (run / "a.steps.jsonl").read_bytes()
    assert main(given) == EXIT_REFUSED
    assert message in capsys.readouterr().err
    assert (run / "a.steps.jsonl").read_bytes() == before


def test_a_run_records_its_steps_as_they_come_and_however_it_ends(tmp_path: Path) -> None:
    steps: list[StepFacts] = []
    path = RolloutJob(tmp_path / "p.jsonl", tmp_path / "out.jsonl").steps
    assert path == tmp_path / "out.steps.jsonl"

    def rollouts():  # type: ignore[no-untyped-def]
        for index in range(3):
            steps.append(SYNTHETIC[index])
            yield ROLLOUT

    with (
        suppress(KeyboardInterrupt),
        StepWriter(path) as writer,
        _recorded(rollouts(), steps, [], writer) as recorded,
    ):
        for index, _ in enumerate(recorded):
            assert read_steps(path)[0] == SYNTHETIC[: index + 1]
        steps.append(SYNTHETIC[3])
        raise KeyboardInterrupt
    assert read_steps(path)[0] == SYNTHETIC[:4]
