"""Owns rollouts on disk: one JSON line each, written a group at a time, resumed without repeating.

A group's lines are written in one piece and flushed, so a killed run leaves whole groups and at most one
torn group at the end; `open_for_resume` cuts that off.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any

from rlspec.errors import InputError
from rlspec.prompts import Rejected
from rlspec.types import FinishReason, PolicySpan, Rollout
from rlspec.whole_files import replace_file

logger = logging.getLogger("rlspec.rollout_files")


_ROLLOUTS = "a file of rollouts, the last one perhaps cut short"
_LINE_START = b'{"group_id": '
"""How every line begins: `group_id` is the first field of `Rollout`."""


def rollout_to_line(rollout: Rollout) -> str:
    """One JSON object without a line end; the fields of `Rollout` by name."""
    values = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    return json.dumps(values | {"policy_spans": [asdict(span) for span in rollout.policy_spans]})


def rollout_from_line(line: str | bytes) -> Rollout:
    """The rollout that `rollout_to_line` wrote."""
    values: dict[str, Any] = dict(json.loads(line))
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values["policy_spans"] = tuple(PolicySpan(**span) for span in values["policy_spans"])
    return Rollout(**{**values, "finish_reason": FinishReason(values["finish_reason"])})


class RolloutWriter:
    """Appends groups to a rollouts file; what was written stays even when the process is killed.

    Args:
        path: The file. Its folder is made.
        group_size: Samples a group (n).
        resume: Continue a file of an earlier run; without it a file that holds anything is refused.

    Raises:
        InputError: The file holds rollouts and `resume` is off, or it is no file of such groups; it is
            left as it is.
    """

    def __init__(self, path: str | Path, *, group_size: int, resume: bool = False) -> None:
        self.path = Path(path)
        self._group_size = group_size
        self.finished: dict[str, list[Rollout]] = {}
        self._file = open_alone(self.path)
        try:
            if self.path.stat().st_size:
                self._take_over(resume)
        except InputError:
            self._file.close()
            raise

    def write_group(self, rollouts: Sequence[Rollout]) -> None:
        """Append one finished group in one piece.

        Raises:
            InputError: The disk is full or the file is gone; groups written before are kept.
        """
        text = "".join(f"{rollout_to_line(rollout)}\n" for rollout in rollouts)
        append_text(self._file, self.path, text)

    def write_groups(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Append each group when its last sample is there; returns all rollouts as they came.

        Raises:
            InputError: As `write_group`.
        """
        done: list[Rollout] = []
        groups: defaultdict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            done.append(rollout)
            groups[rollout.group_id].append(rollout)
            if len(groups[rollout.group_id]) == self._group_size:
                group = groups.pop(rollout.group_id)
                self.write_group(sorted(group, key=lambda sample: sample.sample_index))
        return done

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            # The buffer that write_group could not empty; that call has raised already.
            logger.warning("closing %s: %s", self.path, error.strerror)

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self, resume: bool) -> None:
        if not resume:
            fix = "Continue it with --resume, or name another --out."
            raise InputError("--out", given=str(self.path), allowed="a new or empty file", fix=fix)
        self.finished, num_bytes = _whole_groups(self.path, self._group_size)
        torn = self.path.stat().st_size - num_bytes
        if torn and not _is_torn_rollout(self.path, num_bytes):
            fix = "Name another --out; the file is left as it is."
            raise InputError(
                "--out", given=f"{self.path}, which ends in something else", allowed=_ROLLOUTS, fix=fix
            )
        if torn:
            logger.warning("%s: cut off %d bytes of a group that was not finished", self.path, torn)
            os.truncate(self.path, num_bytes)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """All rollouts of a file.

    Raises:
        InputError: It cannot be read or is no rollouts file.
    """
    try:
        return [rollout for rollout, _ in _read_lines(Path(path))]
    except OSError as error:
        fix = f"{error.strerror}."
        raise InputError("rollouts", given=str(path), allowed="a readable rollouts file", fix=fix) from error


