"""The embedded policy: logprobs against transformers, seeds, text, start-up time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rlspec import Accelerator, load_config
from rlspec.arithmetic import arithmetic_prompts
from rlspec.types import FinishReason
from rollout.embedded_policy import embedded_policy_path
from rollout.reference import ReferenceModel

MAX_LOGPROB_ERROR = 1e-4
"""fp32 in another summation order: 1e-6 to 1e-5 was measured (vLLM against transformers)."""
MAX_START_SECONDS = 30.0
QUIET = "observability.vllm_log_level=error"
FIXED = ("speculation.policy=fixed", "speculation.remember=false")


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(embedded_policy_path())


@pytest.fixture(scope="module")
def accelerator(reference: ReferenceModel) -> Iterator[Accelerator]:
    started = time.perf_counter()
    with Accelerator(load_config(None, [QUIET, *FIXED])) as accelerator:
        assert time.perf_counter() - started < MAX_START_SECONDS
        yield accelerator


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_references_at_the_sampling_temperature(
    accelerator: Accelerator, reference: ReferenceModel, temperature: float
) -> None:
    rollouts = accelerator.generate(
        arithmetic_prompts(3), {"n": 2, "max_tokens": 48, "temperature": temperature, "seed": 2}
    )
    assert sum(rollout.num_accepted for rollout in rollouts) > 0  # accepted draft tokens are among them
    for rollout in rollouts:
        expected = reference.logprobs(rollout.prompt_token_ids, rollout.completion_token_ids, temperature)
        assert rollout.logprobs == pytest.approx(expected, abs=MAX_LOGPROB_ERROR)


def test_raw_logprobs_leave_the_temperature_out(reference: ReferenceModel) -> None:
    overrides = [QUIET, *FIXED, "engine.vllm_args.logprobs_mode=raw_logprobs"]
    with Accelerator(load_config(None, overrides)) as accelerator:
        (rollout,) = accelerator.generate(
            arithmetic_prompts(1), {"max_tokens": 32, "temperature": 0.5, "seed": 1}
        )
    assert rollout.logprobs_mode == "raw_logprobs"
    expected = reference.logprobs(rollout.prompt_token_ids, rollout.completion_token_ids)
    assert rollout.logprobs == pytest.approx(expected, abs=MAX_LOGPROB_ERROR)


def test_seeds_reproduce(accelerator: Accelerator) -> None:
    sampling = {"n": 2, "max_tokens": 24, "seed": 11}
    one, two = (accelerator.generate(arithmetic_prompts(2), sampling) for _ in range(2))
    assert [rollout.completion_token_ids for rollout in one] == [
        rollout.completion_token_ids for rollout in two
    ]


def test_text_stop_and_forms(accelerator: Accelerator) -> None:
    message = [{"role": "user", "content": "Say hello."}]
    chat, text = accelerator.generate(
        [message, "1, 2, 3, 4, 5,"], {"max_tokens": 40, "temperature": 0.0, "n": 1}
    )
    assert chat.text
    assert chat.finish_reason is FinishReason.STOP
    assert text.text is not None
    assert "6" in text.text
    (stopped,) = accelerator.generate(
        ["1, 2, 3, 4, 5,"], {"max_tokens": 40, "temperature": 0.0, "stop": ["8"]}
    )
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "8")
