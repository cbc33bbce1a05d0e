"""Owns what sampling parameters must do to a greedy response: the token each prefix must be followed by.

At temperature 0 a parameter is honoured exactly or not at all, so no statistics are needed: at every prefix
the response took, the token must be the best one after penalties and masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlspec.audit.exact import Array


@dataclass(frozen=True, slots=True)
class Honoured:
    """How a response kept to its parameters.

    Attributes:
        num_tokens: Tokens looked at.
        num_decisive: Those at which the parameters change the best token: 0 would prove nothing.
        num_wrong: Those that are not the best one, ties within the tolerance not counted.
    """

    num_tokens: int = 0
    num_decisive: int = 0
    num_wrong: int = 0

    def __add__(self, other: Honoured) -> Honoured:
        return Honoured(
            self.num_tokens + other.num_tokens,
            self.num_decisive + other.num_decisive,
            self.num_wrong + other.num_wrong,
        )


def greedy_honoured(
    logits_TV: Array,
    prompt: Sequence[int],
    response: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    bad_word_ids: Sequence[Sequence[int]] = (),
    tolerance: float,
) -> Honoured:
    """Compare a greedy response with the best token after its parameters, position by position.

    Args:
        logits_TV: The reference's logits that each token was chosen from.
        prompt, response: Token ids.
        sampling: vLLM's names; penalties as OpenAI defines them, the repetition penalty as CTRL does
            (1909.05858: divided where positive, multiplied where negative, prompt included).
        bad_word_ids: Token sequences whose last token is forbidden after the others.
        tolerance: Gap to the best logit that counts as a tie.
    """
    counts = np.zeros(logits_TV.shape[1])
    is_seen = np.zeros(logits_TV.shape[1], dtype=bool)
    is_seen[list(prompt)] = True
    num_decisive = num_wrong = 0
    for position, token in enumerate(response):
        plain = logits_TV[position]
        changed = _changed(plain, counts, is_seen, sampling, position)
        for word in bad_word_ids:
            *before, last = word
            if list(response[max(position - len(before), 0) : position]) == list(before):
                changed[last] = -np.inf
        num_decisive += int(changed.argmax() != plain.argmax())
        num_wrong += bool(changed[token] < changed.max() - tolerance)
        counts[token] += 1
        is_seen[token] = True
    return Honoured(len(response), num_decisive, num_wrong)


def _changed(logits: Array, counts: Array, is_seen: Any, sampling: Mapping[str, Any], position: int) -> Array:
    """One position's logits after biases, masks and penalties."""
    changed = logits.copy()
    for token, bias in (sampling.get("logit_bias") or {}).items():
        changed[token] += bias
    repetition = sampling.get("repetition_penalty") or 1.0
    scaled = np.where(changed > 0, changed / repetition, changed * repetition)
    changed = np.where(is_seen, scaled, changed)
    changed -= (sampling.get("frequency_penalty") or 0.0) * counts
    changed -= (sampling.get("presence_penalty") or 0.0) * (counts > 0)
    if sampling.get("allowed_token_ids"):
        mask = np.ones(len(changed), dtype=bool)
        mask[list(sampling["allowed_token_ids"])] = False
        changed[mask] = -np.inf
    if position < (sampling.get("min_tokens") or 0):
        changed[list(sampling.get("stop_token_ids") or ())] = -np.inf
    return changed
