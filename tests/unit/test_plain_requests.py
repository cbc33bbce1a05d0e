"""How requests that speculation cannot honour are refused, marked and unmarked; prompts' own sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlspec.config import parse_config
from rlspec.config_sampling import SamplingConfig
from rlspec.errors import ConfigError, InputError, UnsupportedSamplingError
from rlspec.prompts import as_prompt, read_prompts
from rlspec.types import Prompt

LINE = {"prompt_token_ids": [1, 2], "sampling": {"temperature": 0.5, "logit_bias": {"7": -1}}, "answer": 3}


def test_a_line_carries_its_own_sampling(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(LINE))
    ((prompt,), rejected) = read_prompts(path)
    assert not rejected
    assert (prompt.sampling, prompt.data) == (LINE["sampling"], {"answer": 3})


@pytest.mark.parametrize(
    ("sampling", "key", "hint"),
    [
        ({"n": 2}, "sampling.n", "set n for the call"),
        ({"temprature": 1.0}, "sampling.temprature", "'temperature'"),
        ({"max_tokens": "many"}, "sampling.max_tokens", "integer"),
        ([1], "sampling", "a mapping"),
        (None, "sampling", "a mapping"),
    ],
)
def test_bad_sampling_of_a_prompt_is_refused_by_name(
    tmp_path: Path, sampling: Any, key: str, hint: str
) -> None:
    with pytest.raises(InputError, match=hint) as caught:
        as_prompt(Prompt(token_ids=(1,), sampling=sampling), 4)
    assert caught.value.field == f"prompts[4]: {key}"
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({**LINE, "sampling": sampling}))
    prompts, (rejected,) = read_prompts(path)
    assert (prompts, rejected.error.field) == ([], f"{path}, line 1: {key}")


def test_on_unsupported_is_error_by_default() -> None:
    assert parse_config({}).speculation.on_unsupported == "error"
    with pytest.raises(ConfigError, match=r"speculation\.on_unsupported"):
        parse_config({"speculation": {"on_unsupported": "ignore"}})


def prepare(sampling: dict[str, Any], **traits: Any) -> Any:
    pytest.importorskip("vllm")
    from rollout.sampling import EngineTraits, prepare_sampling

    usual = {
        "speculating": True,
        "samples_drafts": False,
        "on_unsupported": "plain",
        "has_tokenizer": True,
        "can_rewind": True,
        "vocab_size": 48,
    }
    return prepare_sampling(SamplingConfig(**sampling), EngineTraits(**{**usual, **traits}), "sampling")


def test_a_seed_needs_drafts_that_repeat() -> None:
    with pytest.raises(UnsupportedSamplingError, match="seed"):
        prepare({"seed": 1}, samples_drafts=True, on_unsupported="error")
    assert prepare({"seed": 1}, samples_drafts=True).plain_because == ("seed",)
    for traits in ({"samples_drafts": False}, {"samples_drafts": True, "speculating": False}):
        assert prepare({"seed": 1}, **traits).plain_because == ()
    assert prepare({"seed": 1, "temperature": 0.0}, samples_drafts=True).plain_because == ()


@pytest.mark.parametrize(
    ("sampling", "name"),
    [({"min_p": 0.1}, "min_p"), ({"logit_bias": {3: 1.0}}, "logit_bias"), ({"min_tokens": 4}, "min_tokens")],
)
def test_unsupported_parameters(sampling: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedSamplingError, match="on_unsupported=plain") as caught:
        prepare(sampling, on_unsupported="error")
    assert caught.value.field == f"sampling.{name}"
    assert prepare(sampling).plain_because == (name,)
    assert prepare(sampling, speculating=False).plain_because == ()
    assert prepare({"min_p": 0.0, "logit_bias": {}, "min_tokens": 0}).plain_because == ()


def test_hidden_parameters_come_back() -> None:
    from rollout.sampling import PLAIN_KEY, unmark_plain

    prepared = prepare({"min_p": 0.1, "logit_bias": {3: 1.0}, "min_tokens": 4})
    assert prepared.plain_because == ("min_p", "logit_bias", "min_tokens")
    params = prepared.params.clone()
    assert (params.min_p, params.logit_bias, params.min_tokens) == (0.0, None, 4)
    assert set(params.extra_args) == {PLAIN_KEY}
    assert unmark_plain(params)
    assert (params.min_p, params.logit_bias) == (0.1, {3: 1.0})
    assert not unmark_plain(prepare({}).params)


def test_min_p_of_a_greedy_request_stays_off() -> None:
    from rollout.sampling import unmark_plain

    params = prepare({"min_p": 0.1, "temperature": 0.0}).params.clone()
    assert unmark_plain(params)
    assert params.min_p == 0.0


def test_where_plain_is_refused() -> None:
    pytest.importorskip("vllm")
    from rollout.engine_start import refuse_plain_on_v2
    from rollout.vllm_args import engine_arguments

    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    tree = {"speculation": {"on_unsupported": "plain"}, "drafter": {"speculative_config": speculative}}
    with pytest.raises(ConfigError, match=r"speculation\.on_unsupported.*extract_hidden_states"):
        engine_arguments(parse_config(tree), "policy")
    ngram = parse_config({"speculation": {"on_unsupported": "plain"}})
    with pytest.raises(ConfigError, match="V2 model runner"):
        refuse_plain_on_v2(ngram, True)
    refuse_plain_on_v2(ngram, False)
    refuse_plain_on_v2(parse_config({}), True)
