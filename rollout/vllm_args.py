"""Owns the way from our configuration to vLLM's engine arguments, and what is refused on the way."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlspec.config import Config
from rlspec.errors import ConfigError, UnsupportedSamplingError, missing_engine, nearest

OWNED_BY_RLSPEC: Mapping[str, str] = {
    "model": "policy.model",
    "speculative_config": "drafter.speculative_config",
    "spec_method": "drafter.speculative_config",
    "spec_model": "drafter.speculative_config",
    "spec_tokens": "drafter.speculative_config",
    "scheduler_cls": "nothing: rlspec's scheduler chooses K in every step",
    "worker_extension_cls": "nothing: rlspec's worker extension checks the patches",
}
"""vLLM arguments that are set from another key of ours, or by us alone."""

METHODS_WITH_CONSTANT_K = frozenset({"suffix", "extract_hidden_states", "custom_class"})
"""Methods of vLLM 0.32 that ignore or assert away a K other than the configured one."""

METHODS_THAT_ASSERT_K = frozenset({"suffix", "extract_hidden_states"})
"""Of these, the methods whose engine dies in a step with another K."""

METHODS_THAT_NEED_DRAFTS = frozenset({"extract_hidden_states"})
"""Methods of vLLM 0.32 whose draft tokens cannot be dropped for single requests."""

LOSSLESS_VERIFICATION = frozenset({"standard", "block"})
"""`rejection_sample_method`s that keep the target's distribution: speculative sampling (2211.17192,
2302.01318) and block verification (2403.10444)."""

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


def engine_arguments(config: Config, policy_path: str) -> dict[str, Any]:
    """The keyword arguments of `vllm.LLM`.

    Args:
        config: The whole configuration.
        policy_path: Path or hub name of the policy's checkpoint.

    Raises:
        ConfigError: An argument is unknown, set elsewhere or not supported.
        UnsupportedSamplingError: Custom logits processors together with a drafter.
    """
    arguments = config.vllm_args
    _check_owned(arguments)
    _check_names("engine.vllm_args", arguments, _known_arguments()[0])
    mode = arguments.setdefault("logprobs_mode", LOGPROBS_MODES[0])
    if mode not in LOGPROBS_MODES:
        fix = "Trainers need processed_logprobs; raw_logprobs leaves temperature out."
        allowed = " or ".join(LOGPROBS_MODES)
        raise ConfigError("engine.vllm_args.logprobs_mode", given=mode, allowed=allowed, fix=fix)
    if config.drafter.speculative_config is not None:
        _check_speculation(config, arguments)
        arguments["speculative_config"] = dict(config.drafter.speculative_config)
    if config.speculation.enabled:
        arguments["scheduler_cls"] = "rollout.scheduler.live_scheduler"
    return {
        **arguments,
        "model": policy_path,
        "worker_extension_cls": "rollout.worker.WorkerExtension",
    }


@contextmanager
def engine_environment(config: Config) -> Iterator[None]:
    """The environment variables that vLLM reads while an engine starts; restored afterwards."""
    level = config.observability.vllm_log_level.upper()
    logging.getLogger("vllm").setLevel(level)
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.engine.in_process else "1"}
    # These two are the user's to override.
    defaults = {"VLLM_LOGGING_LEVEL": level, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    wanted |= {name: value for name, value in defaults.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_owned(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name in OWNED_BY_RLSPEC:
            fix = f"Remove it; set instead: {OWNED_BY_RLSPEC[name]}."
            allowed = "vLLM's arguments other than those rlspec sets"
            raise ConfigError(f"engine.vllm_args.{name}", given=arguments[name], allowed=allowed, fix=fix)
    if arguments.get("enable_lora"):
        raise ConfigError(
            "engine.vllm_args.enable_lora",
            given=True,
            allowed="false: rlspec gives requests no adapter, so it would change nothing",
            fix="Merge the adapter into the policy's weights, at start and at each update_policy.",
        )
    if arguments.get("data_parallel_size", 1) != 1:
        raise ConfigError(
            "engine.vllm_args.data_parallel_size",
            given=arguments["data_parallel_size"],
            allowed="1: ranks that disagree on K would wait for each other for ever",
            fix="Run one Accelerator a data-parallel rank.",
        )


def _check_speculation(config: Config, arguments: Mapping[str, Any]) -> None:
    speculative = config.drafter.speculative_config or {}
    prefix = "drafter.speculative_config"
    _check_names(prefix, speculative, _known_arguments()[1])
    for name in ("method", "model", "rejection_sample_method"):
        if not isinstance(speculative.get(name), str | None):
            given = speculative[name]
            raise ConfigError(f"{prefix}.{name}", given=given, allowed="a string", fix="Write one name.")
    verification = speculative.get("rejection_sample_method", "standard")
    if verification not in LOSSLESS_VERIFICATION:
        raise ConfigError(
            f"{prefix}.rejection_sample_method",
            given=verification,
            allowed=", ".join(sorted(LOSSLESS_VERIFICATION)),
            fix="RL needs the policy's own distribution; remove it.",
        )
    if "num_speculative_tokens_per_batch_size" in speculative:
        raise ConfigError(
            f"{prefix}.num_speculative_tokens_per_batch_size",
            given=speculative["num_speculative_tokens_per_batch_size"],
            allowed="no table: speculation.policy chooses K",
            fix="Remove it.",
        )
    method = speculative.get("method")
    if config.speculation.on_unsupported == "plain" and method in METHODS_THAT_NEED_DRAFTS:
        raise ConfigError(
            "speculation.on_unsupported",
            given="plain",
            allowed=f"error with the method {method!r}: its drafts are how it works, so none can be dropped",
            fix="Set it to error, or use another method.",
        )
    if method in METHODS_WITH_CONSTANT_K and config.num_draft_tokens != config.drafter.max_draft_tokens:
        raise ConfigError(
            "speculation.num_draft_tokens",
            given=config.num_draft_tokens,
            allowed=f"{config.drafter.max_draft_tokens}: the method {method!r} has no other K in vLLM",
            fix="Leave speculation.num_draft_tokens out, or use another method.",
        )
    if method in METHODS_THAT_ASSERT_K and config.speculation.policy != "fixed":
        raise ConfigError(
            "speculation.policy",
            given=config.speculation.policy,
            allowed=f"fixed: vLLM's method {method!r} drafts the same number of tokens in every step",
            fix="Set speculation.policy to fixed, or use another method.",
        )
    if arguments.get("logits_processors"):
        raise UnsupportedSamplingError(
            "engine.vllm_args.logits_processors",
            given=arguments["logits_processors"],
            allowed="none while speculating: vLLM skips them for draft tokens",
            fix="Remove them, or set drafter.speculative_config to null.",
        )


def _check_names(prefix: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            fix = f"Remove it or correct its name. {nearest(name, known)}"
            raise ConfigError(f"{prefix}.{name}", given=given[name], allowed="an argument of vLLM", fix=fix)


def _known_arguments() -> tuple[frozenset[str], frozenset[str]]:
    """Names of vLLM's engine arguments and of its `speculative_config`; importing vLLM takes seconds."""
    try:
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise missing_engine(error) from error
    engine, speculative = (dataclasses.fields(cls) for cls in (EngineArgs, SpeculativeConfig))
    return frozenset(field.name for field in engine), frozenset(field.name for field in speculative)
