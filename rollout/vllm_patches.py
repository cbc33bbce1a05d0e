"""Owns every patch of stock vLLM (long: all in one place): symptom, cause, where, versions, and a check.

vLLM loads `apply_patches` as a general plugin in each of its processes, before kernels are registered.
A patch is applied only in its version range and where its platform has the defect. The checks look at
behaviour, so they also pass on a vLLM that does not need the patch. Nothing of vLLM is imported until then.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from rlspec.errors import SetupError
from rollout.plain_processors import apply_plain_processors, check_plain_processors
from rollout.shared_process import apply_shared_process, check_shared_process
from rollout.vllm_support import (
    DISABLE_VARIABLE,
    TESTED,
    Patch,
    PatchStatus,
    disabled_patches,
    installed_vllm_version,
    is_version_in,
    wrap_once,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("rlspec.rollout.patches")


def apply_patches() -> None:
    """Apply the patches that the installed vLLM needs on this platform; vLLM calls it in each process.

    Raises:
        SetupError: `RLSPEC_DISABLE_PATCHES` names an unknown patch.
    """
    disabled = disabled_patches(os.environ.get(DISABLE_VARIABLE, ""), {patch.name for patch in PATCHES})
    version = installed_vllm_version()
    wanted = [
        patch
        for patch in PATCHES
        if is_version_in(version, patch.versions) and patch.name not in disabled and patch.applies_to()
    ]
    for patch in wanted:
        patch.apply()
        _applied.add(patch.name)
    level = logging.WARNING if disabled else logging.INFO
    names = ", ".join(patch.name for patch in wanted) or "none"
    off = f"; off by {DISABLE_VARIABLE}: {', '.join(sorted(disabled))}" if disabled else ""
    logger.log(level, "vLLM %s: patches applied: %s%s", version, names, off)


def patch_statuses() -> tuple[PatchStatus, ...]:
    """Run the checks that concern this platform, in this process."""
    here = (patch for patch in PATCHES if patch.applies_to())
    return tuple(PatchStatus(patch.name, patch.name in _applied, _fault(patch)) for patch in here)


def require_patches(statuses: Sequence[PatchStatus]) -> None:
    """Refuse to go on where a check found a defect.

    Raises:
        SetupError: A check failed; names each one, its symptom and what to do.
    """
    symptoms = {patch.name: patch.symptom for patch in PATCHES}
    failing = [status for status in statuses if status.fault is not None]
    if not failing:
        return
    details = " ".join(f"{s.name}: {s.fault} Symptom: {symptoms[s.name]}" for s in failing)
    raise SetupError(
        "vLLM patches",
        given=f"no effect: {', '.join(status.name for status in failing)}",
        allowed="every patch in effect, or a vLLM that does not need it",
        fix=f"{details} Unset {DISABLE_VARIABLE}, name rlspec in VLLM_PLUGINS if that is set, "
        f"and install a tested vLLM ({TESTED}).",
    )


def _fault(patch: Patch) -> str | None:
    try:
        return patch.check()
    except (ImportError, AttributeError, TypeError) as error:
        return f"The check could not run, so this vLLM has changed where it looks: {error}."


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _expand_kernel_impl(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for its tokens, in `output` itself whatever its dtype."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts)
    output[: values.shape[0]] = values


def _apply_expand_kernel() -> None:
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand_kernel_impl


def _check_expand_kernel() -> str | None:
    import torch
    from vllm import _custom_ops  # noqa: F401  (loads the operators that stock vLLM's function calls)
    from vllm.triton_utils import HAS_TRITON, dispatcher
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    is_bound = HAS_TRITON or f"{rejection_sampler.__name__}.expand_kernel" in dispatcher._registry
    # Before a worker has registered its kernels, look at the one that it will register.
    expand = rejection_sampler._expand if is_bound else cpu_triton_utils._expand_kernel_impl
    for dtype in (torch.float32, torch.int32):
        values = torch.tensor([0, 7], dtype=dtype)
        output = torch.full((3,), -1, dtype=dtype)
        expand(output, values, torch.tensor([2, 3], dtype=torch.int32), 0, 1)
        if output.tolist() != [1, 1, 7]:
            return f"The rejection sampler's expand kernel gives {output.tolist()} for [1, 1, 7] ({dtype})."
    return None


def _apply_empty_top_k() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    wrap_once(topk_topp_sampler, "apply_top_k_only", _apply_top_k_to_rows)


def _apply_top_k_to_rows(
    original: Callable[..., torch.Tensor], logits: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return original(logits, k) if logits.shape[0] else logits


def _check_empty_top_k() -> str | None:
    import torch
    from vllm.v1.sample import rejection_sampler

    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError) as error:
        return f"top_k of a step without draft tokens raises: {error}"
    return None


def _vars_of_dicts(value: object) -> Mapping[str, Any]:
    """`vars`, but empty where `__dict__` is no dict: llvmlite's libraries answer to any attribute."""
    namespace = vars(value)
    return namespace if isinstance(namespace, dict | MappingProxyType) else {}


def _apply_rebind_kernels() -> None:
    from vllm.triton_utils import dispatcher

    dispatcher.vars = _vars_of_dicts  # shadows the builtin in that module only


class _ForeignObject:
    """Has a `__dict__` that is no dict, as the objects that numba loads have."""

    @property
    def __dict__(self) -> object:  # type: ignore[override]
        return object()


