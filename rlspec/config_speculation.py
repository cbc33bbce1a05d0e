"""Owns the part of the configuration that says who decides K and within which limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rlspec.config_sampling import Int, Section

PolicyName = Literal["goodput", "roofline", "beg_mab", "ucb", "exp3", "static_table", "fixed", "off"]
"""Who decides K. docs/policies.md compares them."""


class SpeculationConfig(Section):
    """Who decides K, the number of draft tokens of a step."""

    enabled: bool = Field(
        True,
        description="False starts stock vLLM: its own scheduler, no drafter; only the repairs of vLLM's "
        "defects stay. The environment variable RLSPEC_DISABLE=1 does the same to whatever is configured.",
    )
    policy: PolicyName = Field(
        "goodput",
        description="`goodput`: the K of the most tokens a second by measured step costs and acceptance, 0 "
        "where none pays. `roofline`, `beg_mab`, `ucb`, `exp3`: published rules within the same guards. "
        "`static_table`: vLLM's table. `fixed`: always `num_draft_tokens`. `off`: K = 0, the drafter stays.",
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value

    num_draft_tokens: Int | None = Field(
        None,
        ge=0,
        description="Draft tokens a request and step (K): of `fixed` the K, of others the largest; null is "
        "the drafter's num_speculative_tokens.",
    )
    table: list[tuple[Int, Int, Int]] | None = Field(
        None,
        description="Of `static_table`: ranges [first batch size, last batch size, K], as vLLM's "
        "num_speculative_tokens_per_batch_size.",
    )
    policy_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chosen policy; docs/policies.md lists them."
    )
    on_unsupported: Literal["error", "plain"] = Field(
        "error",
        description="Sampling parameters that cannot be honoured for draft tokens (min_p, logit_bias, "
        "min_tokens; a seed when drafts are sampled): `error` refuses them; `plain` draws those requests "
        "without drafts, at K = 0, beside others that speculate.",
    )
    switch_margin: float = Field(
        0.03,
        ge=0.0,
        le=1.0,
        description="Expected gain in tokens a second that another K above 0 must have before it is taken. "
        "Estimates wander by 1 to 2 %: below that, K would follow the noise. Going to 0 needs no margin.",
    )
    max_slowdown: float = Field(
        0.05,
        gt=0.0,
        le=1.0,
        description="The floor: when speculating steps have taken this share longer than plain decoding "
        "would have, speculation goes off for a while.",
    )
    exploration_fraction: float = Field(
        0.01,
        ge=0.0,
        le=0.5,
        description="Share of the engine's seconds that trying another K may lose; 0 never tries, and then "
        "only estimates of earlier runs or of `rlspec profile` turn speculation on.",
    )
    skip_idle_drafter: bool = Field(
        True,
        description="While K is 0 do not run the drafter; it catches up when K rises. False keeps it warm, "
        "as stock vLLM does, which costs its forward pass in every step.",
    )
    catch_up_tokens: Int = Field(
        512,
        ge=0,
        description="Tokens a request that the drafter catches up on at most, the newest ones: their hidden "
        "states of the policy are kept while K is 0 (3 layers of them for EAGLE-3, 7 kB a token at a hidden "
        "size of 576 in fp32).",
    )
    remember: bool = Field(
        True,
        description="Keep the measured costs and acceptance in a file for this machine, model, drafter and "
        "vLLM build ($RLSPEC_CACHE, or ~/.cache/rlspec), so that the next run starts warm.",
    )
