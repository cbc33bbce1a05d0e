"""Owns the sampling parameters of the configuration, and what every section of it has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]
"""An integer as it stands: `true` is not 1 and "4" is not 4."""


class Section(BaseModel):
    """Unknown keys are refused, nothing is changed after it was read, numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


class SamplingConfig(Section):
    """vLLM's sampling parameters under their own names; null keeps vLLM's default."""

    n: Int = Field(1, ge=1, description="Samples a prompt (the size of a GRPO group).")
    temperature: float = Field(1.0, ge=0.0, description="1.0 samples from the policy itself, as RL needs.")
    max_tokens: Int = Field(
        256, ge=1, description="New tokens a sample at most; vLLM's own 16 suits no rollout."
    )
    seed: Int | None = Field(
        None,
        description="Base seed: sample i of prompt j gets a seed of its own from it. Null: the engine's.",
    )
    top_p: float | None = Field(None, description="Nucleus mass.")
    top_k: Int | None = Field(None, description="Tokens kept.")
    min_p: float | None = Field(None, description="Not for draft tokens: see speculation.on_unsupported.")
    min_tokens: Int | None = Field(
        None,
        description="New tokens before a stop counts. Not for draft tokens: see speculation.on_unsupported.",
    )
    presence_penalty: float | None = Field(None, description="vLLM's.")
    frequency_penalty: float | None = Field(None, description="vLLM's.")
    repetition_penalty: float | None = Field(None, description="vLLM's.")
    stop: str | list[str] | None = Field(None, description="Strings that end a response.")
    stop_token_ids: list[int] | None = Field(None, description="Token ids that end a response.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    include_stop_str_in_output: bool | None = Field(None, description="vLLM's.")
    skip_special_tokens: bool | None = Field(None, description="vLLM's.")
    detokenize: bool | None = Field(None, description="False leaves `text` empty and saves host time.")
    bad_words: list[str] | None = Field(None, description="vLLM's.")
    allowed_token_ids: list[int] | None = Field(None, description="vLLM's.")
    logit_bias: dict[int, float] | None = Field(
        None, description="Not for draft tokens: see speculation.on_unsupported."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="One of vLLM's constraints: json, regex, choice, grammar, json_object or structural_tag.",
    )
