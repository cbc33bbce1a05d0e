"""Owns the detection of an abrupt change of an acceptance rate, and the evidence gathered since it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]

ODDS_RATIO = 6.0
"""The smallest change looked for, in odds: 0.8 to 0.4, or 0.05 to 0.24. The discount follows smaller ones."""
ALARM_THRESHOLD = 8.0
"""False alarms come at most once in e^8 = 2981 request-steps on average (Lorden 1971: at least e^threshold
for independent trials of a known rate); a drafter that goes from 0.8 to 0 is noticed after 8 failures."""
MIN_RATE = 0.02
"""Rates are taken no closer to 0 or 1: there a single surprise would be proof."""


class _Arm:
    """One direction of the test: how much better the changed rate explains what came since the last zero."""

    def __init__(self, log_odds_shift: float) -> None:
        self._shift = log_odds_shift
        self._odds_ratio = math.exp(log_odds_shift)
        self._evidence = 0.0
        self._since: Counts | None = None

    def restart(self) -> None:
        self._evidence, self._since = 0.0, None

    def observe(self, rate: float, num_successes: float, num_trials: float, counts: Counts) -> Counts | None:
        self._evidence += num_successes * self._shift
        self._evidence -= num_trials * math.log(1.0 - rate + rate * self._odds_ratio)
        if self._evidence <= 0.0:
            self.restart()
            return None
        self._since = counts.copy() if self._since is None else self._since + counts
        return self._since if self._evidence > ALARM_THRESHOLD else None


class ChangeDetector:
    """Page's cumulative sum test (Page 1954) of a Bernoulli rate in both directions.

    The statistic is max(0, S + shift * successes - trials * log(1 - p + p * e^shift)), the log-likelihood
    ratio of a rate whose odds are `ODDS_RATIO` times higher (or lower) than those of the expected p. The time
    of the last zero is the maximum likelihood estimate of the change, so the counts since then are of the new
    rate. Assumption: trials are independent; the requests of one batch are alike enough that this is only
    approximately true, which makes false alarms more frequent than stated. One costs evidence, not safety.
    """

    def __init__(self) -> None:
        self._arms = (_Arm(math.log(ODDS_RATIO)), _Arm(-math.log(ODDS_RATIO)))

    def restart(self) -> None:
        """Forget what was seen so far."""
        for arm in self._arms:
            arm.restart()

    def observe(self, rate: float, num_successes: float, num_trials: float, counts: Counts) -> Counts | None:
        """Look at one more batch of trials.

        Args:
            rate: The rate expected before these trials.
            num_successes: Of the trials.
            num_trials: At least 1.
            counts: What is to be summed up since the change; not kept by reference.

        Returns:
            The sum of the counts since the change if there was one, else None.
        """
        rate = min(max(rate, MIN_RATE), 1.0 - MIN_RATE)
        for arm in self._arms:
            since = arm.observe(rate, num_successes, num_trials, counts)
            if since is not None:
                self.restart()
                return since
        return None
