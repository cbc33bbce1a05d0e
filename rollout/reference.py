"""Owns the reference: the policy in transformers, in fp32, slow and independent of vLLM.

Shapes: V vocabulary, T tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

Array = NDArray[np.float64]


class ReferenceModel:
    """The policy's logits as transformers computes them.

    Args:
        path: Directory of the checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
        self.vocab_size: int = self._model.config.vocab_size
        eos = self._model.generation_config.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(eos) if isinstance(eos, list) else (eos,)

    def top_two_gap(self, token_ids: Sequence[int]) -> float:
        """The gap between the two best logits of the token after `token_ids`."""
        second, best = np.sort(self.completion_logits(token_ids[:-1], token_ids[-1:], one_more=True)[-1])[-2:]
        return float(best - second)

    def logprobs(
        self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Log-probability of each completion token after temperature, in double precision at the softmax."""
        scaled = self.completion_logits(prompt_token_ids, completion_token_ids) / temperature
        logprobs = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
        chosen: list[float] = logprobs[np.arange(len(scaled)), list(completion_token_ids)].tolist()
        return chosen

    @torch.inference_mode()
    def completion_logits(
        self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int], one_more: bool = False
    ) -> Array:
        """Logits that each completion token was drawn from, shape (T, V); `one_more` adds the token after."""
        token_ids = torch.tensor([[*prompt_token_ids, *completion_token_ids]])
        logits = self._model(token_ids).logits[0, max(len(prompt_token_ids) - 1, 0) :]
        rows: Array = logits.double().numpy()
        return rows if one_more else rows[:-1]

    def greedy(self, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely continuation."""
        response: list[int] = []
        for _ in range(num_tokens):
            last = self.completion_logits([*prompt_token_ids, *response], [], one_more=True)[-1]
            response.append(int(last.argmax()))
        return response

    @torch.inference_mode()
    def tree_logits(self, prompt_token_ids: Sequence[int]) -> tuple[Array, Array, Array, Array]:
        """Logits after the prompt and each continuation of 0, 1, 2 and 3 tokens: (V,) to (V, V, V, V).

        For vocabularies of up to 64 tokens: V**3 sequences in one batch.
        """
        vocab_size = self.vocab_size
        out = self._model(torch.tensor([list(prompt_token_ids)]), use_cache=True)
        cache = out.past_key_values
        cache.batch_repeat_interleave(vocab_size**3)
        prefixes = torch.cartesian_prod(*[torch.arange(vocab_size)] * 3)
        logits = self._model(prefixes, past_key_values=cache).logits.double().numpy()
        shape = (vocab_size,) * 3
        return (
            out.logits[0, -1].double().numpy(),
            logits[:: vocab_size**2, 0],
            logits[::vocab_size, 1].reshape(*shape),
            logits[:, 2].reshape(*shape, vocab_size),
        )
