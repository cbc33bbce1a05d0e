"""Owns how an engine is started: everything that can be refused is refused before the long part."""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import ExitStack
from typing import Any

from vllm import LLM
from vllm.exceptions import VLLMError

from rlspec.config import Config, DrafterConfig
from rlspec.errors import ConfigError, EngineError
from rlspec.kv_memory import KvMemory
from rlspec.openmp import warn_without_openmp
from rollout.checkpoints import read_checkpoint, weights_fingerprint
from rollout.drafter_checks import DRAFTER_FIELD, check_drafter
from rollout.embedded_policy import embedded_policy_path
from rollout.vllm_args import engine_arguments, engine_environment
from rollout.vllm_patches import patch_statuses, require_patches
from rollout.vllm_support import PatchStatus, installed_vllm_version, require_supported_vllm

logger = logging.getLogger("rlspec.rollout.engine")

START_FAULTS = (
    *(AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError),
    VLLMError,
)
"""What vLLM raises when it does not start: refusals of its own, and faults in it."""

NO_ROOM_FOR_KV_CACHE = ("KV cache", "cache blocks", "kv_cache_memory_bytes")
"""How vLLM 0.32 words its refusals when the KV cache does not fit (v1/core/kv_cache_utils.py)."""


def start_engine(config: Config, check_patches: bool = True) -> LLM:
    """Check versions, checkpoints and arguments, start vLLM, and check that the patches took.

    Args:
        config: The whole configuration.
        check_patches: False starts in spite of patches that did not take, as the audit does, which then
            shows what that means.

    Raises:
        ConfigError, ModelError, SetupError: Refused before vLLM was started, or a patch did not take.
        EngineError: vLLM did not start.
    """
    started = time.perf_counter()
    warning = require_supported_vllm(installed_vllm_version(), config.engine.allow_unsupported_vllm)
    if warning:
        logger.warning(warning)
    warn_without_openmp()
    policy_path = str(embedded_policy_path()) if config.is_embedded else config.policy.model
    arguments = engine_arguments(config, policy_path)
    policy = read_checkpoint(policy_path, "policy.model")
    if policy is not None and config.drafter.speculative_config is not None:
        check_drafter(policy, config.drafter.speculative_config)
    with engine_environment(config):
        llm = _start_vllm(arguments)
    with ExitStack() as undo:
        undo.callback(llm.llm_engine.engine_core.shutdown)  # a refused engine leaves nothing running
        if check_patches:
            _check_patches(llm)
        _check_started(config, llm)
        _skip_idle_drafter(config, llm)
        undo.pop_all()
    logger.info("engine ready in %.1f s: %s", time.perf_counter() - started, policy_path)
    return llm


def _check_patches(llm: LLM) -> None:
    """Refuse an engine with a patch that did not take in one of its processes."""
    require_patches(patch_statuses())
    for rows in llm.collective_rpc("rlspec_patch_rows"):
        require_patches(tuple(PatchStatus(*row) for row in rows))


def _check_started(config: Config, llm: LLM) -> None:
    """Refuse what only a started engine can tell: its model runner, drafts as long as its context."""
    refuse_plain_on_v2(config, llm.llm_engine.vllm_config.use_v2_model_runner)
    max_model_len = llm.llm_engine.model_config.max_model_len
    if config.drafter.max_draft_tokens >= max_model_len:
        raise ConfigError(
            "drafter.speculative_config.num_speculative_tokens",
            given=config.drafter.max_draft_tokens,
            allowed=f"less than max_model_len {max_model_len}",
            fix="Lower it: drafts far ahead are rarely accepted.",
        )


def _skip_idle_drafter(config: Config, llm: LLM) -> None:
    """Let the drafter rest while K is 0, where this vLLM and this method allow it."""
    speculation = config.speculation
    if config.drafter.speculative_config is None or not speculation.skip_idle_drafter:
        return
    answers = llm.collective_rpc("rlspec_skip_idle_drafter", args=(speculation.catch_up_tokens,))
    for reason in {answer for answer in answers if answer is not None}:
        logger.warning("the drafter runs at K = 0 too (speculation.skip_idle_drafter): %s", reason)


def refuse_plain_on_v2(config: Config, use_v2_model_runner: bool) -> None:
    """Refuse requests without drafts beside a drafter where min_p and logit_bias may be ignored.

    Raises:
        ConfigError: vLLM chose its V2 runner, which samples in other code than the patch repairs.
    """
    is_wanted = config.speculation.on_unsupported == "plain" and config.drafter.speculative_config is not None
    if is_wanted and use_v2_model_runner:
        raise ConfigError(
            "speculation.on_unsupported",
            given="plain",
            allowed="error with vLLM's V2 model runner, for which this is not tested",
            fix="Set it to error, or set the environment variable VLLM_USE_V2_MODEL_RUNNER=0.",
        )


def drafter_version(drafter: DrafterConfig) -> str:
    """The drafter's name in rollouts: `none`, the method, or method and weights' fingerprint."""
    if drafter.version is not None:
        return drafter.version
    speculative = drafter.speculative_config
    if speculative is None:
        return "none"
    method, model = speculative.get("method", "draft_model"), speculative.get("model")
    has_weights = model is not None and method != "custom_class"
    checkpoint = read_checkpoint(model, DRAFTER_FIELD) if has_weights else None
    if checkpoint is not None:
        return f"{method}:{weights_fingerprint(checkpoint.path)}"
    return f"{method}:{model}" if model else str(method)


def kv_memory(llm: LLM) -> KvMemory:
    """The worker with the least room decides; pipeline stages without the drafter have none of its layers."""
    answers = llm.collective_rpc("rlspec_kv_memory")
    return KvMemory(int(min(tokens for tokens, _ in answers)), max(share for _, share in answers))


def _start_vllm(arguments: dict[str, Any]) -> LLM:
    try:
        with warnings.catch_warnings():
            # vLLM's kernel registration looks at every object of every module, deprecated ones of torch too.
            warnings.filterwarnings("ignore", message=".*torch.distributed.reduce_op", category=FutureWarning)
            return LLM(**arguments)
    except START_FAULTS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if any(words in reason for words in NO_ROOM_FOR_KV_CACHE):
            raise EngineError(
                "engine.vllm_args.kv_cache_memory_bytes",
                given=arguments.get("kv_cache_memory_bytes", "vLLM's own choice"),
                allowed=reason,
                fix="Give the KV cache more memory, or lower engine.vllm_args.max_model_len.",
            ) from error
        fix = "The cause is above; correct engine.vllm_args, policy.model or drafter.speculative_config."
        raise EngineError(
            "engine", given=arguments["model"], allowed=f"a start without: {reason}", fix=fix
        ) from error