def check_resumable(
    finished: Mapping[str, Sequence[Rollout]], prompts: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the finished groups belong to these prompts.

    Args:
        finished: Groups found in the file.
        prompts: Token ids by group id.

    Raises:
        InputError: They do not; nothing has been changed.
    """
    fix = "Resume with the prompts, model and sampling of the first run, or name another --out."
    for group_id, group in finished.items():
        if group_id not in prompts:
            allowed = "groups of the prompts file"
            raise InputError("--resume", given=f"group {group_id} in --out", allowed=allowed, fix=fix)
        if group[0].prompt_token_ids != prompts[group_id]:
            raise InputError(
                f"group {group_id}",
                given="another prompt in --out",
                allowed="the same prompt tokens",
                fix=fix,
            )


def write_rejected(path: str | Path, rejected: Sequence[Rejected]) -> None:
    """Write the lines that were not accepted, each with its reason."""
    lines = (
        json.dumps({"where": item.where, "reason": str(item.error), "line": item.given}) for item in rejected
    )
    write_text(path, "".join(f"{line}\n" for line in lines))


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file in one step: readers see the old one or the new one.

    Raises:
        InputError: It cannot be written; an older file is left as it was.
    """
    try:
        replace_file(Path(path), text)
    except OSError as error:
        fix = f"{error.strerror}. Finished groups are kept; free space or name another --out."
        raise InputError("output", given=str(path), allowed="a file that can be written", fix=fix) from error


def open_alone(path: Path) -> BufferedWriter:
    """A file to append to that no other run writes; its folder is made.

    Raises:
        InputError: Another run writes it, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        fix = "Wait for that run, or name another --out."
        given = f"{path}, which another run is writing"
        raise InputError("--out", given=given, allowed="a file of this run alone", fix=fix) from error
    except OSError as error:
        file.close()
        raise _not_writable(path, error) from error
    return file


def append_text(file: BufferedWriter, path: Path, text: str) -> None:
    """Append whole lines in one piece and flush them.

    Raises:
        InputError: The disk is full or the file is gone; what was written before is kept.
    """
    try:
        file.write(text.encode())
        file.flush()
    except OSError as error:
        fix = f"{error.strerror}. Free space and continue with --resume; finished groups are kept."
        raise InputError("--out", given=str(path), allowed="room to write", fix=fix) from error


def _not_writable(path: Path, error: OSError) -> InputError:
    fix = f"{error.strerror}. Name another file."
    return InputError("--out", given=str(path), allowed="a file that can be written", fix=fix)


def _is_torn_rollout(path: Path, position: int) -> bool:
    """Whether what follows `position` begins as a rollout does."""
    with path.open("rb") as file:
        file.seek(position)
        start = file.read(len(_LINE_START))
    return _LINE_START.startswith(start)


def _whole_groups(path: Path, group_size: int) -> tuple[dict[str, list[Rollout]], int]:
    """The finished groups in order, and how many bytes of the file they take."""
    groups: dict[str, list[Rollout]] = {}
    ends: dict[str, int] = {}
    for rollout, end in _read_lines(path):
        groups.setdefault(rollout.group_id, []).append(rollout)
        ends[rollout.group_id] = end
    is_torn = len(groups) > 1 or max(ends.values(), default=0) < path.stat().st_size
    if groups and is_torn and len(groups[last := next(reversed(groups))]) < group_size:
        del groups[last], ends[last]  # The run was ended while it wrote this group.
    for group_id, group in groups.items():
        if len(group) != group_size:
            allowed = f"sampling.n = {group_size} samples in each group"
            fix = "Resume with the sampling of the first run, or name another --out."
            raise InputError(f"group {group_id}", given=f"{len(group)} samples", allowed=allowed, fix=fix)
    return groups, max(ends.values(), default=0)


def _read_lines(path: Path) -> Iterator[tuple[Rollout, int]]:
    """Each whole line's rollout and where the line ends, in bytes."""
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        try:
            rollout = rollout_from_line(line)
        except (TypeError, KeyError, ValueError) as error:  # JSON and UTF-8 errors are ValueErrors
            where = f"{path}, line {number}"
            fix = "Name another --out; the file is left as it is."
            raise InputError(where, given=line[:200], allowed=f"a rollout ({error})", fix=fix) from error
        yield rollout, end
