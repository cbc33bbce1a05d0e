"""Checkpoints and configurations that the integration tests share. Engines are real; targets are tiny."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlspec.config import Config, parse_config
from rollout.tiny_models import (
    write_tiny_draft_model,
    write_tiny_eagle3_head,
    write_tiny_target,
    write_tiny_tokenizer,
)

TINY_VLLM_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 26,
    "skip_tokenizer_init": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,
    "seed": 0,
}

REPEATING_PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
"""Token ids that n-gram lookup finds matches in."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(write_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, dict[str, Any] | None]:
    """A speculative_config for each method."""
    draft_model = write_tiny_draft_model(tmp_path_factory.mktemp("draft"), target)
    head = write_tiny_eagle3_head(tmp_path_factory.mktemp("head"), target)
    return {
        "none": None,
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
        "draft_model": {"method": "draft_model", "model": str(draft_model), "num_speculative_tokens": 3},
        "eagle3": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3},
    }


@pytest.fixture(scope="session")
def tiny_config(target: Path, drafters: dict[str, dict[str, Any] | None]) -> Callable[..., Config]:
    """`tiny_config("ngram", max_model_len=64, sampling={...})`: a configuration of the tiny target."""

    def make(
        drafter: str = "ngram",
        sampling: dict[str, Any] | None = None,
        on_unsupported: str = "error",
        speculation: dict[str, Any] | None = None,
        **vllm_args: Any,
    ) -> Config:
        return parse_config(
            {
                "policy": {"model": str(target)},
                "drafter": {"speculative_config": drafters[drafter]},
                "speculation": {
                    "policy": "fixed",
                    "remember": False,
                    "on_unsupported": on_unsupported,
                    **(speculation or {}),
                },
                "engine": {"vllm_args": {**TINY_VLLM_ARGS, **vllm_args}},
                "sampling": {"max_tokens": 24, "ignore_eos": True, **(sampling or {})},
                "observability": {"vllm_log_level": "error"},
            }
        )

    return make
