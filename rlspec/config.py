"""Owns the configuration: one frozen tree, each default once, with its unit and reason.

Settings of vLLM keep their own names and pass through untouched in `engine.vllm_args`,
`drafter.speculative_config` and `sampling`. `config_files.py` reads a tree from YAML and overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from rlspec.config_sampling import Int, SamplingConfig, Section
from rlspec.config_speculation import SpeculationConfig
from rlspec.errors import ConfigError, nearest

EMBEDDED_POLICY = "embedded"
"""`policy.model` of the small model that rlspec brings along: SmolLM2-135M-Instruct."""

EMBEDDED_VLLM_ARGS: Mapping[str, Any] = {
    "dtype": "float32",  # bfloat16 is slower than fp32 on CPUs without AMX
    "enforce_eager": True,  # compiling costs 45 s and gains little on a CPU
    "max_model_len": 1024,  # tokens
    "max_num_seqs": 32,  # requests in a batch
    "kv_cache_memory_bytes": 1 << 30,  # room for 32 sequences of 1,024 tokens at 46 kB a token and to spare
    "enable_chunked_prefill": False,  # seeds and chunked prompts do not go together on a CPU
    "seed": 0,
}
"""What `engine.vllm_args` is laid over when the policy is the embedded one (measured on 2 CPU cores)."""


InFlightMode = Literal["drain", "abort", "keep"]
"""What a policy update does with the requests that are running."""


class PolicyConfig(Section):
    """The target model."""

    model: str = Field(
        EMBEDDED_POLICY,
        min_length=1,
        description="Path or hub name of the policy, as vLLM takes it; `embedded` is SmolLM2-135M-Instruct, "
        "so that a first run needs no model.",
    )
    version: Int = Field(
        0, ge=0, description="Version number of the weights at the start; rollouts carry it."
    )
    in_flight: InFlightMode = Field(
        "drain",
        description="What `update_policy` does with requests that are running. `drain`: they are finished "
        "under the old policy first, so that every response has one version (the default: no trainer needs "
        "to know). `abort`: they end with what they have. `keep`: they go on under the new policy, their KV "
        "cache computed again; the shortest pause, and `policy_spans` says which tokens are whose. `abort` "
        "and `keep` are vLLM's words of its pause; `drain` is its `wait`.",
    )


class DrafterConfig(Section):
    """What proposes draft tokens."""

    speculative_config: dict[str, Any] | None = Field(
        default_factory=lambda: {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        },
        description="vLLM's `speculative_config` under its own names; null loads no drafter at all. The "
        "default is n-gram lookup: it needs no weights. `num_speculative_tokens` is the engine's largest K.",
    )
    version: str | None = Field(
        None,
        description="Name of the drafter in rollouts; null derives it: the method for a drafter without "
        "weights, else the method and the first 12 hex digits of its weights' sha256.",
    )

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        if self.speculative_config is None:
            return self
        largest = self.speculative_config.get("num_speculative_tokens")
        if not isinstance(largest, int) or isinstance(largest, bool) or largest < 1:
            raise ConfigError(
                "drafter.speculative_config",
                given=self.speculative_config,
                allowed="a mapping with num_speculative_tokens (the largest K, an integer from 1)",
                fix="Add num_speculative_tokens, or set it to null for no drafter.",
            )
        return self

    @property
    def max_draft_tokens(self) -> int:
        """The largest K, 0 without a drafter."""
        return int(self.speculative_config["num_speculative_tokens"]) if self.speculative_config else 0


class EngineConfig(Section):
    """How stock vLLM is started."""

    in_process: bool = Field(
        True,
        description="Run vLLM's engine core in this process: starts 25 s sooner on a CPU and needs no "
        "messages between processes. False gives it a process of its own.",
    )
    allow_unsupported_vllm: bool = Field(
        False, description="Start on a vLLM version that rlspec was not tested with; its checks still run."
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's engine arguments under their own names (max_model_len, max_num_seqs, dtype, "
        "tensor_parallel_size, ...). What is not named keeps vLLM's default; the embedded policy brings "
        "its own.",
    )


class ObservabilityConfig(Section):
    """Logs and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="rlspec's own logger."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="`json`: one object a line, for collectors."
    )
    vllm_log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="vLLM's logger; at `info` it prints about 80 lines a start."
    )
    prometheus_port: Int | None = Field(
        None, ge=0, le=65535, description="Serve /metrics on this port of 127.0.0.1; 0 takes a free one."
    )


