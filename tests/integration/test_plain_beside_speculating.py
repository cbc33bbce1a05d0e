"""Requests that speculation cannot honour, drawn without drafts in one batch with others that speculate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlspec import Accelerator, Config, Prompt
from rlspec.audit.greedy_identity import first_differences, judge
from rlspec.types import Rollout
from rollout.reference import ReferenceModel
from tests.integration.conftest import REPEATING_PROMPT
from tests.integration.sampling_reference import MAX_LOGPROB_ERROR, logprob_errors, processed_logits

TOKENS = [REPEATING_PROMPT, (9, 10, 11, 9, 10, 11, 9), tuple(range(2, 40)), (3,), (30, 31) * 5, (7, 8, 9) * 4]
MIN_P = 0.2
FORCED, FORBIDDEN = 9, 12


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle3"])
def accelerator(request: pytest.FixtureRequest, tiny_config: Callable[..., Config]) -> Iterator[Accelerator]:
    with Accelerator(tiny_config(request.param, on_unsupported="plain")) as accelerator:
        yield accelerator


@pytest.fixture(scope="module")
def reference(accelerator: Accelerator) -> ReferenceModel:
    return ReferenceModel(accelerator.policy_path)


def draw(
    accelerator: Accelerator, changes: dict[str, Any], sampling: dict[str, Any]
) -> tuple[list[Rollout], list[Rollout]]:
    """Rollouts with the changes, and those of the neighbours that share each batch with them."""
    changed = [Prompt(token_ids=ids, sampling=changes, group_id=f"plain {i}") for i, ids in enumerate(TOKENS)]
    others = [Prompt(token_ids=ids, group_id=f"other {i}") for i, ids in enumerate(TOKENS)]
    mixed = [prompt for pair in zip(changed, others, strict=True) for prompt in pair]
    rollouts = accelerator.generate(mixed, sampling)
    return rollouts[::2], rollouts[1::2]


def assert_drafts(plain: list[Rollout], speculating: list[Rollout]) -> None:
    assert [(rollout.num_drafted, rollout.num_steps) for rollout in plain] == [
        (0, len(rollout.completion_token_ids)) for rollout in plain
    ]
    assert sum(rollout.num_drafted for rollout in speculating) > 0
    assert sum(rollout.num_accepted for rollout in speculating) > 0


def test_min_p_holds_for_each_token(
    accelerator: Accelerator, reference: ReferenceModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rlspec"):
        plain, speculating = draw(accelerator, {"min_p": MIN_P}, {"seed": 3})
    assert_drafts(plain, speculating)
    for rollout in plain:
        logits = processed_logits(reference, rollout, {"min_p": MIN_P})
        assert all(
            row[token].isfinite() for row, token in zip(logits, rollout.completion_token_ids, strict=True)
        )
        assert max(logprob_errors(reference, rollout, {"min_p": MIN_P})) < MAX_LOGPROB_ERROR
    for rollout in speculating:
        assert max(logprob_errors(reference, rollout, {})) < MAX_LOGPROB_ERROR
    assert caplog.text.count("drawn without drafts") == 1
    assert f'what="drafts_with_min_p"}} {len(TOKENS)}.0' in accelerator.metrics.text()


def test_logit_bias_forces_and_forbids_at_temperature_0(
    accelerator: Accelerator, reference: ReferenceModel
) -> None:
    greedy = {"temperature": 0.0}
    forced, speculating = draw(accelerator, {"logit_bias": {FORCED: 100.0}}, greedy)
    assert_drafts(forced, speculating)
    assert {token for rollout in forced for token in rollout.completion_token_ids} == {FORCED}
    bias = {"logit_bias": {FORBIDDEN: -100.0, FORCED: 1.5}}
    biased, neighbours = draw(accelerator, bias, greedy)
    assert FORBIDDEN in {token for rollout in neighbours for token in rollout.completion_token_ids}
    assert FORBIDDEN not in {token for rollout in biased for token in rollout.completion_token_ids}
    for rollout in biased:
        assert max(logprob_errors(reference, rollout, bias)) < MAX_LOGPROB_ERROR


def test_greedy_neighbours_are_unchanged(accelerator: Accelerator, reference: ReferenceModel) -> None:
    alone = accelerator.generate(
        [Prompt(token_ids=ids, group_id=f"other {i}") for i, ids in enumerate(TOKENS)], {"temperature": 0.0}
    )
    _, beside = draw(accelerator, {"logit_bias": {FORCED: 3.0}, "temperature": 1.0}, {"temperature": 0.0})
    assert [rollout.num_drafted > 0 for rollout in alone] == [rollout.num_drafted > 0 for rollout in beside]
    differences = first_differences(alone, beside)
    gaps = [reference.top_two_gap(difference.prefix_token_ids) for difference in differences]
    assert judge(len(TOKENS), gaps).passed


def test_min_tokens_is_exact_without_drafts(accelerator: Accelerator, reference: ReferenceModel) -> None:
    changes = {"min_tokens": 5, "stop_token_ids": list(range(2, 24, 2)), "ignore_eos": False}
    for sampling in ({"temperature": 0.0}, {"seed": 1}):
        plain, _ = draw(accelerator, changes, sampling)
        assert {rollout.num_drafted for rollout in plain} == {0}
        for rollout in plain:
            assert len(rollout.completion_token_ids) > 5
            assert not set(rollout.completion_token_ids[5:-1]) & set(changes["stop_token_ids"])
            assert max(logprob_errors(reference, rollout, changes)) < MAX_LOGPROB_ERROR


def test_engine_of_only_plain_requests(accelerator: Accelerator) -> None:
    rollouts = accelerator.generate(TOKENS, {"min_p": MIN_P, "n": 2})
    assert {rollout.num_drafted for rollout in rollouts} == {0}


def test_without_a_drafter_nothing_is_hidden(tiny_config: Callable[..., Config]) -> None:
    with Accelerator(tiny_config("none", on_unsupported="plain")) as accelerator:
        rollouts = accelerator.generate(TOKENS, {"temperature": 0.0, "logit_bias": {FORCED: 100.0}})
        assert {token for rollout in rollouts for token in rollout.completion_token_ids} == {FORCED}
        assert "drafts_with" not in accelerator.metrics.text()
