"""Owns the repair that gives requests without drafts min_p and logit_bias (see `vllm_patches.py`).

vLLM builds these processors only in engines without a drafter. Rows without drafts go through its ordinary
sampler, which applies whatever was built; the rejection sampler applies none of them to draft rows, so our
scheduler gives no drafts to requests that ask for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rollout.vllm_support import wrap_once

RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
"""Binds the builder under a name of its own; the CPU runner is a subclass of this one."""


def apply_plain_processors() -> None:
    """Put the builder in its module, and in the runner's if that is loaded already."""
    from vllm.v1.sample import logits_processor

    wrap_once(logits_processor, "build_logitsprocs", _build_all)
    if RUNNER_MODULE in sys.modules:
        wrap_once(sys.modules[RUNNER_MODULE], "build_logitsprocs", _build_all)


def _build_all(
    original: Callable[..., Any],
    vllm_config: Any,
    device: Any,
    is_pin_memory: bool,
    is_pooling_model: bool,
    custom_logitsprocs: Sequence[Any] = (),
) -> Any:
    """vLLM's own processors, as it builds them without a drafter; custom ones are still refused with one."""
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

    if vllm_config.speculative_config is None or is_pooling_model or custom_logitsprocs:
        return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
    return LogitsProcessors(kind(vllm_config, device, is_pin_memory) for kind in BUILTIN_LOGITS_PROCESSORS)


def check_plain_processors() -> str | None:
    """Build the processors of a small engine with a drafter, with the builder that the runner calls."""
    import torch
    from vllm.v1.sample import logits_processor

    module = sys.modules.get(RUNNER_MODULE, logits_processor)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(), scheduler_config=SimpleNamespace(max_num_seqs=1)
    )
    built = module.build_logitsprocs(config, torch.device("cpu"), False, False)
    missing = set(logits_processor.BUILTIN_LOGITS_PROCESSORS) - {type(processor) for processor in built.all}
    names = ", ".join(sorted(kind.__name__ for kind in missing))
    return f"With a drafter these logits processors are not built: {names}." if missing else None
