"""What parameters must do to a greedy response: honoured, ignored, and without effect are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlspec.audit.parameters import Honoured, greedy_honoured

LOGITS = np.array([[0.0, 3.0, 2.5, 1.0], [0.0, 3.0, 2.5, 1.0], [0.0, 3.0, 2.5, 1.0]])
PROMPT = (3,)


def look(response: Sequence[int], sampling: Mapping[str, Any], **more: Any) -> Honoured:
    return greedy_honoured(LOGITS[: len(response)], PROMPT, response, sampling, tolerance=1e-6, **more)


@pytest.mark.parametrize(
    ("sampling", "response"),
    [
        ({"presence_penalty": 1.0}, (1, 2, 1)),
        ({"frequency_penalty": 0.6}, (1, 2, 1)),
        ({"repetition_penalty": 1.5}, (1, 2, 1)),
        ({"allowed_token_ids": [2, 3]}, (2, 2, 2)),
        ({"logit_bias": {3: 5.0}}, (3, 3, 3)),
        ({"min_tokens": 2, "stop_token_ids": [1]}, (2, 2, 1)),
    ],
)
def test_honoured_and_ignored(sampling: Mapping[str, Any], response: Sequence[int]) -> None:
    honoured = look(response, sampling)
    assert honoured.num_wrong == 0
    assert honoured.num_decisive > 0
    assert look((1, 1, 1), sampling).num_wrong > 0


def test_bad_words_of_one_and_of_two_tokens() -> None:
    assert look((2, 2, 2), {}, bad_word_ids=[[1]]).num_wrong == 0
    assert look((1, 2, 1), {}, bad_word_ids=[[1, 1]]).num_wrong == 0
    assert look((1, 1, 1), {}, bad_word_ids=[[1, 1]]).num_wrong == 2


def test_a_parameter_that_changes_nothing_proves_nothing() -> None:
    assert look((1, 1, 1), {"allowed_token_ids": [0, 1]}) == Honoured(3, 0, 0)


def test_the_repetition_penalty_counts_the_prompt_and_pushes_negative_logits_down() -> None:
    logits = np.array([[-1.0, -1.1, -5.0, -0.9]])
    found = greedy_honoured(logits, PROMPT, (0,), {"repetition_penalty": 1.5}, tolerance=1e-6)
    assert found == Honoured(1, 1, 0)
