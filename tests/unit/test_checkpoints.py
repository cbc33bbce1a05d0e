"""Owns the tests of what is refused about checkpoints from their files alone (long: one test a refusal)."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from rlspec.errors import ModelError
from rollout.checkpoints import CheckpointFacts, read_checkpoint, weights_fingerprint
from rollout.drafter_checks import DRAFTER_FIELD, check_draft_head, check_draft_model, check_drafter
from rollout.tiny_models import (
    read_config,
    write_checkpoint,
    write_tiny_draft_model,
    write_tiny_eagle3_head,
    write_tiny_target,
)

VOCAB_SIZE, HIDDEN_SIZE, DRAFT_VOCAB_SIZE = 48, 64, 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_target(tmp_path / "target", vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE)


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    return write_tiny_eagle3_head(tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB_SIZE)


def read(path: Path, field: str = DRAFTER_FIELD) -> CheckpointFacts:
    facts = read_checkpoint(path, field)
    assert facts is not None
    return facts


def edit(path: Path, config: dict[str, Any] | None = None, **tensors: NDArray[Any] | None) -> None:
    """Change keys and tensors of a checkpoint in place; None removes. `__` in a name stands for a dot."""
    new_tensors = {name.replace("__", "."): values for name, values in tensors.items()}
    merged_config = {**read_config(path), **(config or {})}
    merged_tensors = {**load_file(path / "model.safetensors"), **new_tensors}
    write_checkpoint(
        path,
        {key: value for key, value in merged_config.items() if value is not None},
        {name: values for name, values in merged_tensors.items() if values is not None},
    )


def refused(
    call: Callable[[], object], *, given: str, allowed: str, fix: str, field: str = DRAFTER_FIELD
) -> None:
    """The call raises a ModelError whose four attributes say this."""
    with pytest.raises(ModelError) as caught:
        call()
    error = caught.value
    assert error.field == field
    assert given in str(error.given)
    assert allowed in error.allowed
    assert fix in error.fix


def refused_head(target: Path, head: Path, *, given: str, allowed: str, fix: str = "") -> None:
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    policy = read(target, "policy.model")
    refused(lambda: check_drafter(policy, config), given=given, allowed=allowed, fix=fix)


# --- reading ---------------------------------------------------------------------------------------------


def test_facts_of_a_target(target: Path) -> None:
    facts = read(target, "policy.model")
    assert (facts.architecture, facts.vocab_size, facts.hidden_size) == ("LlamaForCausalLM", 48, 64)
    assert (facts.num_hidden_layers, facts.max_position_embeddings) == (2, 512)
    assert facts.draft_vocab_size is None
    shapes = {name: values.shape for name, values in load_file(target / "model.safetensors").items()}
    assert facts.tensor_shapes == shapes


@pytest.mark.parametrize("speculators_format", [False, True])
def test_facts_of_a_head(tmp_path: Path, target: Path, speculators_format: bool) -> None:
    path = tmp_path / "head"
    write_tiny_eagle3_head(path, target, draft_vocab_size=20, speculators_format=speculators_format)
    facts = read(path)
    assert (facts.vocab_size, facts.hidden_size, facts.draft_vocab_size) == (48, 64, 20)
    assert facts.aux_layer_ids == (0, 1, 2)
    assert facts.speculators_type == ("eagle3" if speculators_format else None)


def test_a_multimodal_config_keeps_its_numbers_under_text_config(target: Path) -> None:
    config = read_config(target)
    (target / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": config}))
    assert read(target).hidden_size == HIDDEN_SIZE


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2"])
def test_hub_names_are_left_to_vllm(name: str, target: Path) -> None:
    assert read_checkpoint(name, "policy.model") is None
    config = {"method": "eagle3", "model": name, "num_speculative_tokens": 3}
    check_drafter(read(target), config)


@pytest.mark.parametrize("path", ["./absent", "/absent", "models/absent/v1"])
def test_missing_path(path: str) -> None:
    refused(
        lambda: read_checkpoint(path, "policy.model"),
        field="policy.model",
        given=path,
        allowed="an existing directory, or a hub name",
        fix="Correct the path",
    )


def test_tilde_is_spelled_out() -> None:
    refused(
        lambda: read_checkpoint("~/absent", "policy.model"),
        field="policy.model",
        given="~/absent",
        allowed="existing directory",
        fix=f"write {Path('~/absent').expanduser()}",
    )


def test_missing_config(target: Path) -> None:
    (target / "config.json").unlink()
    refused(
        lambda: read(target, "policy.model"),
        field="policy.model",
        given="without config.json",
        allowed="config.json and weights",
        fix="Name the directory that holds config.json",
    )


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_unreadable_config(target: Path, text: str) -> None:
    (target / "config.json").write_bytes(text.encode("latin-1"))
    refused(lambda: read(target), given="config.json", allowed="JSON", fix="Save the checkpoint again")


def test_missing_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()
    refused(lambda: read(target), given="without weights", allowed="*.safetensors", fix="weights included")


def test_missing_shard(target: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(
        lambda: read(target), given="without model-2.safetensors", allowed="*.safetensors", fix="Copy or save"
    )


@pytest.mark.parametrize("size_bytes", [0, 5, 100, 100_000])
def test_truncated_weights(target: Path, size_bytes: int) -> None:
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size_bytes])
    refused(
        lambda: read(target),
        given="model.safetensors",
        allowed="complete safetensors file",
        fix="Copy or save",
    )


def test_other_weight_files_are_weights_without_known_tensors(target: Path) -> None:
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    assert read(target).tensor_shapes == {}
    assert len(weights_fingerprint(target)) == 12


# --- heads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
@pytest.mark.parametrize("speculators_format", [False, True])
@pytest.mark.parametrize("num_layers", [2, 3, 8])
def test_fitting_heads_pass(
    tmp_path: Path, draft_vocab_size: int | None, speculators_format: bool, num_layers: int
) -> None:
    target = write_tiny_target(tmp_path / "target", num_layers=num_layers)
    head = write_tiny_eagle3_head(
        tmp_path / "head", target, draft_vocab_size=draft_vocab_size, speculators_format=speculators_format
    )
    check_draft_head(read(target), read(head), "eagle3")


def test_eagle_head_passes_and_its_fc_reads_embedding_and_hidden_state(target: Path, head: Path) -> None:
    edit(
        head,
        {"draft_vocab_size": None},
        fc__weight=np.zeros((64, 128), np.float32),
        lm_head__weight=None,
        d2t=None,
    )
    check_draft_head(read(target), read(head), "eagle")
    refused(
        lambda: check_draft_head(read(target), read(head), "eagle3"),
        given="fc.weight of shape (64, 128)",
        allowed="(64, 192)",
        fix="with the method eagle3",
    )


def test_other_hidden_size(tmp_path: Path, target: Path) -> None:
    head = write_tiny_eagle3_head(tmp_path / "head", target, hidden_size=128)
    refused_head(
        target, head, given="hidden_size of the policy 128", allowed="64", fix="trained for this policy"
    )


def test_narrow_head_needs_its_own_embedding(target: Path, head: Path) -> None:
    narrow: dict[str, NDArray[Any] | None] = {
        "fc__weight": np.zeros((32, 192), np.float32),
        "lm_head__weight": np.zeros((20, 32), np.float32),
    }
    edit(head, {"hidden_size": 32, "target_hidden_size": 64}, **narrow)
    refused_head(
        target, head, given="embed_tokens.weight missing", allowed="embed_tokens.weight of shape (48, 32)"
    )
    edit(head, embed_tokens__weight=np.zeros((48, 32), np.float32))
    check_draft_head(read(target), read(head), "eagle3")


def test_other_vocabulary(target: Path, head: Path) -> None:
    edit(head, {"vocab_size": 40})
    refused_head(target, head, given="vocab_size 40", allowed="vocab_size 48", fix="trained for this policy")


@pytest.mark.parametrize("shape", [(64, 128), (32, 192), (192,)])
def test_misshapen_fc(target: Path, head: Path, shape: tuple[int, ...]) -> None:
    edit(head, fc__weight=np.zeros(shape, np.float32))
    refused_head(target, head, given=f"fc.weight of shape {shape}", allowed="fc.weight of shape (64, 192)")


def test_missing_fc(target: Path, head: Path) -> None:
    edit(head, fc__weight=None)
    refused_head(target, head, given="fc.weight missing", allowed="of shape (64, 192)", fix="method eagle3")


def test_quantised_fc_is_left_to_vllm(target: Path, head: Path) -> None:
    edit(head, fc__weight=None, fc__weight_packed=np.zeros((64, 24), np.int32))
    check_draft_head(read(target), read(head), "eagle3")


def test_lm_head_rows(target: Path, head: Path) -> None:
    edit(head, lm_head__weight=np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32))
    refused_head(
        target, head, given="lm_head.weight of shape (48, 64)", allowed="lm_head.weight of shape (20, 64)"
    )


def test_missing_lm_head_of_a_smaller_vocabulary(target: Path, head: Path) -> None:
    edit(head, lm_head__weight=None)
    refused_head(target, head, given="lm_head.weight missing", allowed="of shape (20, 64)")


def test_draft_vocabulary_larger_than_the_policys(target: Path, head: Path) -> None:
    edit(head, {"draft_vocab_size": 60}, lm_head__weight=np.zeros((60, HIDDEN_SIZE), np.float32))
    refused_head(target, head, given="draft_vocab_size 60", allowed="at most the policy's vocab_size 48")


def test_smaller_vocabulary_without_mapping(target: Path, head: Path) -> None:
    edit(head, d2t=None)
    refused_head(target, head, given="draft_vocab_size 20 without d2t", allowed="d2t", fix="with its d2t")


def test_mapping_of_the_whole_vocabulary(tmp_path: Path, target: Path) -> None:
    """vLLM 0.32 has no place for it then and fails while loading."""
    head = write_tiny_eagle3_head(tmp_path / "whole", target)
    edit(head, d2t=np.zeros(VOCAB_SIZE, np.int64))
    refused_head(target, head, given="d2t and a draft_vocab_size of 48", allowed="no d2t")


def test_mapping_of_another_length(target: Path, head: Path) -> None:
    edit(head, d2t=np.zeros(19, np.int64))
    refused_head(target, head, given="d2t of shape (19,)", allowed="d2t of shape (20,)", fix="with its d2t")


@pytest.mark.parametrize(("offset", "token_id"), [(29, 48), (-20, -1)])
def test_mapping_out_of_the_vocabulary(target: Path, head: Path, offset: int, token_id: int) -> None:
    mapping = np.zeros(DRAFT_VOCAB_SIZE, np.int64)
    mapping[-1] = offset
    edit(head, d2t=mapping)
    refused_head(
        target, head, given=f"{token_id}", allowed="distinct tokens from 0 to 47", fix="with its d2t"
    )


def test_mapping_that_names_a_token_twice(target: Path, head: Path) -> None:
    mapping = np.zeros(DRAFT_VOCAB_SIZE, np.int64)
    mapping[1] = -1
    edit(head, d2t=mapping)
    refused_head(target, head, given="some of them twice", allowed="distinct tokens from 0 to 47")


def test_default_layers_that_a_shallow_policy_lacks(target: Path, head: Path) -> None:
    edit(head, {"eagle_aux_hidden_state_layer_ids": None})
    fix = "eagle_aux_hidden_state_layer_ids"
    refused_head(
        target, head, given="(2, 1, -1) (vLLM's default)", allowed="from 0 (the embeddings) to 2", fix=fix
    )


@pytest.mark.parametrize("layers", [[0, 1, 3], [0, 1, 1]])
def test_layers_out_of_the_policy_or_twice(target: Path, head: Path, layers: list[int]) -> None:
    edit(head, {"eagle_aux_hidden_state_layer_ids": layers})
    refused_head(target, head, given=str(tuple(layers)), allowed="distinct layers from 0")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_not_finite(target: Path, head: Path, value: float, dtype: type[Any]) -> None:
    weight = np.zeros((64, 192), dtype)
    weight[63, 191] = value
    edit(head, fc__weight=weight)
    refused_head(target, head, given="NaN or infinity in fc.weight", allowed="finite weights", fix="diverged")


@pytest.mark.parametrize(("bits", "is_finite"), [(0x7F7F, True), (0x7F80, False), (0xFFC0, False)])
def test_bfloat16_weights(target: Path, head: Path, bits: int, is_finite: bool) -> None:
    """0x7F7F is the largest bfloat16, 0x7F80 infinity, 0xFFC0 a NaN."""
    write_bfloat16_norm(head, bits)
    if is_finite:
        check_draft_head(read(target), read(head), "eagle3")
    else:
        refused_head(target, head, given="NaN or infinity in norm.weight", allowed="finite", fix="diverged")


def write_bfloat16_norm(head: Path, bits: int) -> None:
    """Move norm.weight into a second safetensors file, as bfloat16 numbers of these bits."""
    edit(head, norm__weight=None)
    entry = {"dtype": "BF16", "shape": [HIDDEN_SIZE], "data_offsets": [0, 2 * HIDDEN_SIZE]}
    header = json.dumps({"norm.weight": entry}).encode()
    data = np.full(HIDDEN_SIZE, bits, "<u2").tobytes()
    (head / "norm.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


# --- draft models and dispatch ---------------------------------------------------------------------------


def test_draft_model(tmp_path: Path, target: Path) -> None:
    policy = read(target)
    draft = write_tiny_draft_model(tmp_path / "draft", target)
    config: dict[str, Any] = {"model": str(draft), "num_speculative_tokens": 3}
    check_drafter(policy, config)  # vLLM's default method is draft_model
    write_tiny_target(draft, vocab_size=40)
    refused(
        lambda: check_drafter(policy, config),
        given="vocab_size 40",
        allowed="vocab_size 48",
        fix="use_heterogeneous_vocab",
    )
    check_drafter(policy, {**config, "use_heterogeneous_vocab": True})


@pytest.mark.parametrize("speculators_format", [False, True])
def test_head_given_as_draft_model(tmp_path: Path, target: Path, speculators_format: bool) -> None:
    head = write_tiny_eagle3_head(tmp_path / "drafter", target, speculators_format=speculators_format)
    refused(
        lambda: check_draft_model(read(target), read(head)),
        given="architecture",
        allowed="a whole language model",
        fix="drafter.speculative_config.method to eagle3",
    )


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "prompt_lookup_max": 3},
        {"method": "custom_class", "model": "rollout.proposers.history.HistoryProposer"},
        {"method": "mtp"},
    ],
)
def test_drafters_without_a_checkpoint_of_their_own_pass(target: Path, config: dict[str, Any]) -> None:
    check_drafter(read(target), {**config, "num_speculative_tokens": 3})


def test_unknown_numbers_are_left_to_vllm(target: Path, head: Path) -> None:
    unknown = dataclasses.replace(read(target), hidden_size=None, vocab_size=None, num_hidden_layers=None)
    check_draft_head(unknown, read(head), "eagle3")


# --- fingerprint -----------------------------------------------------------------------------------------


def test_fingerprint_follows_the_weights_only(tmp_path: Path, target: Path) -> None:
    fingerprint = weights_fingerprint(target)
    assert len(fingerprint) == 12
    assert int(fingerprint, 16) >= 0
    copy = Path(shutil.copytree(target, tmp_path / "copy"))
    (copy / "config.json").write_text("{}")
    assert weights_fingerprint(copy) == fingerprint
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_fingerprint(str(copy)) != fingerprint


def test_tiny_checkpoints_are_reproducible(tmp_path: Path, target: Path) -> None:
    again = write_tiny_target(tmp_path / "again")
    other = write_tiny_target(tmp_path / "other", seed=1)
    assert weights_fingerprint(again) == weights_fingerprint(target) != weights_fingerprint(other)
    with pytest.raises(ValueError, match="at least 2 layers"):
        write_tiny_eagle3_head(tmp_path / "head", write_tiny_target(tmp_path / "one", num_layers=1))
