"""Which sampling parameters vLLM honours while it speculates, against the reference; stock behaviour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from rlspec import Accelerator, Config, Prompt
from rlspec.errors import InputError
from rlspec.types import Rollout
from rollout.reference import ReferenceModel
from tests.integration.conftest import REPEATING_PROMPT
from tests.integration.sampling_reference import MAX_LOGPROB_ERROR, logit_rows, logprob_errors

TOKENS = [REPEATING_PROMPT, (9, 10, 11, 9, 10, 11, 9), tuple(range(2, 40)), (3,), (30, 31) * 5, (7, 8, 9) * 4]
STOPS = [6, 12, 14, 20, 22, 25, 33]
DIGITS = range(2, 12)
"""Token ids of 0 to 9 in the tiny tokenizer."""

HONOURED: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.5},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stop_token_ids": {"stop_token_ids": STOPS},
    "allowed_token_ids": {"allowed_token_ids": [5, 7, 9, 11, 13, 20, 22, 30]},
    "eos": {"ignore_eos": False},
}


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def accelerator(request: pytest.FixtureRequest, tiny_config: Callable[..., Config]) -> Iterator[Accelerator]:
    config = tiny_config(request.param, on_unsupported="plain", skip_tokenizer_init=False)
    with Accelerator(config) as accelerator:
        yield accelerator


@pytest.fixture(scope="module")
def reference(accelerator: Accelerator) -> ReferenceModel:
    return ReferenceModel(accelerator.policy_path)


def draw_mixed(
    accelerator: Accelerator, changes: dict[str, Any], sampling: dict[str, Any]
) -> list[tuple[Rollout, dict[str, Any]]]:
    """Rollouts and their parameters from one batch: without any, with `changes`, without drafts (min_p)."""
    cycle = [{}, changes, {"min_p": 0.1}, changes, {}, changes]
    prompts = [
        Prompt(token_ids=ids, sampling=own, group_id=str(index))
        for index, (ids, own) in enumerate(zip(TOKENS, cycle, strict=True))
    ]
    rollouts = accelerator.generate(prompts, sampling)
    assert rollouts[2].num_drafted == 0 < sum(rollout.num_drafted for rollout in rollouts)
    return list(zip(rollouts, cycle, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", HONOURED)
def test_honoured_beside_requests_with_and_without_drafts(
    accelerator: Accelerator, reference: ReferenceModel, name: str, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 2}
    for rollout, own in draw_mixed(accelerator, HONOURED[name], sampling):
        meant = {**own, "min_p": own.get("min_p", 0.0) if temperature else 0.0}
        assert max(logprob_errors(reference, rollout, meant)) < MAX_LOGPROB_ERROR
        assert not set(rollout.completion_token_ids[:-1]) & set(own.get("stop_token_ids", ()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_of_one_and_two_tokens(
    accelerator: Accelerator, reference: ReferenceModel, temperature: float
) -> None:
    usual = accelerator.generate(TOKENS, {"temperature": 0.0})
    pairs = {rollout.completion_token_ids[i : i + 2] for rollout in usual for i in (0, 3, 7, 12)}
    words = [list(pair) for pair in sorted(pairs) if min(pair) >= 2] + [[12], [40]]
    changes = {"bad_words": ["".join(accelerator._engine.tokenizer.decode(word)) for word in words]}
    for rollout, own in draw_mixed(accelerator, changes, {"temperature": temperature, "seed": 2}):
        meant = {"bad_words": words} if own == changes else {"min_p": own.get("min_p", 0.0) * temperature}
        assert max(logprob_errors(reference, rollout, meant)) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_strings_cut_tokens_and_logprobs(accelerator: Accelerator, temperature: float) -> None:
    for rollout, own in draw_mixed(accelerator, {"stop": list("a5znh3")}, {"temperature": temperature}):
        text = accelerator._engine.tokenizer.decode(rollout.completion_token_ids)
        if "stop" in own:
            assert not set(text[:-1]) & set(own["stop"])
            assert (rollout.finish_reason == "stop") == (text[-1] in own["stop"])


def test_why_min_tokens_is_not_for_draft_tokens(accelerator: Accelerator, reference: ReferenceModel) -> None:
    """Stock vLLM, drafts on: where accepted drafts reach min_tokens, the token after them is masked too."""
    late = []
    for min_tokens in range(3, 12):
        params = SamplingParams(
            temperature=0.0, max_tokens=24, min_tokens=min_tokens, stop_token_ids=STOPS, logprobs=0
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in TOKENS]
        outputs = accelerator._engine._llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            sample = output.outputs[0]
            rollout = _as_rollout(output.prompt_token_ids, sample)
            meant = {"min_tokens": min_tokens, "stop_token_ids": STOPS}
            errors = logprob_errors(reference, rollout, meant)
            assert max(errors[:min_tokens]) < MAX_LOGPROB_ERROR
            late += [error for error in errors[min_tokens:] if error > MAX_LOGPROB_ERROR]
    assert late, "vLLM honours min_tokens now: take it out of IGNORED_WHILE_SPECULATING"


def _as_rollout(prompt_token_ids: list[int], sample: Any) -> Any:
    """What the reference needs of a rollout."""
    logprobs = [
        position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True)
    ]
    fields = {"completion_token_ids": tuple(sample.token_ids), "logprobs": tuple(logprobs)}
    names = dict.fromkeys(Rollout.__dataclass_fields__)
    return Rollout(**{**names, "prompt_token_ids": tuple(prompt_token_ids), **fields})


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[xyz]{2,4}$"}, "b": {"enum": [17, 42]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "(ab|cd|xy){3,6}"}, "(ab|cd|xy){3,6}"),
        ({"choice": ["abcabcabc", "abcabdabd", "hello"]}, "abcabcabc|abcabdabd|hello"),
        ({"json": SCHEMA}, r'\{ ?"a": ?"[xyz]{2,4}", ?"b": ?(17|42)\}'),
        ({"grammar": 'root ::= ("ab" | "cd" | "ef")+ "z"'}, "(ab|cd|ef)+z"),
    ],
)
def test_structured_outputs(
    accelerator: Accelerator, constraint: dict[str, Any], pattern: str, temperature: float
) -> None:
    changes = {"structured_outputs": constraint, "ignore_eos": False, "max_tokens": 60}
    drawn = draw_mixed(accelerator, changes, {"temperature": temperature, "seed": 4})
    texts = [rollout.text for rollout, own in drawn if own == changes and rollout.finish_reason == "stop"]
    assert texts
    assert all(re.fullmatch(pattern, text or "") for text in texts), texts
    if "json" in constraint:
        assert all(json.loads(text or "")["b"] in (17, 42) for text in texts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_under_a_grammar(
    accelerator: Accelerator, reference: ReferenceModel, temperature: float
) -> None:
    changes = {"structured_outputs": {"regex": "[0-9]{12}"}, "ignore_eos": False}
    drawn = draw_mixed(accelerator, changes, {"temperature": temperature, "seed": 4})
    for rollout in (rollout for rollout, own in drawn if own == changes):
        assert len(rollout.completion_token_ids) == 13  # and the end-of-sequence token
        rows = logit_rows(reference, rollout)[:12]
        logprobs = rows[:, DIGITS.start : DIGITS.stop].log_softmax(-1)
        for row, token, given in zip(logprobs, rollout.completion_token_ids, rollout.logprobs, strict=False):
            assert abs(float(row[token - DIGITS.start]) - given) < MAX_LOGPROB_ERROR
            if temperature == 0.0:
                assert int(row.argmax()) == token - DIGITS.start


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"structured_outputs": {"regx": "a"}}, "sampling.structured_outputs.regx"),
        ({"structured_outputs": {}}, "sampling.structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "sampling.structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "sampling"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "sampling.ignore_eos"),
        ({"bad_words": [" "]}, "sampling"),
    ],
)
def test_refused_before_the_first_rollout(
    accelerator: Accelerator, sampling: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        accelerator.stream(TOKENS, {"ignore_eos": False, **sampling})  # type: ignore[arg-type]
    assert caught.value.field == field
