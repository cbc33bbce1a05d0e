"""Owns engine steps on disk: steps.jsonl, a header, then one JSON array a step, events in place.

    {"format": "rlspec-steps-1", "columns": ["step_index", ...], "command": ..., "versions": {...}, ...}
    [0, 10.5, 0.25, ...]                                           StepFacts.as_row
    {"event": "floor_broken", "step_index": 0, "text": "..."}      what happened in the step above

Calls follow each other in a file; `step_index` begins again at 0 with each. A killed run leaves at most one
torn line, the last.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from rlspec import provenance
from rlspec.errors import InputError
from rlspec.rollout_files import append_text, open_alone
from rlspec.types import Event, EventKind, StepFacts

logger = logging.getLogger("rlspec.step_files")

FORMAT = "rlspec-steps-1"
STEPS = "steps.jsonl"
"""What the file is called: this, or a run's name and `.steps.jsonl`."""

_COLUMNS = {field.name: str(field.type) for field in fields(StepFacts)}
_HEADER_START = b'{"format": "rlspec-steps-'
"""How every steps file begins, whatever its version."""

Record = StepFacts | Event


@dataclass(frozen=True, slots=True)
class StepFile:
    """What a steps file holds.

    Attributes:
        records: Steps and events in the order of the file.
        command, date, hardware, versions: Where the first run that wrote to it came from.
    """

    records: tuple[Record, ...]
    command: str
    date: str
    hardware: str
    versions: dict[str, str]

    @property
    def steps(self) -> list[StepFacts]:
        """The steps, of one call after the other."""
        return [record for record in self.records if isinstance(record, StepFacts)]

    @property
    def events(self) -> list[Event]:
        """The events."""
        return [record for record in self.records if isinstance(record, Event)]


class StepWriter:
    """Appends steps and events; what was written stays even when the process is killed.

    Args:
        path: The file. Its folder is made.
        resume: Continue the file of an earlier run; without it an earlier steps file is replaced.

    Raises:
        InputError: The file is no steps file (it is left as it is), has other columns and is to be continued,
            or cannot be written.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._file = open_alone(self.path)
        try:
            if not self._take_over(resume):
                append_text(self._file, self.path, f"{json.dumps(_header())}\n")
        except InputError:
            self.close()
            raise

    def write(self, steps: Sequence[StepFacts], events: Sequence[Event] = ()) -> None:
        """Append steps, and events after the steps they happened in.

        Raises:
            InputError: The disk is full or the file is gone; what was written before is kept.
        """
        if steps or events:
            lines = (f"{_to_line(record)}\n" for record in _in_place(steps, events))
            append_text(self._file, self.path, "".join(lines))

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            # The buffer that `write` could not empty; that call has raised already.
            logger.warning("closing %s: %s", self.path, error.strerror)

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self, resume: bool) -> int:
        """Make room for what is appended; returns how many bytes of the file are kept."""
        size = self.path.stat().st_size
        if not size:
            return 0
        text = self.path.read_bytes()
        if not text.startswith(_HEADER_START) and not _HEADER_START.startswith(text):
            fix = "Name another --out; the file is left as it is."
            raise InputError(
                "--out", given=str(self.path), allowed="no file, or one of engine steps", fix=fix
            )
        num_bytes = text.rfind(b"\n") + 1 if resume else 0
        if num_bytes:
            _read_header(self.path, text.splitlines()[0])
            if num_bytes < size:
                logger.warning("%s: cut off a step that was not finished", self.path)
        os.truncate(self.path, num_bytes)
        return num_bytes


def read_steps(path: str | Path) -> tuple[list[StepFacts], list[Event]]:
    """All steps and all events of a file.

    Raises:
        InputError: As `read_step_file`.
    """
    file = read_step_file(path)
    return file.steps, file.events


def read_step_file(path: str | Path) -> StepFile:
    """A file of steps; a torn last line is left out with a warning.

    Raises:
        InputError: The file cannot be read, is no steps file, or is damaged; it names the line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        fix = f"{error.strerror}."
        raise InputError("steps", given=str(path), allowed="a readable steps file", fix=fix) from error
    if lines and not lines[-1].endswith(b"\n"):
        logger.warning("%s: left out line %d, which was not finished", path, len(lines))
        lines.pop()
    if not lines:
        fix = "The run ended before its first step, or this is no steps file."
        raise InputError(str(path), given="no whole line", allowed="a steps file", fix=fix)
    header = _read_header(path, lines[0])
    return StepFile(
        records=tuple(_records(path, lines[1:])),
        **{name: str(header.get(name, "unknown")) for name in ("command", "date", "hardware")},
        versions=_versions(header.get("versions")),
    )


