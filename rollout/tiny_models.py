"""Owns the tiny random checkpoints of the audit and of the tests: Llama targets, EAGLE-3 heads, draft models.

In fp32, written straight as tensors, so that they are made in milliseconds without torch.
Shapes: V vocabulary, D hidden, F feed-forward, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

HEAD_DIM = 64
"""The smallest head size that vLLM's CPU attention is quick with; narrower targets have one such head."""

MAX_POSITION_EMBEDDINGS = 512

LOGIT_STD = 1.5
"""Standard deviation of a target's logits: sampling is neither uniform nor all but greedy."""

PRINTABLE = '0123456789abcdefghijklmnopqrstuvwxyz{}[]":,.-_ABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&()*+/;<=>?@^`|~'
"""What the tiny tokenizer's ids from 2 on stand for: enough for JSON within the 48 ids of a tiny target."""

Tensors = dict[str, NDArray[Any]]


def write_tiny_target(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 48,
    hidden_size: int = 64,
    num_layers: int = 2,
    tie_word_embeddings: bool = False,
    logit_std: float = LOGIT_STD,
) -> Path:
    """Write a random Llama (400 kB by default) and return its directory."""
    rng = np.random.default_rng(seed)
    config = _llama_config(vocab_size, hidden_size, num_layers, tie_word_embeddings)
    lm_head_VD = _normal(rng, logit_std / hidden_size**0.5, vocab_size, hidden_size)
    tensors: Tensors = {"model.norm.weight": _ones(hidden_size)}
    if tie_word_embeddings:
        tensors["model.embed_tokens.weight"] = lm_head_VD
    else:
        tensors["model.embed_tokens.weight"] = _normal(rng, 1.0, vocab_size, hidden_size)
        tensors["lm_head.weight"] = lm_head_VD
    for layer in range(num_layers):
        tensors |= _layer(rng, f"model.layers.{layer}", config, attention_input_size=hidden_size)
    return write_checkpoint(path, config, tensors)


def write_tiny_draft_model(path: Path, target_path: Path, *, seed: int = 0, noise: float = 0.3) -> Path:
    """Write a draft model: the target with noise on each matrix, relative to its own spread.

    Noise 0 is the target itself (every draft accepted), 0.3 lands in between, large noise is another model.
    """
    rng = np.random.default_rng(seed)
    tensors = load_file(target_path / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 2:
            tensors[name] = values + _normal(rng, noise * float(values.std()), *values.shape)
    return write_checkpoint(path, read_config(target_path), tensors)


def write_tiny_eagle3_head(
    path: Path,
    target_path: Path,
    *,
    seed: int = 0,
    scale: float = 0.2,
    draft_vocab_size: int | None = None,
    draft_token_ids: Sequence[int] | None = None,
    hidden_size: int | None = None,
    speculators_format: bool = False,
) -> Path:
    """Write a random EAGLE-3 head for a target.

    Args:
        path: Directory to write.
        target_path: The target's checkpoint.
        seed: Of the weights and of the draft vocabulary.
        scale: Standard deviation of the weights.
        draft_vocab_size: Tokens that the head can propose, drawn from the target's vocabulary; None is all.
        draft_token_ids: Those tokens, instead of drawing them.
        hidden_size: Of the head and of the target it claims to fit; None is the target's.
        speculators_format: Write the layout of `speculators` instead of vLLM's own.
    """
    rng = np.random.default_rng(seed)
    target = read_config(target_path)
    vocab_size, hidden = target["vocab_size"], hidden_size or target["hidden_size"]
    num_drafts = len(draft_token_ids or ()) or draft_vocab_size or vocab_size
    layer = _llama_config(vocab_size, hidden, 1, False)
    tensors: Tensors = {
        "fc.weight": _normal(rng, scale, hidden, 3 * hidden),
        "norm.weight": _ones(hidden),
        "lm_head.weight": _normal(rng, scale, num_drafts, hidden),
    }
    prefix = "layers.0" if speculators_format else "midlayer"
    tensors |= _layer(rng, prefix, layer, attention_input_size=2 * hidden, scale=scale)
    tensors[f"{prefix}.hidden_norm.weight"] = _ones(hidden)
    if num_drafts != vocab_size:
        token_ids = np.sort(draft_token_ids or rng.choice(vocab_size, size=num_drafts, replace=False))
        tensors["d2t"] = token_ids - np.arange(num_drafts)
        tensors["t2d"] = np.isin(np.arange(vocab_size), token_ids)
    extra = {
        "draft_vocab_size": num_drafts,
        "eagle_aux_hidden_state_layer_ids": list(_aux_layer_ids(target["num_hidden_layers"])),
    }
    if speculators_format:
        return write_checkpoint(path, _speculators_config(layer, target_path, extra), tensors)
    return write_checkpoint(path, {**layer, "architectures": ["LlamaForCausalLMEagle3"], **extra}, tensors)


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Path:
    """Write config.json and model.safetensors into a directory, made if absent."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()}, path / "model.safetensors"
    )
    return path


def write_tiny_tokenizer(path: Path, vocab_size: int = 48) -> Path:
    """Write a tokenizer of one printable character an id beside a checkpoint: bos is 0, eos is 1."""
    more = (chr(0x4E00 + index) for index in range(max(0, vocab_size - 2 - len(PRINTABLE))))
    tokens = ["<s>", "</s>", *PRINTABLE, *more][:vocab_size]
    special = [
        {"id": i, "content": tokens[i], "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i in (0, 1)
    ]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[0], "eos_token": tokens[1]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    return dict(json.loads((path / "config.json").read_text()))


def _llama_config(vocab_size: int, hidden_size: int, num_layers: int, tied: bool) -> dict[str, Any]:
    num_heads = max(1, hidden_size // HEAD_DIM)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }


def _speculators_config(
    layer: Mapping[str, Any], target_path: Path, extra: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target_path), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": dict(layer),
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **extra,
    }


def _layer(
    rng: np.random.Generator,
    prefix: str,
    config: Mapping[str, Any],
    *,
    attention_input_size: int,
    scale: float | None = None,
) -> Tensors:
    """One decoder layer; without a scale each matrix keeps the variance of what goes in."""
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    attention = config["num_attention_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (attention, attention_input_size),
        "self_attn.k_proj": (attention, attention_input_size),
        "self_attn.v_proj": (attention, attention_input_size),
        "self_attn.o_proj": (hidden, attention),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    layer = {
        f"{prefix}.{name}.weight": _normal(rng, scale or shape[1] ** -0.5, *shape)
        for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return layer | {f"{prefix}.{name}.weight": _ones(hidden) for name in norms}


def _aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Early, middle and late; vLLM's default (2, n // 2, n - 3) names three layers only from n = 7 on."""
    if num_layers < 2:
        raise ValueError(f"an EAGLE-3 head needs a target with at least 2 layers, got {num_layers}")
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (0, num_layers // 2, num_layers)


def _normal(rng: np.random.Generator, std: float, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, dtype=np.float32)
