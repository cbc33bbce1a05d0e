"""Owns what checkpoint directories hold, read from their files without torch or vLLM.

config.json is JSON; safetensors is an 8-byte length, a JSON header and raw numbers. The numbers are read
here, because numpy knows no bfloat16. `drafter_checks.py` and `policy_checks.py` judge these facts.
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

INDEX_FILE = "model.safetensors.index.json"
"""Says which file of a sharded checkpoint holds which tensor; files that it does not name are not loaded."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    def numbers(self) -> NDArray[Any]:
        """The numbers, flat, mapped from the file; empty for formats unknown here (FP8, BOOL)."""
        dtype = NUMPY_DTYPES.get(self.dtype)
        if dtype is None or self.size_bytes == 0:
            return np.empty(0, dtype=np.float32)
        count = self.size_bytes // np.dtype(dtype).itemsize
        return np.memmap(self.file, dtype=dtype, mode="r", offset=self.offset_bytes, shape=(count,))

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity; True for formats unknown here."""
        numbers = self.numbers()
        chunks = (numbers[start : start + CHUNK_NUMBERS] for start in range(0, len(numbers), CHUNK_NUMBERS))
        if self.dtype == "BF16":
            return all(((chunk & BF16_EXPONENT) != BF16_EXPONENT).all() for chunk in chunks)
        return all(np.isfinite(chunk).all() for chunk in chunks)


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
        settings: config.json, the language model's part on top.
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
    settings: Mapping[str, Any]

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def non_finite_tensor(self) -> str | None:
        """The first tensor with a NaN or an infinity, if there is one."""
        return next((name for name, tensor in self.tensors.items() if not tensor.is_finite), None)


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
    tensors = {
        name: tensor for file in _weight_files(path, field) for name, tensor in _tensors_of(file, field)
    }
    return _facts(path, config, tensors)


def weights_fingerprint(path: str | Path) -> str:
    """First 12 hex digits of the sha256 over the weight files, in the order of their names."""
    digest = hashlib.sha256()
    for file in _weight_files(Path(path), "weights"):
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
    missing = sorted(name for name in _indexed_files(path, field) if not (path / name).is_file())
    if missing or not _weight_files(path, field):
        raise ModelError(
            field,
            given=f"{path} without {', '.join(missing) or 'weights'}",
            allowed=f"a directory with config.json and {', '.join(WEIGHT_PATTERNS)}",
            fix="Copy or save the checkpoint again, weights included.",
        )


def _weight_files(path: Path, field: str) -> list[Path]:
    """The files that vLLM loads."""
    found = (sorted(path.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    files = next((files for files in found if files), [])
    indexed = _indexed_files(path, field)
    return [file for file in files if file.name in indexed] if indexed else files


def _indexed_files(path: Path, field: str) -> set[str]:
    """Names of the files that a sharded checkpoint's index lists; empty without an index."""
    index = path / INDEX_FILE
    return set(_read_json(index, field).get("weight_map", {}).values()) if index.is_file() else set()


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
        settings=model,
    )
