"""Owns what is mixed into every vLLM worker: answers about the worker's own process, new policy weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from vllm.config import LoadConfig

from rollout.idle_drafter import METHODS_THAT_CATCH_UP, METHODS_WITHOUT_STATE, IdleDrafter
from rollout.vllm_patches import patch_statuses

LOAD_ERRORS = (
    *(RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, OSError, MemoryError),
    SafetensorError,
)
"""What vLLM's and torch's loaders raise. Anything else ends the engine too, without a reason by name."""

LAYERS_WITHOUT_TENSORS = ("ParallelLMHead", "RotaryEmbedding")
"""How the names of these layers' classes end. `policy_checks.py` has seen to it that no tensor is missing."""

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WorkerExtension:
    """Given to vLLM as `worker_extension_cls`; its methods are reached with `collective_rpc`."""

    def rlspec_patch_rows(self) -> list[list[object]]:
        """The state of each patch in this worker, as plain values."""
        return [list(status.as_row()) for status in patch_statuses()]

    def rlspec_skip_idle_drafter(self, window_tokens: int) -> str | None:
        """Do not run the drafter while K is 0; returns why this worker's drafter keeps running."""
        runner = self.model_runner
        config = self.vllm_config.speculative_config
        if not hasattr(runner, "drafter"):  # another pipeline stage has it
            return None
        if self.vllm_config.use_v2_model_runner:
            return "vLLM's V2 model runner drafts in other code"
        if config.method not in METHODS_THAT_CATCH_UP | METHODS_WITHOUT_STATE:
            return f"the method {config.method!r} cannot catch up"
        if config.disable_padded_drafter_batch or getattr(runner, "uses_mrope", False):
            return "disable_padded_drafter_batch, or a policy with M-RoPE"
        self._idle_drafter = IdleDrafter(runner, window_tokens)
        runner.propose_draft_token_ids = self._idle_drafter.propose
        runner._sample = self._idle_drafter.sample
        return None

    def rlspec_kv_memory(self) -> list[float]:
        """Tokens that this worker's KV cache holds, and the share of its bytes in the drafter's layers."""
        runner = self.model_runner
        drafter = getattr(runner, "drafter", None)
        own = getattr(drafter, "_draft_attn_layer_names", ())
        total = drafters = 0
        for group in runner.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            by_layer = getattr(spec, "kv_cache_specs", None)  # layers of different sizes
            for name in group.layer_names:
                size = (by_layer[name] if by_layer else spec).page_size_bytes
                total += size
                drafters += size if name in own else 0
        num_tokens = runner.kv_cache_config.num_blocks * self.vllm_config.cache_config.block_size
        return [num_tokens, drafters / total if total else 0.0]

    def rlspec_idle_drafter_counts(self) -> list[int]:
        """Steps without the drafter, and tokens that it caught up on; empty where it is not skipped."""
        idle = getattr(self, "_idle_drafter", None)
        return [] if idle is None else [idle.num_skipped_steps, idle.num_caught_up_tokens]

    def rlspec_load_policy(self, path: str) -> str | None:
        """Load a checkpoint's weights into the policy in place, this worker's share of them.

        Returns:
            None, or why it failed: the weights are then neither the old nor the new ones.
        """
        try:
            with _quiet(self.vllm_config.load_config):
                self.reload_weights(weights_path=path)
        except LOAD_ERRORS as error:
            return f"{type(error).__name__}: {error}"
        if (idle := getattr(self, "_idle_drafter", None)) is not None:
            idle.forget()
        return None


@contextmanager
def _quiet(load_config: LoadConfig) -> Iterator[None]:
    """Leave out the progress bar, and vLLM 0.32's warnings of layers that get no tensor of a checkpoint.

    A tied lm_head has none of its own, and rotary embeddings are computed.
    """
    logger, shows_progress = logging.getLogger(RELOAD_LOGGER), load_config.use_tqdm_on_load
    logger.addFilter(_is_worth_saying)
    load_config.use_tqdm_on_load = False
    try:
        yield
    finally:
        logger.removeFilter(_is_worth_saying)
        load_config.use_tqdm_on_load = shows_progress


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not str(record.args[0] if record.args else "").endswith(LAYERS_WITHOUT_TENSORS)
