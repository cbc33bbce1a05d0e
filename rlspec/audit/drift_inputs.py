"""Owns what a comparison of logprobs is made of, and the inputs that are refused before it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlspec.errors import InputError
from rlspec.types import Rollout

LOGPROB_TOLERANCE = 1e-6
"""A logprob may be this much above 0: half a rounding step of fp32 at logits of 16 to 32."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """What is kept of one rollout; the arrays have one entry a token."""

    group_id: str
    sample_index: int
    logprobs_mode: str
    engine: Floats
    trainer: Floats
    versions: NDArray[np.int64]
    trainer_version: int | None

    @property
    def version_gaps(self) -> NDArray[np.int64]:
        """Each token's version minus the trainer's: negative is older; 0 where the trainer's is unknown."""
        if self.trainer_version is None:
            return np.zeros_like(self.versions)
        return self.versions - self.trainer_version


def compare(
    rollouts: Sequence[Rollout], trainer_logprobs: Sequence[ArrayLike], trainer_version: int | None
) -> list[Compared]:
    """Put the two sides beside each other.

    Raises:
        InputError: Lengths or values do not fit.
    """
    _check_call(rollouts, trainer_logprobs, trainer_version)
    return [
        _compare_one(index, rollout, logprobs, trainer_version)
        for index, (rollout, logprobs) in enumerate(zip(rollouts, trainer_logprobs, strict=True))
    ]


def _check_call(
    rollouts: Sequence[Rollout], trainer_logprobs: Sequence[ArrayLike], trainer_version: int | None
) -> None:
    if not isinstance(rollouts, Sequence) or not rollouts:
        fix = "Give the list of rollouts that the trainer computed logprobs for."
        raise InputError("rollouts", given=rollouts, allowed="a list of at least one rollout", fix=fix)
    if not isinstance(trainer_logprobs, Sized) or len(trainer_logprobs) != len(rollouts):
        given = (
            f"{len(trainer_logprobs)} entries" if isinstance(trainer_logprobs, Sized) else trainer_logprobs
        )
        allowed = f"one list of logprobs for each of the {len(rollouts)} rollouts, in their order"
        fix = "Give both in the same order, without padding rows."
        raise InputError("trainer_logprobs", given=given, allowed=allowed, fix=fix)
    is_integer = isinstance(trainer_version, Integral) and not isinstance(trainer_version, bool)
    if trainer_version is not None and not (is_integer and trainer_version >= 0):
        fix = "Give the version number that rollouts carry as policy_version, or leave it out."
        raise InputError("trainer_version", given=trainer_version, allowed="an integer from 0", fix=fix)


def _compare_one(
    index: int, rollout: Rollout, trainer_logprobs: ArrayLike, trainer_version: int | None
) -> Compared:
    place = f"[{index}] (group {rollout.group_id!r}, sample {rollout.sample_index})"
    num_tokens = len(rollout.completion_token_ids)
    if not num_tokens:
        fix = "Leave rollouts without tokens out."
        raise InputError(f"rollouts{place}", given="no tokens", allowed="at least one token", fix=fix)
    versions = _token_versions(place, rollout)
    return Compared(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        logprobs_mode=rollout.logprobs_mode,
        engine=_checked_logprobs(f"rollouts{place}.logprobs", rollout.logprobs, num_tokens),
        trainer=_checked_logprobs(f"trainer_logprobs{place}", trainer_logprobs, num_tokens),
        versions=versions,
        trainer_version=trainer_version,
    )


def _checked_logprobs(field: str, logprobs: ArrayLike, num_tokens: int) -> Floats:
    """The logprobs as an array of doubles, one a token."""
    allowed = f"a flat list of {num_tokens} finite numbers up to 0, one a completion token"
    try:
        values = np.array(logprobs, dtype=np.float64)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # ragged, no numbers, or a tensor that numpy refuses
        fix = (
            f"Give plain numbers; for a tensor: logprobs.detach().float().cpu().tolist(). numpy says: {error}"
        )
        raise InputError(field, given=type(logprobs).__name__, allowed=allowed, fix=fix) from error
    if values.shape != (num_tokens,):
        fix = "Leave out prompt and padding; a model's output at position i is for token i + 1."
        raise InputError(field, given=f"shape {values.shape}", allowed=allowed, fix=fix)
    is_bad = ~(np.isfinite(values) & (values <= LOGPROB_TOLERANCE))
    if is_bad.any():
        position = int(is_bad.argmax())
        fix = (
            "Compute log_softmax in fp32. NaN means broken weights or a fully masked row, -inf a token that "
            "the trainer masks out though the engine drew it, a positive number a logit or a negated loss."
        )
        given = f"{values[position]} at position {position} ({int(is_bad.sum())} such tokens)"
        raise InputError(field, given=given, allowed=allowed, fix=fix)
    return values


def _token_versions(place: str, rollout: Rollout) -> NDArray[np.int64]:
    """The policy version of each token."""
    num_tokens = len(rollout.completion_token_ids)
    spans = rollout.policy_spans
    versions = np.repeat([span.policy_version for span in spans], [span.num_tokens for span in spans]).astype(
        np.int64
    )
    if len(versions) != num_tokens:
        fix = "Give the spans of this rollout: versions and numbers of tokens, in token order."
        allowed = f"spans of {num_tokens} tokens together"
        raise InputError(f"rollouts{place}.policy_spans", given=spans, allowed=allowed, fix=fix)
    return versions
