"""Owns what can be refused about checkpoints from their files alone (long: facts and verdicts in one place).

`read_checkpoint` gathers the facts, `check_drafter` judges a drafter beside its policy. Neither loads torch
or vLLM: config.json is JSON, and safetensors is an 8-byte length, a JSON header and raw numbers. The numbers
are read here, because numpy knows no bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlspec.errors import ModelError

DRAFTER_FIELD = "drafter.speculative_config.model"

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
"""Weight files in the order in which vLLM looks for them; the first kind that is there counts."""

NUMPY_DTYPES: Mapping[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
}
"""safetensors' names; bfloat16 is read as its 16 bits."""

BF16_EXPONENT = 0x7F80
"""All exponent bits set means NaN or infinity."""

CHUNK_NUMBERS = 1 << 24
"""Numbers looked at in one go, so that a large embedding needs no second copy in memory."""

NUM_AUX_LAYERS = 3
"""Layers of the policy whose hidden states an EAGLE-3 head reads, unless its config lists others."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint as its files describe it; None is a number that config.json does not give.

    Attributes:
        path: The directory.
        architecture: First entry of `architectures`, or empty.
        hidden_size: Width of the hidden states.
        vocab_size: Rows of the token embedding.
        num_hidden_layers: Decoder layers.
        max_position_embeddings: Longest context in tokens.
        draft_vocab_size: Tokens that a draft head can propose.
        target_hidden_size: The policy's width, where a draft head's own differs.
        aux_layer_ids: Layers of the policy that an EAGLE-3 head reads; empty leaves them to vLLM.
        uses_aux_layers: False for an EAGLE-3 head that reads the last hidden state alone.
        speculators_type: `speculators_model_type` of a head in that format, else None.
        tensors: By name; empty where the weights are not in safetensors.
    """

    path: Path
    architecture: str
    hidden_size: int | None
    vocab_size: int | None
    num_hidden_layers: int | None
    max_position_embeddings: int | None
    draft_vocab_size: int | None
    target_hidden_size: int | None
    aux_layer_ids: tuple[int, ...]
    uses_aux_layers: bool
    speculators_type: str | None
    tensors: Mapping[str, Tensor]

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def read_checkpoint(path_or_name: str | Path, field: str) -> CheckpointFacts | None:
    """The facts of a local checkpoint, or None for a name that vLLM will fetch from a hub.

    Args:
        path_or_name: What the user gave.
        field: Its configuration key, for errors.

    Raises:
        ModelError: It is a path, and no complete checkpoint lies there.
    """
    path = Path(path_or_name)
    if not path.exists():
        _refuse_missing_path(str(path_or_name), field)
        return None
    if not (path / "config.json").is_file():
        raise ModelError(
            field,
            given=f"{path} without config.json",
            allowed="a directory with config.json and weights, as transformers' save_pretrained writes it",
            fix="Name the directory that holds config.json.",
        )
    config = _read_json(path / "config.json", field)
    _require_weights(path, field)
    tensors = {name: tensor for file in _weight_files(path) for name, tensor in _tensors_of(file, field)}
    return _facts(path, config, tensors)


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
        ModelError: It is a draft head, or its vocabulary is not the policy's.
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


def weights_fingerprint(path: str | Path) -> str:
    """First 12 hex digits of the sha256 over the weight files, in the order of their names."""
    digest = hashlib.sha256()
    for file in _weight_files(Path(path)):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:12]


def _refuse_missing_path(given: str, field: str) -> None:
    """Tell a mistyped path from a hub name, which has one slash at most."""
    if not given.startswith((".", "/", "~")) and given.count("/") <= 1:
        return
    fix = "Correct the path; a hub name reads org/name."
    if given.startswith("~"):
        fix = f"vLLM does not expand '~': write {Path(given).expanduser()}"
    raise ModelError(field, given=given, allowed="an existing directory, or a hub name", fix=fix)


