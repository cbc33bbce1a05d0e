"""Steps on disk: rows and events read back, a torn end is left out, damage is named by its line."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rlspec.errors import InputError
from rlspec.step_files import StepWriter, read_step_file, read_steps
from rlspec.types import Event, EventKind, Reason, StepFacts
from tests.unit.test_types import FACTS

STEPS = [replace(FACTS, step_index=index, reason=Reason.PAYS) for index in range(3)]
EVENT = Event(EventKind.FLOOR_BROKEN, step_index=1, text="0.9 of plain, \u2192 off\n")


def write(
    path: Path, steps: list[StepFacts], events: list[Event] | None = None, resume: bool = False
) -> Path:
    with StepWriter(path, resume=resume) as writer:
        writer.write(steps, events or [])
    return path


def test_steps_and_events_read_back_in_place(tmp_path: Path) -> None:
    late = Event(EventKind.DRAFTER_COLLAPSED, step_index=9, text="later")
    path = write(tmp_path / "deep" / "steps.jsonl", STEPS, [late, EVENT])
    assert read_steps(path) == (STEPS, [EVENT, late])
    file = read_step_file(path)
    assert file.records == (STEPS[0], STEPS[1], EVENT, STEPS[2], late)
    assert file.versions["python"]


def test_an_event_whose_step_was_written_before_comes_first(tmp_path: Path) -> None:
    with StepWriter(tmp_path / "s") as writer:
        writer.write(STEPS[:2])
        writer.write(STEPS[2:], [EVENT])
    assert read_step_file(tmp_path / "s").records == (*STEPS[:2], EVENT, STEPS[2])


def test_what_was_written_is_there_before_close(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / "s")
    writer.write(STEPS[:1])
    assert read_steps(tmp_path / "s") == (STEPS[:1], [])
    with pytest.raises(InputError, match="another run"):
        StepWriter(tmp_path / "s", resume=True)
    writer.close()


def test_resume_appends_and_a_new_run_replaces(tmp_path: Path) -> None:
    path = write(tmp_path / "s", STEPS)
    write(path, STEPS[:1], resume=True)
    assert read_steps(path)[0] == [*STEPS, STEPS[0]]
    write(path, STEPS[:1])
    assert read_steps(path)[0] == STEPS[:1]


def test_a_torn_last_line_is_left_out_and_cut_on_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "s", STEPS)
    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING, "rlspec"):
        for num_bytes in range(whole.index(b"\n") + 1, len(whole)):
            path.write_bytes(whole[:num_bytes])
            assert read_steps(path)[0] == STEPS[: whole[:num_bytes].count(b"\n") - 1]
    assert "line 4, which was not finished" in caplog.text
    write(path, STEPS[2:], resume=True)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("text", ["", '{"form', '{"format": "rlspec-steps-1", "colu'])
def test_a_run_killed_in_its_header_is_begun_again(tmp_path: Path, text: str, resume: bool) -> None:
    (tmp_path / "s").write_text(text)
    assert read_steps(write(tmp_path / "s", STEPS, resume=resume))[0] == STEPS


def damaged_row(**changes: object) -> str:
    values = dict(zip(StepFacts.__slots__, STEPS[1].as_row(), strict=True))
    return json.dumps(list({**values, **changes}.values()))


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "7",
        "[1, 2]",
        '{"event": "floor_broken"}',
        '{"event": "party", "step_index": 1, "text": ""}',
        '{"event": "floor_broken", "step_index": "1", "text": ""}',
        "[" + "\ud7ff",
        damaged_row(reason="mood"),
        damaged_row(step_seconds="long"),
        damaged_row(step_seconds=float("nan")),
        damaged_row(num_draft_tokens=True),
        damaged_row(num_draft_tokens=-1),
        damaged_row(num_drafted=[1]),
        damaged_row(num_drafted=[1, None]),
        damaged_row(request_ids="ab"),
    ],
)
def test_damage_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "s", STEPS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    with pytest.raises(InputError, match=r"/s, line 3"):
        read_steps(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{}", "rlspec-steps-1"),
        ("[]", "rlspec-steps-1"),
        ("x", "a header"),
        ('{"format": "rlspec-steps-0"}', "rlspec-steps-1"),
        ('{"format": "rlspec-steps-1", "columns": ["k"], "versions": {"rlspec": "9"}}', "rlspec.*9"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, header: str, message: str) -> None:
    (tmp_path / "s").write_text(f"{header}\n")
    with pytest.raises(InputError, match=rf"line 1.*{message}"):
        read_steps(tmp_path / "s")
    with pytest.raises(InputError):
        StepWriter(tmp_path / "s", resume=True)
    assert (tmp_path / "s").read_text() == f"{header}\n"


def test_a_file_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").write_text('{"prompt": "x"}')
    with pytest.raises(InputError, match="left as it is"):
        StepWriter(tmp_path / "s")
    assert (tmp_path / "s").read_text() == '{"prompt": "x"}'


@pytest.mark.parametrize("text", [None, "", "torn"])
def test_without_a_whole_line_there_is_nothing_to_read(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "s").write_text(text)
    with pytest.raises(InputError, match=r"No such file|no whole line"):
        read_steps(tmp_path / "s")


def test_full_disk_is_an_error_for_the_user() -> None:
    with pytest.raises(InputError, match="No space left"):
        StepWriter("/dev/full")