class DriftConfig(Section):
    """When the trainer's logprobs part too far from the engine's; null switches a threshold off."""

    max_mean_abs: float | None = Field(
        0.05,
        gt=0.0,
        description="Largest mean |trainer - engine| logprob, nats a token. bf16 on both sides gives 0.01 to "
        "0.04; NeMo RL asks for a look above a mean exp|difference| of 1.05, which is this. fp32: try 1e-3.",
    )
    max_abs: float | None = Field(
        2.0,
        gt=0.0,
        description="Largest |difference| of one token, nats. The worst of many bf16 tokens is off by 0.3 to "
        "1; twice that is a factor of 7 in probability, more than rounding explains. fp32: try 1e-2.",
    )
    min_effective_sample_size: float | None = Field(
        0.95,
        gt=0.0,
        le=1.0,
        description="Smallest effective sample size, a fraction of the tokens. Normal differences of spread "
        "s leave exp(-s^2): bf16 (s about 0.04) 0.998; 0.95 is a spread of 0.23, five times that.",
    )
    max_k3_kl: float | None = Field(
        0.01,
        gt=0.0,
        description="Largest estimate of KL(engine || trainer), nats a token. Small differences of spread s "
        "give s^2 / 2: bf16 about 0.001; ten times that. NeMo RL gates a test run of its own at 0.01 too.",
    )
    window_tokens: Int = Field(
        65_536,
        ge=1,
        description="Tokens looked back on; the last call counts whole even if it has more. At a bf16 spread "
        "the mean is then known to 0.0002, and a fault is out of sight a few small batches after its repair.",
    )


class Config(Section):
    """The whole configuration of an `Accelerator`."""

    policy: PolicyConfig = Field(default_factory=lambda: PolicyConfig())
    drafter: DrafterConfig = Field(default_factory=lambda: DrafterConfig())
    speculation: SpeculationConfig = Field(default_factory=lambda: SpeculationConfig())
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    sampling: SamplingConfig = Field(default_factory=lambda: SamplingConfig())
    observability: ObservabilityConfig = Field(default_factory=lambda: ObservabilityConfig())
    drift: DriftConfig = Field(default_factory=lambda: DriftConfig())

    @model_validator(mode="after")
    def _check(self) -> Config:
        k, largest = self.speculation.num_draft_tokens, self.drafter.max_draft_tokens
        if k is not None and k > largest:
            raise ConfigError(
                "speculation.num_draft_tokens",
                given=k,
                allowed=f"0 to {largest}, the drafter's num_speculative_tokens",
                fix="Lower it, or raise drafter.speculative_config.num_speculative_tokens.",
            )
        return self

    @property
    def is_embedded(self) -> bool:
        """Whether the policy is the one that rlspec brings along."""
        return self.policy.model == EMBEDDED_POLICY

    @property
    def vllm_args(self) -> dict[str, Any]:
        """`engine.vllm_args`, for the embedded policy laid over `EMBEDDED_VLLM_ARGS`."""
        return {**(EMBEDDED_VLLM_ARGS if self.is_embedded else {}), **self.engine.vllm_args}

    @property
    def num_draft_tokens(self) -> int:
        """K of the `fixed` policy."""
        k = self.speculation.num_draft_tokens
        return self.drafter.max_draft_tokens if k is None else k


NOT_OURS = {
    "sampling.logprobs": "The logprob of each sampled token always comes back.",
    "sampling.prompt_logprobs": "Take them from the trainer.",
    "sampling.output_kind": "`stream` yields each response when it has ended.",
}
"""Keys that users of vLLM look for, and what there is instead."""


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Validate a nested mapping; the first fault is raised as a `ConfigError` naming its key."""
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        raise _first_fault(error) from None


def with_sampling(config: Config, changes: Mapping[str, Any]) -> SamplingConfig:
    """The config's sampling parameters with some of them changed, validated.

    Raises:
        ConfigError: A name is unknown or a value is not accepted.
    """
    if not isinstance(changes, Mapping):
        fix = "Give a mapping of vLLM's names, or a SamplingConfig."
        raise ConfigError("sampling", given=changes, allowed="a mapping", fix=fix)
    return change_sampling(config.sampling, changes)


def change_sampling(sampling: SamplingConfig, changes: Mapping[str, Any]) -> SamplingConfig:
    """Sampling parameters with some of them changed, validated.

    Raises:
        ConfigError: A name is unknown or a value is not accepted.
    """
    tree = {**sampling.model_dump(exclude_unset=True), **changes}
    return parse_config({"sampling": tree}).sampling


def _first_fault(error: ValidationError) -> ConfigError:
    fault = error.errors()[0]
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path) or "config"
    if fault["type"] == "extra_forbidden":
        section = _section_at(path[:-1])
        hint = NOT_OURS.get(key) or nearest(path[-1], section.model_fields)
        fix = f"Remove it or correct its name. {hint}"
        return ConfigError(key, given=fault["input"], allowed="no such key", fix=fix)
    fix = "`rlspec config show` explains each key."
    return ConfigError(key, given=fault["input"], allowed=str(fault["msg"]), fix=fix)


def _section_at(path: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in path:
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return section
