"""A drafter that rests while K is 0 and catches up proposes what one proposes that never rested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlspec import Accelerator, Config, Prompt
from rlspec.types import Rollout
from rollout.tiny_models import write_tiny_target, write_tiny_tokenizer
from tests.integration.conftest import REPEATING_PROMPT

TOKENS = [REPEATING_PROMPT, (9, 10, 11, 9, 10, 11, 9), tuple(range(2, 40)), (3,), (30, 31) * 5, (7, 8, 9) * 4]
GREEDY = {"temperature": 0.0, "max_tokens": 60}
NUM_SEQS = 4  # fewer than prompts: some join while the drafter rests

TRACES = {
    "from the start": [0] * 20 + [3] * 40,
    "again and again": ([0] * 5 + [2] * 3) * 10,
    "one step at a time": [0, 3] * 30,
    "only once": [3] * 5 + [0] * 30 + [1] * 30,
}


@pytest.fixture(scope="module", params=["eagle3", "draft_model", "ngram"])
def pair(request: pytest.FixtureRequest, tiny_config: Callable[..., Config]) -> Iterator[list[Accelerator]]:
    configs = [
        tiny_config(request.param, speculation={"skip_idle_drafter": rests}, max_num_seqs=NUM_SEQS)
        for rests in (False, True)
    ]
    with Accelerator(configs[0]) as warm, Accelerator(configs[1]) as resting:
        yield [warm, resting]


def counts(accelerator: Accelerator) -> list[int]:
    """Steps without the drafter, and tokens that it caught up on."""
    found: list[list[int]] = accelerator._engine._llm.collective_rpc("rlspec_idle_drafter_counts")
    return found[0]


def drawn(accelerator: Accelerator, trace: list[int]) -> tuple[list[Rollout], list[tuple[Any, ...]]]:
    """Rollouts, and each verification: draft tokens and sampled tokens."""
    with accelerator._engine.recording() as recording:
        rollouts = accelerator.generate(TOKENS, GREEDY, k_trace=trace)
    return rollouts, [(drafts, sampled) for _, drafts, sampled in recording.verifications]


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_drafts_are_those_of_a_drafter_that_never_rested(pair: list[Accelerator], trace: list[int]) -> None:
    warm, resting = pair
    before = counts(resting)
    expected, expected_drafts = drawn(warm, trace)
    found, drafts = drawn(resting, trace)
    assert [r.completion_token_ids for r in found] == [r.completion_token_ids for r in expected]
    assert drafts == expected_drafts
    assert any(drafts)
    num_skipped, num_caught_up = (after - was for after, was in zip(counts(resting), before, strict=True))
    assert num_skipped > 0
    has_state = resting.config.drafter.speculative_config["method"] != "ngram"  # type: ignore[index]
    alternates = trace == TRACES["one step at a time"]  # a step with drafts to verify keeps the stock path
    assert (num_caught_up > 0) == (has_state and not alternates)
    assert counts(warm) == []


def test_a_bounded_window_changes_drafts_but_no_token(tiny_config: Callable[..., Config]) -> None:
    trace = [0] * 30 + [3] * 30
    speculation = {"catch_up_tokens": 4}
    with Accelerator(tiny_config("eagle3", speculation=speculation)) as accelerator:
        found, _ = drawn(accelerator, trace)
        assert counts(accelerator)[1] == 4 * len(TOKENS)
    with Accelerator(tiny_config("none")) as plain:
        expected = plain.generate(TOKENS, GREEDY)
    assert [r.completion_token_ids for r in found] == [r.completion_token_ids for r in expected]


def test_states_of_the_old_policy_are_forgotten(
    tiny_config: Callable[..., Config], target: Path, tmp_path: Path
) -> None:
    other = write_tiny_tokenizer(write_tiny_target(tmp_path / "other", seed=1))
    trace, sampling = [0] * 12 + [3] * 60, {**GREEDY, "max_tokens": 30}
    short = Prompt(token_ids=TOKENS[0], sampling={"max_tokens": 5})
    found = []
    for rests in (False, True):
        config = tiny_config("eagle3", speculation={"skip_idle_drafter": rests})
        with Accelerator(config) as accelerator, accelerator._engine.recording() as recording:
            stream = accelerator.stream([short, *TOKENS[1:]], sampling, k_trace=trace)
            next(stream)
            accelerator.update_policy(other, version=1, in_flight="keep")
            rollouts = sorted(stream, key=lambda rollout: rollout.group_id)
        tokens = [rollout.completion_token_ids for rollout in rollouts]
        found.append((tokens, [(drafts, sampled) for _, drafts, sampled in recording.verifications]))
    assert found[0] == found[1]
    assert len(found[0][0]) == len(TOKENS) - 1