def _check_rebind_kernels() -> str | None:
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels
    original, wrapper = (lambda: None), object()
    module = ModuleType("rlspec_rebind_check")
    module.__dict__.update(foreign=_ForeignObject(), kernel=original)
    sys.modules[module.__name__] = module
    try:
        with warnings.catch_warnings():  # torch has deprecated some of the objects that it looks at
            warnings.simplefilter("ignore", FutureWarning)
            rebind([(original, wrapper)])
    except AttributeError as error:
        return f"Registering kernels stops at a foreign object: {error}."
    finally:
        del sys.modules[module.__name__]
    return None if module.kernel is wrapper else "Registering kernels leaves a module's copy as it was."


def _apply_stale_lm_head() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    # Each weight update ends here: `finalize_layerwise_reload` looks the function up when it is called.
    wrap_once(layerwise, "finalize_layerwise_processing", _finalize_and_repack)


def _finalize_and_repack(original: Callable[..., None], model: torch.nn.Module, model_config: object) -> None:
    """Pack anew each output layer that shares its weight; the others were packed as they were loaded."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    original(model, model_config)
    users = Counter(id(weight) for m in model.modules() for weight in m.parameters(recurse=False))
    for layer in model.modules():
        is_packed_head = isinstance(layer, ParallelLMHead) and "cpu_linear" in vars(layer)
        if is_packed_head and users[id(layer.weight)] > 1:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _check_stale_lm_head() -> str | None:
    """Reload a tiny tied pair of layers the way a policy update does; leaves the random state alone."""
    import torch
    from vllm.model_executor.layers import vocab_parallel_embedding as layers
    from vllm.model_executor.model_loader.reload import layerwise

    size = 64  # vLLM pads vocabularies to a multiple of 64
    embedding = layers.VocabParallelEmbedding(size, size, params_dtype=torch.float32, disable_tp=True)
    head = layers.ParallelLMHead(size, size, params_dtype=torch.float32, disable_tp=True)
    head = head.tie_weights(embedding)
    model = torch.nn.ModuleList([embedding, head])
    layerwise.record_metadata_for_reloading(model)
    embedding.weight.data.zero_()
    for layer in model:
        layer.quant_method.process_weights_after_loading(layer)
    layerwise.logger.disabled, was_disabled = True, layerwise.logger.disabled  # it warns of each tied layer
    try:
        layerwise.initialize_layerwise_reload(model)
        embedding.weight.weight_loader(embedding.weight, torch.ones(size, size))
        layerwise.finalize_layerwise_reload(model, None)
    finally:
        layerwise.logger.disabled = was_disabled
    with torch.no_grad():
        logit = float(head.quant_method.apply(head, torch.ones(1, size))[0, 0])
    return None if logit == size else f"A tied lm_head gives {logit} for {size} after a weight update."


_applied: set[str] = set()

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="expand_kernel",
        symptom="speculation at temperature > 0 does not sample from the policy.",
        cause="The kernel writes through `_ensure_int64(output)`, which for float and int32 outputs is a "
        "temporary that is never copied back: target logits are divided by uninitialised temperatures, "
        "and top_k and top_p are uninitialised too.",
        reference="vllm/utils/cpu_triton_utils.py:_expand_kernel_impl",
        versions="==0.32.*",
        applies_to=_on_cpu,
        apply=_apply_expand_kernel,
        check=_check_expand_kernel,
    ),
    Patch(
        name="empty_top_k",
        symptom="top_k with speculation kills the engine in the first step without draft tokens.",
        cause="`k.max()` of an empty tensor: the rejection sampler applies top_k to no rows.",
        reference="vllm/v1/sample/ops/topk_topp_sampler.py:apply_top_k_only",
        versions="==0.32.*",
        applies_to=_on_cpu,
        apply=_apply_empty_top_k,
        check=_check_empty_top_k,
    ),
    Patch(
        name="rebind_kernels",
        symptom="a further engine in a process that has loaded numba (n-gram drafting does) cannot start.",
        cause="`vars(value).get` is called on every object of every module, also on those whose "
        "`__dict__` is no dict.",
        reference="vllm/triton_utils/dispatcher.py:_rebind_kernels",
        versions="==0.32.*",
        applies_to=_on_cpu,
        apply=_apply_rebind_kernels,
        check=_check_rebind_kernels,
    ),
    Patch(
        name="stale_lm_head",
        symptom="after a policy update a model with tied embeddings still computes logits with old weights.",
        cause="lm_head computes with its own packed copy of the embedding. A reload packs the layers that "
        "weights were loaded into; the tied lm_head gets none, so its copy stays.",
        reference="vllm/model_executor/model_loader/reload/layerwise.py:finalize_layerwise_processing",
        versions="==0.32.*",
        applies_to=_on_cpu,
        apply=_apply_stale_lm_head,
        check=_check_stale_lm_head,
    ),
    Patch(
        name="shared_process",
        symptom="closing one engine kills the others of the process: 'parallel group is not initialized'.",
        cause="EngineCore.shutdown destroys the process groups, which all engines of a process share.",
        reference="vllm/v1/engine/core.py:EngineCore.shutdown",
        versions="==0.32.*",
        applies_to=lambda: True,
        apply=apply_shared_process,
        check=check_shared_process,
    ),
    Patch(
        name="plain_processors",
        symptom="min_p and logit_bias do nothing in an engine with a drafter, even without drafts.",
        cause="With a speculative config only the min_tokens processor is built.",
        reference="vllm/v1/sample/logits_processor/__init__.py:build_logitsprocs",
        versions="==0.32.*",
        applies_to=lambda: True,
        apply=apply_plain_processors,
        check=check_plain_processors,
    ),
)
