"""Owns the drift of logprobs: the trainer's beside the engine's, over a window of rollouts.

    observe(rollouts, trainer logprobs) ─► checked ─► window (newest tokens) ─► figures ─► DriftReport
                                               └─► InputError, window untouched

Differences are trainer - engine, in nats a token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlspec.audit.drift_inputs import Compared, Floats, compare
from rlspec.audit.drift_report import (
    RAW_LOGPROBS,
    Crossing,
    DriftReport,
    DriftStatistic,
    DriftVerdict,
    WorstToken,
)
from rlspec.config import DriftConfig
from rlspec.types import Rollout


def effective_sample_size(differences: Floats) -> float:
    """(sum w)^2 / (n sum w^2) with w = exp(trainer - engine): the fraction of the tokens that count.

    Kong (1992), "A note on importance sampling using standardized weights", University of Chicago, Dept. of
    Statistics, technical report 348: the variance of a mean under self-normalised weights is about that of
    n times this many draws from the trainer's own distribution. It assumes independent draws, and that what
    is averaged is little correlated with the weights. Tokens of one response are not independent; they are
    taken one by one all the same, because losses weight and clip token by token, and because the product of
    the weights over a long response leaves one response with everything whatever the engine does.
    """
    weights = np.exp(differences - differences.max())  # the ratio ignores a common factor; no overflow
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def k3_kl(differences: Floats) -> float:
    """Mean of r - 1 - log r with r = p_trainer / p_engine: estimates KL(engine || trainer) in nats a token.

    Schulman (2020), "Approximating KL divergence": unbiased, never negative, and of less variance than the
    mean of -log r. It assumes that the tokens were drawn from the engine's distribution, and that this can
    draw whatever the trainer's can: with top_k or top_p in the engine alone it comes out too low.
    """
    with np.errstate(over="ignore"):  # a ratio beyond e^709 reads as infinite drift
        terms = np.expm1(differences) - differences
    return float(np.maximum(terms, 0.0).mean())


MIN_LAST_TOKENS = 64
"""A call with fewer tokens is judged with the window only: with a spread of 0.03 nats, the mean of 64 tokens
lies within 0.01 of its own mean more often than 99 times of 100."""


class LogprobDrift:
    """Compares logprobs of the engine and of the trainer, and judges the newest of them.

    Args:
        config: Thresholds and the length of the window.
    """

    def __init__(self, config: DriftConfig) -> None:
        self._config = config
        self._window: deque[Compared] = deque()
        self._crossed: frozenset[DriftStatistic] = frozenset()

    def observe(
        self,
        rollouts: Sequence[Rollout],
        trainer_logprobs: Sequence[ArrayLike],
        *,
        trainer_version: int | None = None,
    ) -> DriftReport:
        """Add rollouts to the window and report on it.

        Older rollouts leave the window when it holds more than `window_tokens`; those of this call stay.

        Args:
            rollouts: From the engine.
            trainer_logprobs: For each rollout, the trainer's logprob of each completion token.
            trainer_version: Version of the weights that computed them; None leaves versions uncompared.

        Raises:
            InputError: Something does not fit; the window is as it was.
        """
        compared = compare(rollouts, trainer_logprobs, trainer_version)
        self._window.extend(compared)
        num_tokens = sum(len(one.engine) for one in self._window)
        while num_tokens > self._config.window_tokens and len(self._window) > len(compared):
            num_tokens -= len(self._window.popleft().engine)
        return self._report(sum(len(one.engine) for one in compared))

    def _report(self, num_last: int) -> DriftReport:
        """The report; `num_last` tokens at the end of the window came with the last call."""
        window = list(self._window)
        differences = np.concatenate([one.trainer - one.engine for one in window])
        version_gaps = np.concatenate([one.version_gaps for one in window])
        is_other = version_gaps != 0
        figures = _figures(differences)
        crossed = self._beyond(figures)
        last = _figures(differences[-num_last:])
        if num_last >= MIN_LAST_TOKENS:  # a bad batch must not hide among good ones of the window
            beyond = self._beyond(last)
            figures |= {name: last[name] for name in beyond if name not in crossed}
            crossed |= beyond
        crossings = tuple(
            Crossing(statistic, figures[statistic], threshold, statistic not in self._crossed)
            for statistic, threshold in crossed.items()
        )
        rest = differences[~is_other]
        only_other = bool(crossed and is_other.any() and not (rest.size and self._beyond(_figures(rest))))
        notes = (*_version_notes(window, version_gaps, only_other), *_mode_notes(window))
        self._crossed = frozenset(crossed)
        versions = Counter(np.concatenate([one.versions for one in window]).tolist())
        is_told = any(one.trainer_version is not None for one in window)
        return DriftReport(
            num_rollouts=len(window),
            num_tokens=len(differences),
            num_last_tokens=num_last,
            last_mean_abs=last[DriftStatistic.MEAN_ABS],
            mean_abs=figures[DriftStatistic.MEAN_ABS],
            max_abs=figures[DriftStatistic.MAX_ABS],
            mean_signed=float(differences.mean()),
            effective_sample_size=figures[DriftStatistic.EFFECTIVE_SAMPLE_SIZE],
            k3_kl=figures[DriftStatistic.K3_KL],
            tokens_by_version=dict(sorted(versions.items())),
            num_other_version_tokens=int(is_other.sum()) if is_told else None,
            logprobs_modes=tuple(sorted({one.logprobs_mode for one in window})),
            worst=_worst_token(window, int(np.abs(differences).argmax())),
            verdict=DriftVerdict(crossings, only_other, notes),
        )

    def _beyond(self, figures: dict[DriftStatistic, float]) -> dict[DriftStatistic, float]:
        """The thresholds that the figures cross."""
        config, least = self._config, DriftStatistic.EFFECTIVE_SAMPLE_SIZE
        thresholds = {
            DriftStatistic.MEAN_ABS: config.max_mean_abs,
            DriftStatistic.MAX_ABS: config.max_abs,
            DriftStatistic.EFFECTIVE_SAMPLE_SIZE: config.min_effective_sample_size,
            DriftStatistic.K3_KL: config.max_k3_kl,
        }
        return {
            name: threshold
            for name, threshold in thresholds.items()
            if threshold is not None
            and (figures[name] < threshold if name is least else figures[name] > threshold)
        }


def _figures(differences: Floats) -> dict[DriftStatistic, float]:
    absolute = np.abs(differences)
    return {
        DriftStatistic.MEAN_ABS: float(absolute.mean()),
        DriftStatistic.MAX_ABS: float(absolute.max()),
        DriftStatistic.EFFECTIVE_SAMPLE_SIZE: effective_sample_size(differences),
        DriftStatistic.K3_KL: k3_kl(differences),
    }


def _worst_token(window: Sequence[Compared], index: int) -> WorstToken:
    """Where the token with this index in the window lies."""
    ends = np.cumsum([len(one.engine) for one in window])
    number = int(np.searchsorted(ends, index, side="right"))
    one, position = window[number], index - (int(ends[number - 1]) if number else 0)
    return WorstToken(
        group_id=one.group_id,
        sample_index=one.sample_index,
        position=position,
        policy_version=int(one.versions[position]),
        engine_logprob=float(one.engine[position]),
        trainer_logprob=float(one.trainer[position]),
    )


def _version_notes(
    window: Sequence[Compared], version_gaps: NDArray[np.int64], only_other: bool
) -> tuple[str, ...]:
    num_older, num_newer = int((version_gaps < 0).sum()), int((version_gaps > 0).sum())
    num_rest = len(version_gaps) - num_older - num_newer
    notes = []
    if only_other:
        others = sorted({int(v) for one in window for v in one.versions[one.version_gaps != 0]})
        kind = "another version" if num_newer else "an older version"
        rest = f"the other {num_rest} are within the thresholds" if num_rest else "there are no others"
        notes.append(
            f"All of it comes from {num_older + num_newer} tokens of {kind} than the trainer's "
            f"({', '.join(map(str, others))}); {rest}."
        )
    if only_other and num_older:
        notes.append("Older rollouts drift since the weights moved on: draw fresher ones, or weight them.")
    if num_newer:
        notes.append(
            f"{num_newer} tokens are of a newer version than the trainer's: the two sides count versions "
            "differently. Give the version of the weights that computed the trainer's logprobs."
        )
    return tuple(notes)


def _mode_notes(window: Sequence[Compared]) -> tuple[str, ...]:
    if all(one.logprobs_mode != RAW_LOGPROBS for one in window):
        return ()
    return (
        "The engine's logprobs are raw_logprobs, before temperature, top_k and top_p: they fit a trainer at "
        "temperature 1 only, and after sampling at another temperature they are not those the tokens were "
        "drawn with. Set engine.vllm_args.logprobs_mode to processed_logprobs.",
    )
