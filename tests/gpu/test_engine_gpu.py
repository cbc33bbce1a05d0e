"""What only a GPU can show: the asynchronous scheduler and the V2 runner under our K and records.

Not run on the machines that develop rlspec so far; each test skips there with the reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import Accelerator, parse_config
from rlspec.audit.greedy_identity import first_differences, judge
from rollout.reference import ReferenceModel
from rollout.tiny_models import write_tiny_draft_model, write_tiny_target
from tests.integration.conftest import REPEATING_PROMPT, TINY_VLLM_ARGS

PROMPTS = [REPEATING_PROMPT, (9, 10, 11, 9, 10, 11, 9), tuple(range(2, 40))]
SAMPLING = {"n": 1, "temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")


@pytest.mark.gpu
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_k_of_each_step_is_followed_and_changes_no_greedy_token(
    tmp_path: Path, async_scheduling: bool
) -> None:
    target = write_tiny_target(tmp_path / "target")
    draft = write_tiny_draft_model(tmp_path / "draft", target)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    engine = {"vllm_args": {**TINY_VLLM_ARGS, "async_scheduling": async_scheduling}}
    base = {"policy": {"model": str(target)}, "engine": engine}
    with Accelerator(parse_config({**base, "drafter": {"speculative_config": None}})) as plain:
        expected = plain.generate(PROMPTS, SAMPLING)
    with Accelerator(
        parse_config(
            {**base, "drafter": {"speculative_config": speculative}, "speculation": {"policy": "fixed"}}
        )
    ) as accelerator:
        rollouts = accelerator.generate(PROMPTS, SAMPLING, k_trace=[3, 1, 0, 2] * 50)
        steps = accelerator.steps
    reference = ReferenceModel(target)
    differences = first_differences(expected, rollouts)
    gaps = [reference.top_two_gap(difference.prefix_token_ids) for difference in differences]
    assert judge(len(PROMPTS), gaps).passed
    assert sum(sum(facts.num_emitted) for facts in steps) == 24 * len(PROMPTS)
    assert sum(sum(facts.num_accepted) for facts in steps) == sum(r.num_accepted for r in rollouts) > 0
