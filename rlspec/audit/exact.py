"""Owns exact probabilities: from the reference's logits and sampling parameters to what must be sampled.

Shapes: V vocabulary, T tokens; trailing V is always the token to be sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_POSITIONS = 4
"""Tokens whose marginal is computed exactly: all V**3 prefixes of the fourth can be enumerated."""


def probabilities(
    logits: Array, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Array:
    """What is sampled from logits: temperature, then top_k, then top_p on what is left, as vLLM applies them.

    top_p keeps the most probable tokens whose predecessors do not reach it ("The Curious Case of Neural Text
    Degeneration", 1904.09751). Ties at the border of top_k are all kept.

    Args:
        logits: Any leading shape, V last.
        temperature: Above 0.
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    if top_k is not None and 0 < top_k < scaled.shape[-1]:
        border = np.sort(scaled, axis=-1)[..., -top_k][..., None]
        scaled = np.where(scaled < border, -np.inf, scaled)
    exponentials = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    result: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    if top_p is not None and top_p < 1.0:
        order = np.argsort(-result, axis=-1, kind="stable")
        ordered = np.take_along_axis(result, order, axis=-1)
        is_dropped = ordered.cumsum(axis=-1) - ordered >= top_p
        np.put_along_axis(result, order, np.where(is_dropped, 0.0, ordered), axis=-1)
        result /= result.sum(axis=-1, keepdims=True)
    return result


@dataclass(frozen=True, slots=True)
class ExactMarginals:
    """Exact distributions of what follows one prompt.

    Attributes:
        by_position: Marginal of tokens 1 to 4, each of shape (V,).
        pair: Joint distribution of tokens 1 and 2, shape (V, V).
    """

    by_position: tuple[Array, ...]
    pair: Array

    def cells(self) -> Mapping[str, Array]:
        """Every tested distribution by name, flat."""
        named = {f"token {i + 1}": marginal for i, marginal in enumerate(self.by_position)}
        return {**named, "tokens 1, 2": self.pair.ravel()}

    def counts(self, responses: Sequence[Sequence[int]]) -> Mapping[str, NDArray[np.int64]]:
        """How often each cell came up, by the names of `cells`."""
        vocab_size = len(self.by_position[0])
        tokens = np.array([response[:NUM_POSITIONS] for response in responses], dtype=np.int64)
        columns = {f"token {i + 1}": tokens[:, i] for i in range(NUM_POSITIONS)}
        columns["tokens 1, 2"] = tokens[:, 0] * vocab_size + tokens[:, 1]
        return {name: np.bincount(columns[name], minlength=len(p)) for name, p in self.cells().items()}


def exact_marginals(tree: Sequence[Array], sampling: Mapping[str, Any]) -> ExactMarginals:
    """Marginals of tokens 1 to 4 by summing over every prefix.

    Args:
        tree: Logits after each prefix of 0, 1, 2 and 3 tokens: shapes (V,), (V, V), (V, V, V), (V, V, V, V).
        sampling: `temperature`, `top_k`, `top_p`.
    """
    joint = probabilities(tree[0], **sampling)
    by_position, pair = [joint], joint
    for depth, logits in enumerate(tree[1:], start=1):
        joint = joint[..., None] * probabilities(logits, **sampling)
        by_position.append(joint.sum(axis=tuple(range(depth))))
        if depth == 1:
            pair = joint
    return ExactMarginals(tuple(by_position), pair)
