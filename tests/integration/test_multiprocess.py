"""The engine core in a process of its own: the same rollouts, steps are known, policies updated."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspec import Accelerator, Config, Prompt
from rlspec.errors import EngineError, InputError
from rollout.tiny_models import write_tiny_target
from tests.integration.conftest import REPEATING_PROMPT
from tests.integration.test_policy_update import check_updates_of_a_running_core


def test_same_tokens_steps_updates_and_death(
    tiny_config: Callable[..., Config], target: Path, tmp_path: Path
) -> None:
    config = tiny_config("draft_model", on_unsupported="plain")
    engine = config.engine.model_copy(update={"in_process": False})
    sampling = {"n": 3, "seed": 1}
    with Accelerator(config) as inside:
        expected = inside.generate([REPEATING_PROMPT], sampling)
    accelerator = Accelerator(config.model_copy(update={"engine": engine}))
    rollouts = accelerator.generate([REPEATING_PROMPT], sampling)
    assert [r.completion_token_ids for r in rollouts] == [r.completion_token_ids for r in expected]
    assert [r.num_accepted for r in rollouts] == [r.num_accepted for r in expected]
    assert len(accelerator.steps) >= max(rollout.num_steps for rollout in rollouts)
    assert {facts.num_draft_tokens for facts in accelerator.steps} == {3}
    with pytest.raises(InputError, match="in_process"):
        accelerator.generate([REPEATING_PROMPT], sampling, k_trace=accelerator.k_trace)
    forced = {"temperature": 0.0, "logit_bias": {9: 100.0}}
    plain = Prompt(token_ids=REPEATING_PROMPT, sampling=forced, group_id="plain")
    plain_rollout, speculating = accelerator.generate([plain, REPEATING_PROMPT], {"n": 1})
    assert (set(plain_rollout.completion_token_ids), plain_rollout.num_drafted) == ({9}, 0)
    assert speculating.num_drafted > 0

    other = write_tiny_target(tmp_path / "other", seed=1)
    check_updates_of_a_running_core(accelerator, [target, other])

    stream = accelerator.stream([REPEATING_PROMPT] * 8, {"n": 4, "max_tokens": 200})
    next(stream)
    (engine_core,) = multiprocessing.active_children()
    engine_core.kill()
    with pytest.raises(EngineError):
        list(stream)
