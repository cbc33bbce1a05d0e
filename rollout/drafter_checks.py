"""Owns the verdict on a drafter's checkpoint beside its policy's, before an engine is started.

vLLM itself starts with a head of the wrong size, vocabulary or with NaN weights, and then accepts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlspec.errors import ModelError
from rollout.checkpoints import CheckpointFacts, read_checkpoint

DRAFTER_FIELD = "drafter.speculative_config.model"

NUM_AUX_LAYERS = 3
"""Layers of the policy whose hidden states an EAGLE-3 head reads, unless its config lists others."""


def check_drafter(policy: CheckpointFacts, speculative_config: Mapping[str, Any]) -> None:
    """Check a drafter with weights beside its policy; methods and formats unknown here are left to vLLM.

    Raises:
        ModelError: The drafter is incomplete or does not fit the policy.
    """
    model = speculative_config.get("model")
    method = speculative_config.get("method") or _method_of_name(str(model))
    if model is None or method not in ("eagle", "eagle3", "draft_model"):
        return
    drafter = read_checkpoint(model, DRAFTER_FIELD)
    if drafter is None:
        return
    if method == "draft_model":
        heterogeneous = bool(speculative_config.get("use_heterogeneous_vocab", False))
        check_draft_model(policy, drafter, use_heterogeneous_vocab=heterogeneous)
    else:
        check_draft_head(policy, drafter, method)


def check_draft_model(
    policy: CheckpointFacts, draft: CheckpointFacts, *, use_heterogeneous_vocab: bool = False
) -> None:
    """Check a drafter that is a whole language model.

    Raises:
        ModelError: It is a draft head, its vocabulary is not the policy's, or a weight is not finite.
    """
    if draft.speculators_type or "eagle" in draft.architecture.lower():
        raise _misfit(
            given=f"{draft.path} with the architecture {draft.architecture}",
            allowed="a whole language model, for the method draft_model",
            fix=f"Set drafter.speculative_config.method to {draft.speculators_type or 'eagle3 (or eagle)'}.",
        )
    if not use_heterogeneous_vocab:
        fix = "Use a draft model of the policy's family, or set use_heterogeneous_vocab to true."
        _require_equal("vocab_size", draft.vocab_size, policy.vocab_size, draft, fix)
    _check_finite(draft)


def check_draft_head(policy: CheckpointFacts, head: CheckpointFacts, method: str) -> None:
    """Check an EAGLE or EAGLE-3 head, in vLLM's own format or that of `speculators`.

    Raises:
        ModelError: A size differs from the policy's, a tensor is missing or misshapen, the draft vocabulary
            does not map into the policy's, or a weight is not finite.
    """
    fix = "Use a head that was trained for this policy."
    _require_equal("vocab_size", head.vocab_size, policy.vocab_size, head, fix)
    width = head.target_hidden_size or head.hidden_size
    _require_equal("hidden_size of the policy", width, policy.hidden_size, head, fix)
    if method == "eagle3":
        _check_aux_layers(policy, head)
    if head.tensors:
        _check_shapes(policy, head, method)
        _check_draft_vocabulary(policy, head)
        _check_finite(head)


def _method_of_name(model: str) -> str:
    """vLLM 0.32's guess at the method when none is given (config/speculative.py)."""
    name = model.lower()
    return "eagle" if "eagle-" in name else "eagle3" if "eagle3" in name else "draft_model"


