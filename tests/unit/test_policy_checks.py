"""What is refused about a checkpoint that shall replace the running policy, from its files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlspec.errors import ModelError
from rollout.checkpoints import INDEX_FILE, CheckpointFacts, read_checkpoint
from rollout.policy_checks import check_replacement, read_hub_checkpoint
from rollout.tiny_models import read_config, write_checkpoint, write_tiny_draft_model, write_tiny_target

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def running(tmp_path: Path) -> CheckpointFacts:
    facts = read_checkpoint(write_tiny_target(tmp_path / "running"), "policy.model")
    assert facts is not None
    return facts


@pytest.fixture
def new(tmp_path: Path, running: CheckpointFacts) -> Path:
    return write_tiny_draft_model(tmp_path / "new", running.path)


def change_config(path: Path, **changes: object) -> None:
    (path / "config.json").write_text(json.dumps({**read_config(path), **changes}))


def change_tensor(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    tensors = load_file(path / WEIGHTS)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, path / WEIGHTS)


def with_nan(values: np.ndarray) -> np.ndarray:
    values[-1, -1] = np.nan
    return values


def write_shards(path: Path, *, left_out: str = "") -> None:
    """Split the weights in two files with an index, as save_pretrained does with large models."""
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside if name != left_out}, path / file)
    weight_map = {name: file for file, inside in shards.items() for name in inside}
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_other_numbers_are_accepted(running: CheckpointFacts, new: Path) -> None:
    change_config(new, transformers_version="9", use_cache=False, torch_dtype="bfloat16", rope_theta=1.0)
    assert check_replacement(running, new).path == new
    assert check_replacement(running, str(new)).path == new


def test_shards_are_accepted_and_stray_files_beside_them_ignored(running: CheckpointFacts, new: Path) -> None:
    write_shards(new)
    save_file({"stray": np.ones(2, dtype=np.float32)}, new / "adapter.safetensors")
    assert check_replacement(running, new).tensors.keys() == running.tensors.keys()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (shutil.rmtree, "the directory of a checkpoint"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / WEIGHTS).unlink(), "weights"),
        (lambda path: (path / WEIGHTS).rename(path / "pytorch_model.bin"), "safetensors"),
        (lambda path: change_config(path, architectures=["Qwen3ForCausalLM"]), "architecture"),
        (lambda path: change_config(path, vocab_size=49), "vocab_size"),
        (lambda path: change_config(path, num_attention_heads=2, head_dim=32), "num_attention_heads"),
        (lambda path: change_config(path, rope_parameters={"rope_theta": 5e5}), "rope_parameters"),
        (lambda path: change_config(path, tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda path: change_tensor(path, Q_PROJ, lambda values: None), f"missing: {Q_PROJ}"),
        (lambda path: change_tensor(path, Q_PROJ, lambda values: values[:, :-1]), f"shape of {Q_PROJ}"),
        (lambda path: change_tensor(path, Q_PROJ, with_nan), f"NaN or infinity in {Q_PROJ}"),
        (lambda path: write_shards(path, left_out=Q_PROJ), f"missing: {Q_PROJ}"),
    ],
)
def test_refused(running: CheckpointFacts, new: Path, spoil: Callable[[Path], object], what: str) -> None:
    spoil(new)
    with pytest.raises(ModelError) as caught:
        check_replacement(running, new)
    assert caught.value.field == "path"
    assert what in f"{caught.value.given} {caught.value.allowed}"
    assert caught.value.fix


def test_unknown_names_are_shown(running: CheckpointFacts, new: Path) -> None:
    tensors = load_file(new / WEIGHTS)
    extra = {f"value_head.{index}": np.ones(1, dtype=np.float32) for index in range(5)}
    write_checkpoint(new, read_config(new), tensors | extra)
    with pytest.raises(ModelError, match=r"unknown: value_head.0, value_head.1, value_head.2 and 2 more"):
        check_replacement(running, new)


@pytest.mark.parametrize("cut", [1, 10_000, 399_000])
def test_truncated_weights_are_refused(running: CheckpointFacts, new: Path, cut: int) -> None:
    content = (new / WEIGHTS).read_bytes()
    (new / WEIGHTS).write_bytes(content[:-cut])
    with pytest.raises(ModelError, match="complete safetensors file"):
        check_replacement(running, new)


def test_a_header_that_lies_about_sizes_is_refused(running: CheckpointFacts, new: Path) -> None:
    content = (new / WEIGHTS).read_bytes()
    (new / WEIGHTS).write_bytes(content + b"more")
    with pytest.raises(ModelError, match="complete safetensors file"):
        check_replacement(running, new)


def test_a_policy_without_safetensors_cannot_be_compared(running: CheckpointFacts, new: Path) -> None:
    (running.path / WEIGHTS).rename(running.path / "pytorch_model.bin")
    facts = read_checkpoint(running.path, "policy.model")
    assert facts is not None
    with pytest.raises(ModelError, match="compared"):
        check_replacement(facts, new)


def test_a_policy_from_the_hub_is_read_from_its_cache(
    tmp_path: Path, running: CheckpointFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="local cache"):
        read_hub_checkpoint("org/policy", None, "policy.model")
    repository = tmp_path / "cache" / "models--org--policy"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(running.path, repository / "snapshots" / ("0" * 40))
    facts = read_hub_checkpoint("org/policy", None, "policy.model")
    assert facts.tensor_shapes == running.tensor_shapes
