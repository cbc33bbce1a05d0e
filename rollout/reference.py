"""Owns the reference: the policy in transformers, in fp32, slow and independent of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class ReferenceModel:
    """The policy's logits as transformers computes them.

    Args:
        path: Directory of the checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()

    @torch.inference_mode()
    def top_two_gap(self, token_ids: Sequence[int]) -> float:
        """The gap between the two best logits of the token after `token_ids`."""
        best = self._model(torch.tensor([list(token_ids)])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    @torch.inference_mode()
    def logits(self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int]) -> torch.Tensor:
        """Logits that each completion token was drawn from, in double precision: a row a token."""
        token_ids = torch.tensor([[*prompt_token_ids, *completion_token_ids]])
        return self._model(token_ids).logits[0, len(prompt_token_ids) - 1 : -1].double()

    def logprobs(
        self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Log-probability of each completion token after temperature, in double precision at the softmax."""
        logits = self.logits(prompt_token_ids, completion_token_ids)
        logprobs = (logits / temperature).log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(completion_token_ids)[:, None])[:, 0].tolist()
