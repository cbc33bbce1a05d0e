"""Owns the prompts: reading them from callers and JSONL files, and refusing bad ones by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlspec.config import change_sampling
from rlspec.config_sampling import SamplingConfig
from rlspec.errors import ConfigError, InputError, nearest
from rlspec.types import Prompt

PromptLike = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, object]] | Prompt
"""What a caller may pass: text, token ids (a list or a numpy array), chat messages, or a `Prompt`."""

FORMS: Mapping[str, str] = {"prompt": "text", "messages": "messages", "prompt_token_ids": "token_ids"}
"""The keys of a JSONL line that hold the prompt, and the field of `Prompt` that each fills."""

OWN_KEYS = frozenset({*FORMS, "group_id", "sampling"})
"""The keys of a JSONL line that are not carried to the rollouts as the caller's own."""

ONE_FORM = (
    "exactly one of prompt (a string), messages (a list of {role, content}), prompt_token_ids (a list of ids)"
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A prompt that is not accepted: where it stood, what was given, why."""

    where: str
    given: object
    error: InputError


def as_prompt(value: PromptLike, index: int) -> Prompt:
    """A caller's prompt with a group id; the position in the call where it has none.

    Raises:
        InputError: It is none of the accepted forms.
    """
    where = f"prompts[{index}]"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Prompt):
        prompt = value
    elif isinstance(value, str):
        prompt = Prompt(text=value)
    elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
        prompt = Prompt(messages=tuple(value))  # type: ignore[arg-type]
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        prompt = Prompt(token_ids=tuple(value))  # type: ignore[arg-type]
    else:
        raise InputError(
            where, given=value, allowed="a string, token ids, chat messages or a Prompt", fix=_FIX
        )
    check_form(prompt, where)
    check_sampling_changes(prompt.sampling, where)
    group_id = index if prompt.group_id is None else prompt.group_id
    if not isinstance(group_id, str | int):
        fix = "Leave it out for the position in the call."
        raise InputError(f"{where}.group_id", given=group_id, allowed="a string", fix=fix)
    return replace(prompt, group_id=str(group_id))


def as_prompts(values: Sequence[PromptLike]) -> list[Prompt]:
    """The prompts of a call, each with a group id of its own.

    Raises:
        InputError: One is not accepted, or two have the same group id.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        fix = "Put it in a list: [prompt]."
        raise InputError("prompts", given=values, allowed="a sequence of prompts", fix=fix)
    prompts = [as_prompt(value, index) for index, value in enumerate(values)]
    first: dict[str | None, int] = {}
    for index, prompt in enumerate(prompts):
        if first.setdefault(prompt.group_id, index) != index:
            allowed = f"a group_id of its own (prompts[{first[prompt.group_id]}] has it too)"
            fix = "Rename one, or leave group_id out."
            raise InputError(f"prompts[{index}].group_id", given=prompt.group_id, allowed=allowed, fix=fix)
    return prompts


def read_prompts(path: str | Path) -> tuple[list[Prompt], list[Rejected]]:
    """The prompts of a JSONL file and the lines that are not accepted, both in order.

    A line is an object with one of `prompt`, `messages` or `prompt_token_ids`; `group_id` names it (the
    line's number where it has none); `sampling` changes parameters for it; every other key is carried to the
    rollouts.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        allowed = "a readable JSONL file"
        raise InputError("--prompts", given=str(path), allowed=allowed, fix=f"{error.strerror}.") from error
    prompts: list[Prompt] = []
    rejected: list[Rejected] = []
    group_ids: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            prompt = _parse_line(line, where, str(number))
            _check_unique(prompt, where, number, group_ids)
        except InputError as error:
            rejected.append(Rejected(where, line.decode("utf-8", errors="replace"), error))
        else:
            prompts.append(prompt)
    return prompts, rejected


def check_form(prompt: Prompt, where: str) -> None:
    """Check that exactly one form is given, that it is not empty and has the right types.

    Raises:
        InputError: It has not.
    """
    given = {key: getattr(prompt, name) for key, name in FORMS.items() if getattr(prompt, name) is not None}
    if len(given) != 1:
        raise InputError(where, given=sorted(given) or "none of them", allowed=ONE_FORM, fix=_FIX)
    key, value = next(iter(given.items()))
    field = f"{where}: {key}"
    if not isinstance(value, str if key == "prompt" else list | tuple):
        raise InputError(field, given=value, allowed=ONE_FORM, fix=_FIX)
    if not value:
        raise InputError(field, given=value, allowed="at least one token", fix="Remove the line or fill it.")
    if key == "prompt_token_ids":
        bad = next((item for item in value if not _is_token_id(item)), None)
        if bad is not None:
            raise InputError(field, given=bad, allowed="token ids: integers from 0", fix=_FIX)
    if key == "messages":
        bad = next((item for item in value if not _is_message(item)), None)
        if bad is not None:
            raise InputError(field, given=bad, allowed="objects with string `role` and `content`", fix=_FIX)


def check_sampling_changes(changes: object, where: str) -> None:
    """Check a prompt's own sampling parameters: their names and values, and that `n` is not among them.

    Raises:
        InputError: They are not accepted.
    """
    if not isinstance(changes, Mapping):
        allowed = "a mapping of vLLM's sampling parameters"
        raise InputError(f"{where}: sampling", given=changes, allowed=allowed, fix=_FIX)
    if "n" in changes:
        allowed = "no n: each group of a call has the same number of samples"
        fix = "Remove it, and set n for the call."
        raise InputError(f"{where}: sampling.n", given=changes["n"], allowed=allowed, fix=fix)
    try:
        change_sampling(SamplingConfig(), changes)
    except ConfigError as error:
        field = f"{where}: {error.field}"
        raise InputError(field, given=error.given, allowed=error.allowed, fix=error.fix) from error


def check_token_ids(token_ids: Sequence[int], where: str, *, max_model_len: int, vocab_size: int) -> None:
    """Check that the prompt leaves room for one new token and that the policy knows its ids.

    Raises:
        InputError: It is empty, too long, or has an id outside the vocabulary.
    """
    if not token_ids:
        raise InputError(where, given="no tokens", allowed="at least one token", fix="Remove it or fill it.")
    if len(token_ids) >= max_model_len:
        raise InputError(
            where,
            given=f"{len(token_ids)} prompt tokens",
            allowed=f"at most {max_model_len - 1}, so that a new token fits (max_model_len {max_model_len})",
            fix="Shorten the prompt or raise engine.vllm_args.max_model_len.",
        )
    largest = max(token_ids)
    if largest >= vocab_size:
        allowed = f"ids from 0 to {vocab_size - 1}, the policy's vocabulary"
        raise InputError(where, given=f"token id {largest}", allowed=allowed, fix="Tokenise for this policy.")


def first_error(rejected: Sequence[Rejected]) -> InputError:
    """The first rejection as an error that also tells how many there are."""
    error = rejected[0].error
    if len(rejected) == 1:
        return error
    more = f"{error.fix} ({len(rejected) - 1} more prompts are not accepted.)"
    return type(error)(error.field, given=error.given, allowed=error.allowed, fix=more)


_FIX = "Correct it, or skip bad lines with --skip-bad."


def _parse_line(line: bytes, where: str, default_group_id: str) -> Prompt:
    try:
        record = json.loads(
            line, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
        given = line.decode("utf-8", errors="replace")
        raise InputError(where, given=given, allowed=f"one JSON object ({error})", fix=_FIX) from error
    if not isinstance(record, dict):
        raise InputError(where, given=record, allowed="one JSON object", fix=_FIX)
    forms = {name: record[key] for key, name in FORMS.items() if record.get(key) is not None}
    if not forms:
        raise InputError(where, given=sorted(record), allowed=ONE_FORM, fix=f"{_FIX} {_guess(record)}")
    group_id = record.get("group_id", default_group_id)
    if not isinstance(group_id, str | int) or isinstance(group_id, bool) or group_id == "":
        allowed = "a string that is not empty, or an integer"
        raise InputError(f"{where}: group_id", given=group_id, allowed=allowed, fix=_FIX)
    data = {key: value for key, value in record.items() if key not in OWN_KEYS}
    sampling = record.get("sampling", {})
    prompt = Prompt(**_as_tuples(forms), group_id=str(group_id), data=data, sampling=sampling)
    check_form(prompt, where)
    check_sampling_changes(sampling, where)
    return prompt


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is given twice")
    return record


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no finite number")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _as_tuples(forms: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in forms.items()}


def _guess(keys: Iterable[str]) -> str:
    return next((f"{key!r}: {nearest(key, FORMS)}" for key in keys if "mean" in nearest(key, FORMS)), "")


def _check_unique(prompt: Prompt, where: str, number: int, group_ids: dict[str, int]) -> None:
    group_id = str(prompt.group_id)
    if group_id in group_ids:
        allowed = f"a group_id of its own (line {group_ids[group_id]} has it too)"
        raise InputError(f"{where}: group_id", given=group_id, allowed=allowed, fix=_FIX)
    group_ids[group_id] = number


def _is_token_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _is_message(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str | list)
    )
