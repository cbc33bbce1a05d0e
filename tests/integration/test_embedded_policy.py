"""Owns the tests of the embedded policy itself: made once, fp32, and a model that answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.checkpoints import read_checkpoint
from rollout.embedded_policy import embedded_policy_path

CACHED_CALL_SECONDS = 1.0
"""A call that finds the checkpoint looks at one directory."""

MAX_NEW_TOKENS = 40
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def policy_path() -> Path:
    return embedded_policy_path()


@pytest.fixture(scope="module")
def tokenizer(policy_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy_path, local_files_only=True)


def test_a_second_call_only_looks(policy_path: Path) -> None:
    started = time.perf_counter()
    assert embedded_policy_path() == policy_path
    assert time.perf_counter() - started < CACHED_CALL_SECONDS
    assert not policy_path.with_name(f"{policy_path.name}.partial").exists()
    assert not list(policy_path.glob("*.gguf")), "only the checkpoint stays"


def test_it_is_a_plain_fp32_llama(policy_path: Path) -> None:
    facts = read_checkpoint(policy_path, "policy.model")
    assert facts is not None
    assert (facts.architecture, facts.hidden_size, facts.vocab_size) == ("LlamaForCausalLM", 576, 49152)
    assert (facts.num_hidden_layers, facts.max_position_embeddings) == (30, 8192)
    assert {tensor.dtype for tensor in facts.tensors.values()} == {"F32"}
    config = json.loads((policy_path / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config


def test_a_turn_ends_with_the_end_of_sequence(policy_path: Path, tokenizer: Any) -> None:
    generation = json.loads((policy_path / "generation_config.json").read_text())
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation["eos_token_id"] == tokenizer.eos_token_id == end_of_turn == 2
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    token_ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert token_ids == tokenizer(prompt)["input_ids"], "no token is added in front"


@pytest.mark.parametrize("text", ["x = 12345", "a\n\n5", "sum:  7", "don't stop\n", "naïve 日本 🙂"])
def test_text_comes_back_and_digits_stand_alone(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    for token in tokenizer.convert_ids_to_tokens(token_ids):
        assert token.isdigit() == any(letter in "0123456789" for letter in token), token


def test_white_space_before_a_digit_is_one_token(tokenizer: Any) -> None:
    """SmolLM2's own tokenizer splits at digits first; GPT-2's rule would give two line ends."""
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n5")["input_ids"]) == ["ĊĊ", "5"]


def test_it_answers(policy_path: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32, local_files_only=True)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    print(f"greedy answer: {text!r}")
    assert "5" in text
    assert int(answer[-1]) == tokenizer.eos_token_id, "it ends its turn by itself"
