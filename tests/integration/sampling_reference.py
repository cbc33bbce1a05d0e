"""Owns what vLLM's sampling parameters mean: applied by the letter to the reference's logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlspec.types import Rollout
from rollout.reference import ReferenceModel

EOS = 1
NOTHING = -math.inf

MAX_LOGPROB_ERROR = 5e-4
"""fp32 against double precision differs by 1e-6 to 1e-5; a parameter that is ignored, by 5e-3 and more."""


def logit_rows(reference: ReferenceModel, rollout: Rollout) -> torch.Tensor:
    """The reference's logits that each token of the response was drawn from."""
    return torch.from_numpy(
        reference.completion_logits(rollout.prompt_token_ids, rollout.completion_token_ids)
    )


def processed_logits(
    reference: ReferenceModel, rollout: Rollout, sampling: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The logits that each token of a rollout should have been drawn from, in vLLM's order of steps.

    Args:
        reference: The policy.
        rollout: Prompt and response; the response so far is what a step depends on.
        sampling: Parameters; `bad_words` as lists of token ids.
    """
    rows = torch.from_numpy(
        reference.completion_logits(rollout.prompt_token_ids, rollout.completion_token_ids)
    )
    tokens = list(rollout.completion_token_ids)
    return [
        _processed(row.clone(), list(rollout.prompt_token_ids), tokens[:index], sampling)
        for index, row in enumerate(rows)
    ]


def logprob_errors(reference: ReferenceModel, rollout: Rollout, sampling: Mapping[str, Any]) -> list[float]:
    """How far each logprob of the rollout is from the reference's; infinite where it should be impossible."""
    expected = (
        float(row.log_softmax(-1)[token])
        for row, token in zip(
            processed_logits(reference, rollout, sampling), rollout.completion_token_ids, strict=True
        )
    )
    return [abs(given - wanted) for given, wanted in zip(rollout.logprobs, expected, strict=True)]


def _processed(
    row: torch.Tensor, prompt: list[int], past: list[int], sampling: Mapping[str, Any]
) -> torch.Tensor:
    if "allowed_token_ids" in sampling:
        kept = row[sampling["allowed_token_ids"]]
        row[:] = NOTHING
        row[sampling["allowed_token_ids"]] = kept
    for word in sampling.get("bad_words", ()):
        if past[len(past) - len(word) + 1 :] == word[:-1] or len(word) == 1:
            row[word[-1]] = NOTHING
    for token, bias in sampling.get("logit_bias", {}).items():
        row[token] += bias
    if len(past) < sampling.get("min_tokens", 0):
        row[[EOS, *sampling.get("stop_token_ids", ())]] = NOTHING
    _penalise(row, prompt, past, sampling)
    if "min_p" in sampling:
        probabilities = row.softmax(-1)
        row[probabilities < sampling["min_p"] * probabilities.max()] = NOTHING
    return row


def _penalise(row: torch.Tensor, prompt: list[int], past: list[int], sampling: Mapping[str, Any]) -> None:
    seen = sorted({*prompt, *past})
    repetition = sampling.get("repetition_penalty", 1.0)
    row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    for token in set(past):
        row[token] -= sampling.get("presence_penalty", 0.0)
        row[token] -= sampling.get("frequency_penalty", 0.0) * past.count(token)