def _check_aux_layers(policy: CheckpointFacts, head: CheckpointFacts) -> None:
    """vLLM collects a layer once and skips one that the policy lacks; then `fc` gets too few columns."""
    depth = policy.num_hidden_layers
    if depth is None or not head.uses_aux_layers:
        return
    default = (2, depth // 2, depth - 3)  # vLLM 0.32: model_executor/models/interfaces.py
    layers = head.aux_layer_ids or default
    if len(set(layers)) < len(layers) or not all(0 <= layer <= depth for layer in layers):
        raise _misfit(
            given=f"{head.path}, which reads the policy's layers {layers}"
            + ("" if head.aux_layer_ids else " (vLLM's default)"),
            allowed=f"distinct layers from 0 (the embeddings) to {depth}",
            fix="Write the layers it was trained on into its config.json: eagle_aux_hidden_state_layer_ids.",
        )


def _check_shapes(policy: CheckpointFacts, head: CheckpointFacts, method: str) -> None:
    shapes = head.tensor_shapes
    hidden, width = head.hidden_size, policy.hidden_size
    if width is None or policy.vocab_size is None:
        return
    num_drafts = head.draft_vocab_size or head.vocab_size
    expected: dict[str, tuple[int | None, ...]] = {}
    if method == "eagle":
        expected["fc.weight"] = (hidden, 2 * width)  # the token's embedding and the hidden state
    elif head.uses_aux_layers:
        expected["fc.weight"] = (hidden, (len(head.aux_layer_ids) or NUM_AUX_LAYERS) * width)
    # Without its own, vLLM shares the policy's where the shapes agree, and leaves random numbers otherwise.
    if "embed_tokens.weight" in shapes or hidden != width:
        expected["embed_tokens.weight"] = (head.vocab_size, hidden)
    if "lm_head.weight" in shapes or hidden != width or num_drafts != policy.vocab_size:
        expected["lm_head.weight"] = (num_drafts, hidden)
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None and any(other.startswith(name.removesuffix("weight")) for other in shapes):
            continue  # quantised: its numbers have other names
        if found is None or not _agree(found, shape):
            raise _misfit(
                given=f"{head.path} with {name} {'missing' if found is None else f'of shape {found}'}",
                allowed=f"{name} of shape {shape}, for a policy of hidden size {width}",
                fix=f"Use a head that was trained for this policy with the method {method}.",
            )


def _agree(found: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(wanted in (None, size) for size, wanted in pairs)


def _check_draft_vocabulary(policy: CheckpointFacts, head: CheckpointFacts) -> None:
    """Draft token i stands for the policy's token i + d2t[i]."""
    vocab_size, num_drafts = policy.vocab_size, head.draft_vocab_size or head.vocab_size
    if vocab_size is None or num_drafts is None:
        return
    mapping = head.tensors.get("d2t")
    if num_drafts > vocab_size:
        given, allowed = f"draft_vocab_size {num_drafts}", f"at most the policy's vocab_size {vocab_size}"
    elif mapping is None:
        if num_drafts == vocab_size:
            return
        given, allowed = f"draft_vocab_size {num_drafts} without d2t", "d2t, one offset a draft token"
    elif num_drafts == vocab_size:
        given, allowed = (
            f"d2t and a draft_vocab_size of {num_drafts}",
            "no d2t for the policy's own vocabulary",
        )
    elif mapping.shape != (num_drafts,):
        given, allowed = f"d2t of shape {mapping.shape}", f"d2t of shape {(num_drafts,)}, one a draft token"
    else:
        token_ids = np.arange(num_drafts) + mapping.numbers()
        inside = bool(((token_ids >= 0) & (token_ids < vocab_size)).all())
        if inside and len(np.unique(token_ids)) == num_drafts:
            return
        given = f"d2t that leads to tokens {token_ids.min()} to {token_ids.max()}"
        given += ", some of them twice" if inside else ""
        allowed = f"distinct tokens from 0 to {vocab_size - 1}"
    fix = "Use a head that was trained for this policy, or export it again with its d2t."
    raise _misfit(given=f"{head.path} with {given}", allowed=allowed, fix=fix)


def _check_finite(drafter: CheckpointFacts) -> None:
    name = drafter.non_finite_tensor
    if name is not None:
        raise _misfit(
            given=f"{drafter.path} with NaN or infinity in {name}",
            allowed="finite weights",
            fix="Use an earlier checkpoint of it: its training diverged.",
        )


def _misfit(*, given: str, allowed: str, fix: str) -> ModelError:
    return ModelError(DRAFTER_FIELD, given=given, allowed=allowed, fix=fix)


def _require_equal(
    name: str, found: int | None, wanted: int | None, drafter: CheckpointFacts, fix: str
) -> None:
    if found is not None and wanted is not None and found != wanted:
        raise _misfit(
            given=f"{drafter.path} with {name} {found}",
            allowed=f"{name} {wanted}, as the policy has",
            fix=fix,
        )