def _header() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "columns": list(_COLUMNS),
        "command": provenance.command(),
        "date": provenance.now(),
        "hardware": provenance.hardware(),
        "versions": provenance.versions(),
    }


def _in_place(steps: Sequence[StepFacts], events: Sequence[Event]) -> Iterator[Record]:
    """Each event after its step, or before the first later one."""
    waiting = sorted(events, key=lambda event: event.step_index, reverse=True)
    for facts in steps:
        while waiting and waiting[-1].step_index < facts.step_index:
            yield waiting.pop()
        yield facts
        while waiting and waiting[-1].step_index == facts.step_index:
            yield waiting.pop()
    yield from reversed(waiting)


def _to_line(record: Record) -> str:
    if isinstance(record, StepFacts):
        return json.dumps(record.as_row(), separators=(",", ":"))
    return json.dumps({"event": record.kind, "step_index": record.step_index, "text": record.text})


def _records(path: Path, lines: Sequence[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=2):  # after the header
        try:
            yield _from_line(line)
        except (TypeError, KeyError, ValueError) as error:  # JSON and UTF-8 errors are ValueErrors
            where = f"{path}, line {number}"
            fix = "The file is damaged there; remove the line, or draw the run again."
            raise InputError(where, given=line[:200], allowed=f"a step ({error})", fix=fix) from error


def _from_line(line: bytes) -> Record:
    value = json.loads(line)
    if isinstance(value, dict):
        event = Event(EventKind(value["event"]), value["step_index"], value["text"])
        if not _is_count(event.step_index) or not isinstance(event.text, str):
            raise ValueError("an event has a step_index and a text")
        return event
    if not isinstance(value, list):
        raise ValueError("neither a row nor an event")
    facts = StepFacts.from_row(value)
    for name, kind in _COLUMNS.items():
        if not _ACCEPTS.get(kind, _is_anything)(getattr(facts, name)):
            raise ValueError(f"{name} is no {kind}")
        if kind.startswith("tuple") and len(getattr(facts, name)) != facts.batch_size:
            raise ValueError(f"{name} has not one entry a request")
    return facts


def _read_header(path: Path, line: bytes) -> dict[str, Any]:
    where = f"{path}, line 1"
    try:
        header = json.loads(line)
    except ValueError as error:
        fix = "Name the steps.jsonl of a run."
        raise InputError(where, given=line[:200], allowed="a header of steps", fix=fix) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        given = header.get("format", "no format") if isinstance(header, dict) else line[:200]
        fix = "Name the steps.jsonl of a run of this version of rlspec."
        raise InputError(where, given=given, allowed=FORMAT, fix=fix)
    if header.get("columns") != list(_COLUMNS):
        fix = f"Use the rlspec that wrote it: {header.get('versions')}."
        raise InputError(where, given=header.get("columns"), allowed="the columns of StepFacts", fix=fix)
    return header


def _versions(value: Any) -> dict[str, str]:
    return {str(name): str(version) for name, version in value.items()} if isinstance(value, dict) else {}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_anything(value: Any) -> bool:
    return True  # `Reason` has been checked when the facts were made.


_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "int": _is_count,
    "float": _is_number,
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(map(_is_count, value)),
    "tuple[str, ...]": lambda value: (
        isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    ),
}
"""By the declared type of a field of `StepFacts`."""
