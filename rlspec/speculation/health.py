"""Owns whether the drafter is worth asking at all: its first-position acceptance against what was promised.

healthy ── far below the promise ──► collapsed ── back-off ──► trial ── as promised ──► healthy
                                         ▲                       │
                                         └───── still far below ─┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlspec.types import Event, EventKind

COLLAPSED_SHARE = 0.1
"""The collapse looked for: a tenth of the promised rate. Smaller losses are the acceptance estimate's
business: K falls with it."""

ALARM = 12.0
"""Log-likelihood ratio that is a collapse: 19 misses in a row at a promised rate of 0.5. Of runs of 10,000
request-steps at that rate less than 2 % raise it (Page 1954's test; trials taken as independent)."""

SUSPICIOUS_ALARM = 7.5
"""The same for the first request-steps after a change, where a collapse is likelier: 12 misses in a row."""

SUSPICIOUS_REQUEST_STEPS = 64
"""Request-steps after a swap, a policy update or a wake that are watched more closely."""

UNKNOWN_RATE = 0.3
"""Reference without a promise, until it is learnt: a drafter worth loading reaches it."""

LEARN_REQUEST_STEPS = 200
"""Request-steps that teach the reference where nothing was promised: its standard error is then 0.035."""

MIN_RATE, MAX_RATE = 0.05, 0.95
"""Reference rates are taken no closer to 0 or 1, where one surprise would be proof."""

RECOVERED, STILL_SICK = -3.0, 3.0
"""Log-likelihood ratios that end a trial: wrong in at most 5 % (Wald 1945)."""

BACK_OFF_STEPS, MAX_BACK_OFF_STEPS = 256, 8192
"""Steps from a collapse to the first trial; each trial that fails doubles it up to the second figure."""

MAX_VERSIONS = 32
"""Drafter versions whose verdict is remembered."""


@dataclass(slots=True)
class _Version:
    """What is known of one drafter version."""

    promised_rate: float | None
    num_trials: int = 0
    num_successes: int = 0
    is_healthy: bool = True

    def reference(self) -> float:
        """The first-position rate that is expected of a healthy drafter."""
        rate = self.promised_rate
        if rate is None:
            known = self.num_trials >= LEARN_REQUEST_STEPS
            rate = self.num_successes / self.num_trials if known else UNKNOWN_RATE
        return min(max(rate, MIN_RATE), MAX_RATE)


class DrafterHealth:
    """Watches the share of request-steps whose first draft token is accepted; a pure state machine.

    The statistic is Page's cumulative sum max(0, S + successes * log(q / p) + misses * log((1 - q) / (1 -
    p))) with p the promised rate and q = COLLAPSED_SHARE * p. Assumes that request-steps are independent;
    those of one request are not quite, so false alarms come somewhat more often than stated. One costs the
    speculation of a back-off, not correctness. Request-steps in which the drafter proposed nothing, as
    lookup drafters often do, say nothing.

    Attributes:
        version: The drafter version that serves.
    """

    def __init__(self, promised_rate: float | None = None) -> None:
        """`promised_rate`: of the release, 0 to 1; None: learnt from the first request-steps."""
        self.version = ""
        self._versions = {self.version: _checked(promised_rate)}
        self._now = self._versions[self.version]
        self._cause = ""
        self._sum = 0.0
        self._num_watched = SUSPICIOUS_REQUEST_STEPS
        self._num_seen = self._num_seen_accepted = 0
        self._next_trial = 0
        self._back_off_steps = BACK_OFF_STEPS

    @property
    def is_healthy(self) -> bool:
        """Whether the drafter may be used without a trial."""
        return self._now.is_healthy

    @property
    def last_good(self) -> str | None:
        """The newest other version that ended healthy, after enough request-steps to tell."""
        for version, known in reversed(self._versions.items()):
            if version != self.version and known.is_healthy and known.num_trials >= LEARN_REQUEST_STEPS:
                return version
        return None

    def mark(self, cause: str) -> None:
        """Something changed (`after a swap`, ...): watch more closely, and a collapsed drafter may be
        tried."""
        self._cause = cause
        self._restart()
        self._num_watched = 0
        self._back_off_steps, self._next_trial = BACK_OFF_STEPS, 0

    def start_version(self, version: str, promised_rate: float | None = None) -> None:
        """Another drafter version serves; a known one keeps its verdict, a new one starts healthy."""
        known = self._versions.pop(version, None) or _checked(promised_rate)
        self._versions[version] = known  # newest last
        if len(self._versions) > MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]
        self._now, self.version = known, version
        self.mark("after a swap")

    def may_try(self, step_index: int) -> bool:
        """Whether a collapsed drafter is tried in this step; `step_index` counts over all runs."""
        return step_index >= self._next_trial

    def observe(
        self,
        step_index: int,
        num_offered: tuple[int, ...],
        num_drafted: tuple[int, ...],
        num_accepted: tuple[int, ...],
    ) -> Event | None:
        """Look at one step; columns have one entry a request. The event if health changed."""
        num_trials = len(num_drafted) - num_drafted.count(0)
        if not num_trials or not any(num_offered):
            return None
        num_successes = len(num_accepted) - num_accepted.count(0)
        reference = self._now.reference()
        collapsed = COLLAPSED_SHARE * reference
        self._sum += num_successes * math.log(collapsed / reference)
        self._sum += (num_trials - num_successes) * math.log((1.0 - collapsed) / (1.0 - reference))
        self._num_seen += num_trials
        self._num_seen_accepted += num_successes
        if not self._now.is_healthy:
            return self._judge_trial(step_index, reference)
        self._now.num_trials += num_trials
        self._now.num_successes += num_successes
        alarm = SUSPICIOUS_ALARM if self._num_watched < SUSPICIOUS_REQUEST_STEPS else ALARM
        self._num_watched += num_trials
        if self._sum <= 0.0:
            self._restart()
        elif self._sum >= alarm:
            return self._collapse(step_index, reference)
        return None

    def _collapse(self, step_index: int, reference: float) -> Event:
        text = f"{self._told()}, {reference:.2f} expected; off, tried again in {self._back_off_steps} steps"
        self._now.is_healthy = False
        self._rest(step_index)
        return Event(EventKind.DRAFTER_COLLAPSED, step_index, text)

    def _judge_trial(self, step_index: int, reference: float) -> Event | None:
        if self._sum >= STILL_SICK:
            self._rest(step_index)
        elif self._sum <= RECOVERED:
            text = f"{self._told()}, {reference:.2f} expected: used again"
            self._now.is_healthy = True
            self._cause = ""
            self._back_off_steps = BACK_OFF_STEPS
            self._restart()
            return Event(EventKind.DRAFTER_RECOVERED, step_index, text)
        return None

    def _rest(self, step_index: int) -> None:
        self._next_trial = step_index + self._back_off_steps
        self._back_off_steps = min(2 * self._back_off_steps, MAX_BACK_OFF_STEPS)
        self._restart()

    def _restart(self) -> None:
        self._sum = 0.0
        self._num_seen = self._num_seen_accepted = 0

    def _told(self) -> str:
        name = f"drafter {self.version}" if self.version else "the drafter"
        cause = f" {self._cause}" if self._cause else ""
        seen = f"{self._num_seen_accepted} of {self._num_seen} first draft tokens accepted"
        return f"{name}{cause}: {seen}"


def _checked(promised_rate: float | None) -> _Version:
    if promised_rate is not None and not 0.0 <= promised_rate <= 1.0:
        raise ValueError(f"promised_rate is {promised_rate}; allowed are 0 to 1, or None")
    return _Version(promised_rate)
