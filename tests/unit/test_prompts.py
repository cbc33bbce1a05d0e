"""Prompts: the three forms, and refusals that name file, line and key."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlspec.errors import InputError
from rlspec.prompts import as_prompts, check_token_ids, first_error, read_prompts
from rlspec.types import Prompt

GOOD = [
    '{"prompt": "2 + 2 ="}',
    '{"messages": [{"role": "user", "content": "hi"}], "group_id": "chat", "answer": 4}',
    '{"prompt_token_ids": [1, 2, 3]}',
]


def write(path: Path, *lines: str) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_good_lines_in_their_three_forms(tmp_path: Path) -> None:
    prompts, rejected = read_prompts(write(tmp_path, *GOOD))
    assert rejected == []
    assert [prompt.group_id for prompt in prompts] == ["1", "chat", "3"]
    assert prompts[0].text == "2 + 2 ="
    assert prompts[1].messages == ({"role": "user", "content": "hi"},)
    assert prompts[1].data == {"answer": 4}
    assert prompts[2].token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("line", "where", "hint"),
    [
        ("{not json", "line 2", "one JSON object"),
        ("[1, 2]", "line 2", "one JSON object"),
        ('{"promt": "x"}', "line 2", "'prompt'"),
        ("{}", "line 2", "exactly one of"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "line 2", "exactly one of"),
        ('{"prompt": ""}', "line 2: prompt", "at least one token"),
        ('{"prompt": 3}', "line 2: prompt", "a string"),
        ('{"prompt_token_ids": []}', "line 2: prompt_token_ids", "at least one token"),
        ('{"prompt_token_ids": [1, -1]}', "line 2: prompt_token_ids", "integers from 0"),
        ('{"prompt_token_ids": [1, 2.5]}', "line 2: prompt_token_ids", "integers from 0"),
        ('{"prompt_token_ids": [true]}', "line 2: prompt_token_ids", "integers from 0"),
        ('{"prompt_token_ids": "12"}', "line 2: prompt_token_ids", "list of ids"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages", "`content`"),
        ('{"messages": ["hi"]}', "line 2: messages", "`role`"),
        ('{"messages": []}', "line 2: messages", "at least one"),
        ('{"prompt": "x", "group_id": [1]}', "line 2: group_id", "not empty, or an integer"),
        ('{"prompt": "x", "group_id": ""}', "line 2: group_id", "not empty"),
        ('{"prompt": "x", "group_id": true}', "line 2: group_id", "an integer"),
        ('{"prompt": "x", "prompt": "y"}', "line 2", "given twice"),
        ('{"prompt": "x", "score": NaN}', "line 2", "NaN is no JSON"),
        ('{"prompt": "x", "score": 1e999}', "line 2", "1e999 is no finite number"),
        ("[" * 100_000, "line 2", "one JSON object"),
        ('{"prompt_token_ids": [1' + "0" * 5000 + "]}", "line 2", "one JSON object"),
        ('{"prompt": "x", "group_id": "1"}', "line 2: group_id", "line 1 has it too"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, where: str, hint: str) -> None:
    prompts, rejected = read_prompts(write(tmp_path, '{"prompt": "ok", "group_id": "1"}', line, GOOD[2]))
    assert len(prompts) == 2
    assert rejected[0].given == line
    assert where in rejected[0].error.field
    assert hint in str(rejected[0].error)
    assert rejected[0].error.fix


def test_bytes_that_are_no_utf8_are_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "\xff\xfe"}\n{"prompt": "ok"}\n')
    prompts, rejected = read_prompts(file)
    assert [len(prompts), len(rejected)] == [1, 1]


def test_blank_lines_are_no_prompts(tmp_path: Path) -> None:
    prompts, rejected = read_prompts(write(tmp_path, "", GOOD[0], "  "))
    assert [prompt.group_id for prompt in prompts] == ["2"]
    assert rejected == []


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_forms_of_a_call() -> None:
    message = {"role": "user", "content": "x"}
    prompts = as_prompts(["x", np.array([1, 2]), [message], Prompt(text="y", group_id="mine")])
    assert [prompt.group_id for prompt in prompts] == ["0", "1", "2", "mine"]
    assert prompts[1].token_ids == (1, 2)
    assert prompts[2].messages == (message,)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ("text", "prompts"),
        ([""], "prompts[0]: prompt"),
        (["ok", 7], "prompts[1]"),
        ([[]], "prompts[0]: prompt_token_ids"),
        ([["a", "b"]], "prompts[0]: prompt_token_ids"),
        ([Prompt()], "prompts[0]"),
        (None, "prompts"),
        ((text for text in ["a"]), "prompts"),
        ([b"bytes"], "prompts[0]"),
        ([np.array([[1], [2]])], "prompts[0]: prompt_token_ids"),
        ([Prompt(text="a", token_ids=(1,))], "prompts[0]"),
        ([Prompt(text="a", group_id="g"), Prompt(text="b", group_id="g")], "prompts[1].group_id"),
    ],
)
def test_bad_prompt_of_a_call_is_named(prompts: object, field: str) -> None:
    with pytest.raises(InputError) as caught:
        as_prompts(prompts)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("token_ids", "hint"),
    [([], "at least one token"), ([1] * 8, "at most 7"), ([1, 10], "0 to 9")],
)
def test_token_ids_must_fit_the_policy(token_ids: list[int], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        check_token_ids(token_ids, "prompt", max_model_len=8, vocab_size=10)


def test_longest_prompt_that_fits() -> None:
    check_token_ids([9] * 7, "prompt", max_model_len=8, vocab_size=10)


def test_first_error_counts_the_rest(tmp_path: Path) -> None:
    _, rejected = read_prompts(write(tmp_path, "x", "y", json.dumps({})))
    assert "2 more prompts" in str(first_error(rejected))
