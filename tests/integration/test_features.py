"""Features of vLLM that docs/correctness.md calls tested: tokens and logprobs against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlspec import Accelerator, Config
from rlspec.config import parse_config
from rlspec.types import Rollout
from rollout.reference import ReferenceModel
from rollout.tiny_models import write_tiny_draft_model, write_tiny_target
from tests.integration.conftest import REPEATING_PROMPT, TINY_VLLM_ARGS

MAX_LOGPROB_ERROR = 1e-4
"""fp32 in another summation order: below 1e-5 was measured on tiny models."""

PROMPTS = [REPEATING_PROMPT, tuple(range(2, 40)), (3,)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def check_against_reference(rollouts: list[Rollout], reference: ReferenceModel) -> None:
    assert sum(rollout.num_accepted for rollout in rollouts) > 0
    for rollout in rollouts:
        expected = reference.logprobs(rollout.prompt_token_ids, rollout.completion_token_ids)
        assert rollout.logprobs == pytest.approx(expected, abs=MAX_LOGPROB_ERROR)


def config_of(policy: Path, speculative: dict[str, Any], **engine: Any) -> Config:
    return parse_config(
        {
            "policy": {"model": str(policy)},
            "drafter": {"speculative_config": speculative},
            "speculation": {"policy": "fixed", "remember": False},
            "engine": engine,
            "sampling": {"max_tokens": 24, "ignore_eos": True},
            "observability": {"vllm_log_level": "error"},
        }
    )


def test_chunked_prefill(tiny_config: Callable[..., Config], target: Path) -> None:
    config = tiny_config("draft_model", enable_chunked_prefill=True, max_num_batched_tokens=16)
    with Accelerator(config) as accelerator:
        rollouts = accelerator.generate(PROMPTS, {"temperature": 1.0, "n": 4})
        chunked = [facts for facts in accelerator.steps if 0 in facts.num_emitted]
    assert chunked, "no prompt was chunked"
    check_against_reference(rollouts, ReferenceModel(target))


def test_mixture_of_experts(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = MixtralConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = MixtralForCausalLM(shape).float()
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path, NGRAM, vllm_args=TINY_VLLM_ARGS)
    with Accelerator(config) as accelerator:
        rollouts = accelerator.generate(PROMPTS, {"temperature": 1.0, "n": 4})
    check_against_reference(rollouts, ReferenceModel(tmp_path))


@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", hidden_size=128)  # two heads, for two ranks
    draft = write_tiny_draft_model(tmp_path / "draft", target)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    engine = {"in_process": False, "vllm_args": {**TINY_VLLM_ARGS, "tensor_parallel_size": 2}}
    with Accelerator(config_of(target, speculative, **engine)) as accelerator:
        rollouts = accelerator.generate(PROMPTS, {"temperature": 1.0, "n": 2})
    check_against_reference(rollouts, ReferenceModel(target))


def test_adapters_are_refused(tiny_config: Callable[..., Config]) -> None:
    from rlspec.errors import ConfigError
    from rollout.vllm_args import engine_arguments

    config = tiny_config("none", enable_lora=True)
    with pytest.raises(ConfigError, match="enable_lora"):
        engine_arguments(config, config.policy.model)
