"""Owns what is audited: a policy, its drafters and prompts. The tiny random one, or the user's own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlspec.audit.exact import probabilities
from rlspec.audit.verdicts import Check
from rlspec.config import Config, parse_config
from rlspec.errors import ModelError
from rollout.checkpoints import read_checkpoint
from rollout.embedded_policy import embedded_policy_path
from rollout.tiny_models import (
    write_tiny_draft_model,
    write_tiny_eagle3_head,
    write_tiny_target,
    write_tiny_tokenizer,
)

NUM_DRAFT_TOKENS = 3
"""K of every drafter of the tiny subject: tokens 2 to 4 are its draft positions."""

TINY_VOCAB_SIZE = 32
TINY_LOGIT_STD = 3.0
"""Peaked enough that the pair of tokens 1 and 2 needs about 150,000 samples and not more."""
TINY_DRAFT_NOISE = 0.3
TINY_HEAD_TOKENS = 8
"""The tiny EAGLE-3 head proposes only the likeliest tokens, so that a random head is accepted at times."""

MAX_COPIED_BYTES = 2 << 30
"""Policies up to this size are copied for the weights check, and loaded twice to draft for themselves."""

PERTURBATION = 0.02
"""Noise on each matrix of the second policy, relative to its own spread: logprobs move by more than 0.01."""

TEXTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Question: A farmer has 12 cows and buys 7 more. How many cows does he have now? Answer: Let us think",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Count to one hundred. " + ", ".join(str(number) for number in range(1, 80)),
)

MANY_BLOCKS = 290
"""Tokens of the longest prompt: two blocks of the prefix cache on any platform (128 tokens on CPUs; a drafter
with the policy's hidden states computes the last one again)."""

TINY_VLLM_ARGS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 384,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 1 << 27,
    "enable_chunked_prefill": False,
}


@dataclass(frozen=True, slots=True)
class Drafter:
    """One way of drafting.

    Attributes:
        name: What results call it.
        speculative_config: vLLM's, None for plain decoding.
        checks: What is looked at with it.
    """

    name: str
    speculative_config: Mapping[str, Any] | None
    checks: frozenset[Check]

    @property
    def max_draft_tokens(self) -> int:
        """The largest K."""
        return int((self.speculative_config or {}).get("num_speculative_tokens", 0))


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy with what can draft for it.

    Attributes:
        name: What results call it.
        policy_path: Directory of the policy's checkpoint.
        config: Policy and vLLM arguments; its drafter is replaced by each of `drafters`.
        drafters: Plain decoding first.
        prompts: Token ids; the first one's continuations are enumerated where `is_enumerable`.
        is_enumerable: The vocabulary is small enough for exact marginals of tokens 1 to 4.
        other_policy: A checkpoint of the same shape to update to; None where there is none.
    """

    name: str
    policy_path: str
    config: Config
    drafters: tuple[Drafter, ...]
    prompts: tuple[tuple[int, ...], ...]
    is_enumerable: bool
    other_policy: str | None

    def config_for(self, drafter: Drafter, seed: int, vllm_args: Mapping[str, Any]) -> Config:
        """The configuration of an engine with that drafter; `vllm_args` are laid over the subject's own."""
        tree = self.config.model_dump(exclude_unset=True)
        arguments = {"disable_log_stats": False, "seed": seed, **self.config.vllm_args, **vllm_args}
        speculative = None if drafter.speculative_config is None else dict(drafter.speculative_config)
        return parse_config(
            {
                **tree,
                "drafter": {"speculative_config": speculative},
                "speculation": {"on_unsupported": self.config.speculation.on_unsupported},
                "engine": {**tree.get("engine", {}), "vllm_args": arguments},
                "sampling": {},
            }
        )


def tiny_subjects(folder: Path, seed: int, config: Config) -> tuple[Subject, ...]:
    """A random policy with every drafter, and one with tied embeddings for what those change: updates.

    Args:
        folder: Where they are written.
        seed: Of their weights.
        config: How engines are started; `engine.vllm_args` are laid over `TINY_VLLM_ARGS`.
    """
    tied_checks = frozenset({Check.LOGPROBS, Check.WEIGHTS})
    tied = _tiny_subject("tiny, tied embeddings", folder / "tied", seed, config, tied=True)
    (ngram,) = (drafter for drafter in tied.drafters if drafter.name == "ngram")
    drafters = (replace(ngram, name="ngram, tied embeddings", checks=tied_checks),)
    main = _tiny_subject("tiny", folder / "untied", seed, config, tied=False)
    return main, replace(tied, drafters=drafters)


def _tiny_subject(name: str, folder: Path, seed: int, config: Config, *, tied: bool) -> Subject:
    """A random policy with a vocabulary of 32, its draft models and an EAGLE-3 head, written to a folder."""
    shape = {"vocab_size": TINY_VOCAB_SIZE, "logit_std": TINY_LOGIT_STD, "tie_word_embeddings": tied}
    target = write_tiny_target(folder / "policy", seed=seed, **shape)
    other = write_tiny_target(folder / "other_policy", seed=seed + 1_000_000, **shape)
    for path in (target, other):
        write_tiny_tokenizer(path, TINY_VOCAB_SIZE)
    draft_model = write_tiny_draft_model(folder / "draft_model", target, seed=seed, noise=TINY_DRAFT_NOISE)
    likely = _likely_tokens(target, _covering_prompt(seed))
    head = write_tiny_eagle3_head(folder / "eagle3", target, seed=seed, draft_token_ids=likely)
    engine = config.engine.model_dump(exclude_unset=True)
    tree = {
        "policy": {"model": str(target)},
        "speculation": {"on_unsupported": config.speculation.on_unsupported},
        "engine": {**engine, "vllm_args": {**TINY_VLLM_ARGS, **config.engine.vllm_args}},
        "observability": config.observability.model_dump(),
    }
    drafters = _tiny_drafters(target, draft_model, head)
    return Subject(name, str(target), parse_config(tree), drafters, _tiny_prompts(seed), True, str(other))


