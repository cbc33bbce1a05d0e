"""What is refused before an engine is started, by the name of the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlspec import Accelerator, Config, parse_config
from rlspec.errors import (
    ConfigError,
    EngineError,
    ModelError,
    RlspecError,
    SetupError,
    UnsupportedSamplingError,
)
from rollout.tiny_models import write_tiny_draft_model, write_tiny_eagle3_head, write_tiny_target
from rollout.vllm_support import PatchStatus


@pytest.mark.parametrize(
    ("vllm_args", "kind", "field", "hint"),
    [
        ({"max_modle_len": 1}, ConfigError, "engine.vllm_args.max_modle_len", "'max_model_len'"),
        ({"model": "x"}, ConfigError, "engine.vllm_args.model", "policy.model"),
        ({"scheduler_cls": "x"}, ConfigError, "engine.vllm_args.scheduler_cls", "rlspec's scheduler"),
        ({"data_parallel_size": 2}, ConfigError, "engine.vllm_args.data_parallel_size", "Accelerator"),
        (
            {"logprobs_mode": "raw_logits"},
            ConfigError,
            "engine.vllm_args.logprobs_mode",
            "processed_logprobs",
        ),
        (
            {"logits_processors": ["x.Y"]},
            UnsupportedSamplingError,
            "engine.vllm_args.logits_processors",
            "null",
        ),
    ],
)
def test_engine_arguments(
    tiny_config: Callable[..., Config],
    vllm_args: dict[str, Any],
    kind: type[RlspecError],
    field: str,
    hint: str,
) -> None:
    with pytest.raises(kind, match=hint) as caught:
        Accelerator(tiny_config("ngram", **vllm_args))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field", "hint"),
    [
        ({"prompt_lookup_maxx": 1}, "drafter.speculative_config.prompt_lookup_maxx", "'prompt_lookup_max'"),
        ({"method": ["ngram"]}, "drafter.speculative_config.method", "a string"),
        (
            {"rejection_sample_method": ["a"]},
            "drafter.speculative_config.rejection_sample_method",
            "a string",
        ),
        (
            {"rejection_sample_method": "synthetic"},
            "drafter.speculative_config.rejection_sample_method",
            "own",
        ),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            "drafter.speculative_config.num_speculative_tokens_per_batch_size",
            "speculation.policy",
        ),
    ],
)
def test_speculative_config(
    target: Path, drafters: dict[str, dict[str, Any]], changes: dict[str, Any], field: str, hint: str
) -> None:
    speculative = {**drafters["ngram"], **changes}
    config = parse_config({"policy": {"model": str(target)}, "drafter": {"speculative_config": speculative}})
    with pytest.raises(ConfigError, match=hint) as caught:
        Accelerator(config)
    assert caught.value.field == field


def test_drafts_longer_than_the_context(tiny_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="less than max_model_len 3"):
        Accelerator(tiny_config("draft_model", max_model_len=3))


def test_draft_model_with_nan(target: Path, tmp_path: Path) -> None:
    draft = write_tiny_draft_model(tmp_path / "draft", target, noise=float("nan"))
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    config = parse_config({"policy": {"model": str(target)}, "drafter": {"speculative_config": speculative}})
    with pytest.raises(ModelError, match="NaN"):
        Accelerator(config)


def test_policy_with_nan_gives_no_rollouts(
    tiny_config: Callable[..., Config], target: Path, tmp_path: Path
) -> None:
    broken = write_tiny_draft_model(tmp_path / "broken", target, noise=float("nan"))
    config = tiny_config("none")
    policy = config.policy.model_copy(update={"model": str(broken)})
    with (
        Accelerator(config.model_copy(update={"policy": policy})) as accelerator,
        pytest.raises(EngineError, match="nan in a response of group 0"),
    ):
        accelerator.generate([(1, 2, 3)])


def test_missing_model(tmp_path: Path) -> None:
    config = parse_config(
        {"policy": {"model": str(tmp_path / "none")}, "drafter": {"speculative_config": None}}
    )
    with pytest.raises(ModelError) as caught:
        Accelerator(config)
    assert caught.value.field == "policy.model"


@pytest.mark.parametrize("other", [{"hidden_size": 32}, {"vocab_size": 40}])
def test_draft_head_for_another_policy(target: Path, tmp_path: Path, other: dict[str, int]) -> None:
    another = write_tiny_target(tmp_path / "another", **other)
    head = write_tiny_eagle3_head(tmp_path / "head", another)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    config = parse_config({"policy": {"model": str(target)}, "drafter": {"speculative_config": speculative}})
    with pytest.raises(ModelError) as caught:
        Accelerator(config)
    assert caught.value.field.startswith("drafter.speculative_config.model")


def test_unknown_vllm_is_refused_unless_allowed(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.engine_start.installed_vllm_version", lambda: "0.31.0")
    config = tiny_config("none")
    with pytest.raises(SetupError) as caught:
        Accelerator(config)
    assert (caught.value.field, caught.value.given) == ("vllm version", "0.31.0")
    assert "allow_unsupported_vllm" in caught.value.fix
    allowed = config.engine.model_copy(update={"allow_unsupported_vllm": True})
    with Accelerator(config.model_copy(update={"engine": allowed})):
        assert "0.31.0 was not tested" in caplog.text


def test_a_patch_that_did_not_take_is_refused_by_name(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = PatchStatus("expand_kernel", False, "It gives wrong numbers.")
    monkeypatch.setattr("rollout.engine_start.patch_statuses", lambda: (fault,))
    with pytest.raises(SetupError, match="expand_kernel"):
        Accelerator(tiny_config("none"))