def _require_weights(path: Path, field: str) -> None:
    """Weights are there, and all files that a sharded checkpoint's index names."""
    index = path / "model.safetensors.index.json"
    shards = set(_read_json(index, field).get("weight_map", {}).values()) if index.is_file() else set()
    missing = sorted(name for name in shards if not (path / name).is_file())
    if missing or not _weight_files(path):
        raise ModelError(
            field,
            given=f"{path} without {', '.join(missing) or 'weights'}",
            allowed=f"a directory with config.json and {', '.join(WEIGHT_PATTERNS)}",
            fix="Copy or save the checkpoint again, weights included.",
        )


def _weight_files(path: Path) -> list[Path]:
    found = (sorted(path.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    return next((files for files in found if files), [])


def _read_json(file: Path, field: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = f"Save the checkpoint again: {error}"
        raise ModelError(field, given=str(file), allowed="a readable JSON file", fix=fix) from error
    if not isinstance(content, dict):
        fix = "Save the checkpoint again."
        raise ModelError(field, given=str(file), allowed="a JSON object", fix=fix)
    return content


def _tensors_of(file: Path, field: str) -> Iterator[tuple[str, Tensor]]:
    """Name and place of each tensor of a safetensors file; of other files nothing is known."""
    if file.suffix != ".safetensors":
        return
    size_bytes = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size_bytes)))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if 8 + length + end > size_bytes:
                raise ValueError(f"it ends before {name} does")
            yield name, Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            field,
            given=str(file),
            allowed="a complete safetensors file",
            fix=f"Copy or save the checkpoint again: {error}",
        ) from error


def _facts(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CheckpointFacts:
    # `speculators` and multimodal models keep the language model's numbers one level down.
    model = {**config, **(config.get("transformer_layer_config") or config.get("text_config") or {})}
    eagle = config.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    return CheckpointFacts(
        path=path,
        architecture=str((config.get("architectures") or [""])[0]),
        hidden_size=model.get("hidden_size"),
        vocab_size=model.get("vocab_size"),
        num_hidden_layers=model.get("num_hidden_layers"),
        max_position_embeddings=model.get("max_position_embeddings"),
        draft_vocab_size=config.get("draft_vocab_size"),
        target_hidden_size=config.get("target_hidden_size"),
        aux_layer_ids=tuple(config.get(name) or eagle.get(name) or ()),
        uses_aux_layers=bool(eagle.get("use_aux_hidden_state", True)),
        speculators_type=config.get("speculators_model_type"),
        tensors=tensors,
    )


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
        token_ids = np.arange(num_drafts) + _read(mapping)
        inside = bool(((token_ids >= 0) & (token_ids < vocab_size)).all())
        if inside and len(np.unique(token_ids)) == num_drafts:
            return
        given = f"d2t that leads to tokens {token_ids.min()} to {token_ids.max()}"
        given += ", some of them twice" if inside else ""
        allowed = f"distinct tokens from 0 to {vocab_size - 1}"
    fix = "Use a head that was trained for this policy, or export it again with its d2t."
    raise _misfit(given=f"{head.path} with {given}", allowed=allowed, fix=fix)


def _check_finite(head: CheckpointFacts) -> None:
    for name, tensor in head.tensors.items():
        numbers = _read(tensor)
        for start in range(0, len(numbers), CHUNK_NUMBERS):
            chunk = numbers[start : start + CHUNK_NUMBERS]
            finite = (
                (chunk & BF16_EXPONENT) != BF16_EXPONENT if tensor.dtype == "BF16" else np.isfinite(chunk)
            )
            if not finite.all():
                raise _misfit(
                    given=f"{head.path} with NaN or infinity in {name}",
                    allowed="finite weights",
                    fix="Use an earlier checkpoint of the head: its training diverged.",
                )


def _read(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a tensor, flat, mapped from the file; empty for formats unknown here (FP8, BOOL)."""
    dtype = NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None or tensor.size_bytes == 0:
        return np.empty(0, dtype=np.float32)
    count = tensor.size_bytes // np.dtype(dtype).itemsize
    return np.memmap(tensor.file, dtype=dtype, mode="r", offset=tensor.offset_bytes, shape=(count,))


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