def _tiny_drafters(target: Path, draft_model: Path, head: Path) -> tuple[Drafter, ...]:
    """All of them for the distribution; the other checks on one of each kind."""

    def trained(method: str, model: Path, draft_sample_method: str) -> dict[str, Any]:
        shared = {"method": method, "num_speculative_tokens": NUM_DRAFT_TOKENS}
        return {**shared, "model": str(model), "draft_sample_method": draft_sample_method}

    ngram = {"num_speculative_tokens": NUM_DRAFT_TOKENS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    draft = "draft_model"
    sampled = "probabilistic"
    distribution = frozenset({Check.DISTRIBUTION})
    every = frozenset(Check) - {Check.ACCEPTANCE}
    same = "draft_model = policy"
    return (
        Drafter("plain", None, distribution | {Check.LOGPROBS, Check.SAMPLING_PARAMETERS}),
        Drafter("ngram", {"method": "ngram", **ngram}, every),
        Drafter(f"{same}, greedy drafts", trained(draft, target, "greedy"), distribution),
        Drafter(
            f"{same}, sampled drafts",
            trained(draft, target, sampled),
            distribution | {Check.ACCEPTANCE},
        ),
        Drafter("draft_model, greedy drafts", trained(draft, draft_model, "greedy"), distribution),
        Drafter("draft_model, sampled drafts", trained(draft, draft_model, sampled), every),
        Drafter("eagle3, greedy drafts", trained("eagle3", head, "greedy"), every),
        Drafter("eagle3, sampled drafts", trained("eagle3", head, sampled), distribution),
    )


def policy_subject(config: Config, folder: Path, seed: int, is_full: bool) -> Subject:
    """The policy of a configuration with its drafter; small enough ones also as their own drafter.

    Args:
        config: Policy, drafter and vLLM arguments.
        folder: Where a second checkpoint for the weights check is written.
        seed: Of that checkpoint.
        is_full: Adds the policy as its own drafter, and the second checkpoint.

    Raises:
        ModelError: The policy is no local directory with safetensors: the reference cannot load it.
    """
    path = str(embedded_policy_path()) if config.is_embedded else config.policy.model
    checkpoint = read_checkpoint(path, "policy.model")
    if checkpoint is None:
        fix = "Download it and name its directory."
        raise ModelError("policy.model", given=path, allowed="a local directory", fix=fix)
    drafters = [Drafter("plain", None, frozenset({Check.DISTRIBUTION, Check.LOGPROBS}))]
    speculative = config.drafter.speculative_config
    every = frozenset(Check) - {Check.ACCEPTANCE}
    if speculative is not None:
        drafters.append(Drafter(str(speculative.get("method", "draft_model")), speculative, every))
    is_small = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) <= MAX_COPIED_BYTES
    if is_full and is_small:
        own = {"method": "draft_model", "model": path, "num_speculative_tokens": NUM_DRAFT_TOKENS}
        sampled = {**own, "draft_sample_method": "probabilistic"}
        checks = frozenset({Check.DISTRIBUTION, Check.ACCEPTANCE})
        drafters.append(Drafter("draft_model = policy, sampled drafts", sampled, checks))
    other = str(_perturbed_copy(Path(path), folder / "other_policy", seed)) if is_full and is_small else None
    return Subject(Path(path).name, path, config, tuple(drafters), _text_prompts(path), False, other)


def _perturbed_copy(source: Path, path: Path, seed: int) -> Path:
    """The policy with noise on each matrix: another policy of the same shape."""
    import torch
    from safetensors.torch import load_file, save_file

    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape, generator=generator) * PERTURBATION * tensor.float().std()
                tensor.add_(noise.to(tensor.dtype))
        save_file(tensors, path / file.name)
    for name in ("config.json", "model.safetensors.index.json"):
        if (source / name).exists():
            shutil.copy(source / name, path / name)
    return path


def _text_prompts(path: str) -> tuple[tuple[int, ...], ...]:
    """Prompts of different lengths, one long enough to fill blocks of the prefix cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return tuple(tuple(tokenizer(text)["input_ids"]) for text in TEXTS)


def _covering_prompt(seed: int) -> tuple[int, ...]:
    """Every token but the special ones in random order: n-gram lookup drafts after any first token."""
    tokens = np.random.default_rng(seed).permutation(np.arange(2, TINY_VOCAB_SIZE))
    return tuple(tokens.tolist())


def _tiny_prompts(seed: int) -> tuple[tuple[int, ...], ...]:
    generator = np.random.default_rng((seed, 1))
    lengths = (3, 10, 17, 31, 64, MANY_BLOCKS)
    others = (tuple(generator.integers(2, TINY_VOCAB_SIZE, length).tolist()) for length in lengths)
    return (_covering_prompt(seed), *others)


def _likely_tokens(target: Path, prompt: Sequence[int]) -> list[int]:
    """The tokens that the policy most often likes after a token of the prompt."""
    from rollout.reference import ReferenceModel

    logits_TV = ReferenceModel(target).completion_logits(prompt[:1], prompt[1:])
    probabilities_TV = probabilities(logits_TV, temperature=1.0)
    order = np.argsort(-probabilities_TV.mean(axis=0))
    return sorted(order[:TINY_HEAD_TOKENS].tolist())
