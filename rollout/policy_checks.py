"""Owns the verdict on a checkpoint that shall replace the running policy, before the engine is touched.

vLLM itself loads what has a matching name and warns of the rest; it never looks at config.json again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from rlspec.errors import ModelError
from rollout.checkpoints import CheckpointFacts, read_checkpoint

FIELD = "path"
"""The argument of `update_policy`."""

COMPUTATION_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "num_experts_per_tok",
)
"""Settings of config.json that change what the same weights compute. The engine keeps its own, so another
value is another model. A name that only one of the two files has is left out: transformers renames them."""

NAMES_SHOWN = 3


def check_replacement(running: CheckpointFacts, path: str | Path) -> CheckpointFacts:
    """Read a checkpoint and check that it holds the running policy's tensors with other numbers.

    Args:
        running: The checkpoint that the engine was started from.
        path: Directory of the new one.

    Raises:
        ModelError: It is missing, incomplete, another model, or a weight is not finite.
    """
    if not running.tensors:
        raise ModelError(
            "policy.model",
            given=f"{running.path} without safetensors",
            allowed="safetensors, for a policy that is updated: their names and shapes are compared",
            fix="Save the policy with save_pretrained, and make the engine from that.",
        )
    found = read_checkpoint(path, FIELD) if Path(path).is_dir() else None
    if found is None:
        fix = "Correct the path; a hub name is not fetched here."
        raise ModelError(FIELD, given=str(path), allowed="the directory of a checkpoint", fix=fix)
    if not found.tensors:
        given, fix = f"{path} without safetensors", "Save it with save_pretrained."
        raise ModelError(FIELD, given=given, allowed="weights in safetensors", fix=fix)
    _check_settings(running, found)
    _check_tensors(running, found)
    _check_files(found)
    name = found.non_finite_tensor
    if name is not None:
        fix = "Use an earlier checkpoint: the policy's training diverged."
        given = f"{path} with NaN or infinity in {name}"
        raise ModelError(FIELD, given=given, allowed="finite weights", fix=fix)
    return found


def read_hub_checkpoint(name: str, revision: str | None, field: str) -> CheckpointFacts:
    """The checkpoint that vLLM has fetched from the hub, read from its cache.

    Raises:
        ModelError: It is not in the cache.
    """
    try:
        path = snapshot_download(name, revision=revision, local_files_only=True)
        facts = read_checkpoint(path, field)
        assert facts is not None, path
    except LocalEntryNotFoundError as error:
        allowed = "a directory, or a name in the hub's local cache, for a policy that is updated"
        fix = "Download it to a directory, and make the engine from that."
        raise ModelError(field, given=name, allowed=allowed, fix=fix) from error
    return facts


def _check_settings(running: CheckpointFacts, found: CheckpointFacts) -> None:
    if found.architecture != running.architecture:
        raise _misfit(found, "architecture", found.architecture, running.architecture)
    for name in COMPUTATION_SETTINGS:
        if name in running.settings and name in found.settings:
            ours, theirs = running.settings[name], found.settings[name]
            if ours != theirs:
                raise _misfit(found, name, theirs, ours)


def _check_tensors(running: CheckpointFacts, found: CheckpointFacts) -> None:
    expected, shapes = running.tensor_shapes, found.tensor_shapes
    if expected.keys() != shapes.keys():
        missing = _shown(expected.keys() - shapes.keys())
        unknown = _shown(shapes.keys() - expected.keys())
        raise ModelError(
            FIELD,
            given=f"{found.path}; tensors missing: {missing}; unknown: {unknown}",
            allowed="the tensors of the running policy, all of them and no others",
            fix="Save the whole model under the names of the checkpoint that the engine was made from.",
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise _misfit(found, f"shape of {name}", shapes[name], shape)


def _check_files(found: CheckpointFacts) -> None:
    """What the library that vLLM reads with says of each file's header and length."""
    for file in sorted({tensor.file for tensor in found.tensors.values()}):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            fix = f"Copy or save the checkpoint again: {error}"
            raise ModelError(
                FIELD, given=str(file), allowed="a complete safetensors file", fix=fix
            ) from error


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return (", ".join(ordered[:NAMES_SHOWN]) or "none") + more


def _misfit(found: CheckpointFacts, what: str, given: object, wanted: object) -> ModelError:
    return ModelError(
        FIELD,
        given=f"{found.path} with {what} {given}",
        allowed=f"{wanted}, as the running policy has",
        fix="An update replaces weights only: make a new Accelerator for another model.",
    )
