"""Owns when another K is tried in spite of what is expected: a budget, trials, and pauses between them.

rest ── budget, optimism, a cheap guess ──► trial ── enough request-steps seen ──► rest (a pause)
"""

from __future__ import annotations

from rlspec.speculation.outlook import break_even_acceptance
from rlspec.speculation.policies.base import Outlook

TRIAL_REQUEST_STEPS = 24
"""Request-steps with drafts that end a trial: a rate is then known to 0.1."""

MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 4, 12
"""Bounds of a trial in steps. The first one only drafts; twelve at batch 1 find a rate of 0.5 nearly
surely."""

MAX_BREAK_EVEN = 0.5
"""Only K that pay from this conditional acceptance on are tried: a guess is cheap there, and drafters that
are worth loading reach it. It is what keeps trials to the memory-bound tail."""

PAUSE_STEPS, MAX_PAUSE_STEPS = 32, 2048
"""Steps after a trial until the next; each trial that changes nothing doubles the pause."""


class Exploration:
    """Decides on trials. Seconds are those of the engine's steps.

    Attributes:
        is_blind: Whether the present trial is to measure costs first.
    """

    def __init__(self, fraction: float) -> None:
        """`fraction`: the share of the engine's seconds that trials may lose."""
        self.is_blind = False
        self._fraction = fraction
        self._elapsed = self._lost = 0.0
        self._trial_k = 0
        self._num_left = 0
        self._num_paused = 0
        self._pause_steps = PAUSE_STEPS

    @property
    def trial_k(self) -> int:
        """K of the trial that goes on; 0: none."""
        return self._trial_k if self._num_left else 0

    @property
    def may_begin(self) -> bool:
        """Whether a trial may begin now, if one is worth it."""
        return not self._num_paused and self._fraction > 0.0

    def observe(self, step_seconds: float) -> None:
        """Count a step."""
        self._elapsed += step_seconds
        self._num_paused = max(self._num_paused - 1, 0)

    def observe_trial(self, lost_seconds: float) -> None:
        """Count what a step of a trial lost against plain decoding; below 0: gained."""
        self._lost = max(self._lost + lost_seconds, 0.0)

    def renew(self) -> None:
        """The drafter or the policy changed: what was tried says little."""
        self._pause_steps, self._num_paused = PAUSE_STEPS, 0

    def begin_blind(self, mean: Outlook, price: float) -> None:
        """Start a trial of K = 1 whose costs nobody has measured, if the budget allows it at any outcome."""
        self._start(mean, 1, price)
        self.is_blind = True

    def begin(self, mean: Outlook, optimistic: Outlook, k_now: int, margin: float, price: float) -> None:
        """Start a trial if one is worth it; `trial_k` is then its K.

        A K is a candidate if, at its optimistic acceptance, it beats the K of now by the margin, and if it
        pays from a conditional acceptance of MAX_BREAK_EVEN on. From K = 0 the cheapest guess is tried, else
        the nearest. The trial must fit into the budget even if nothing is accepted.

        Args:
            mean: Expected of each K.
            optimistic: The same at the upper bounds of acceptance.
            k_now: K that would be taken otherwise.
            margin: A fraction of the goodput.
            price: Seconds to wake the drafter; counted from K = 0 only.
        """
        floor = (1.0 + margin) * mean.goodput(k_now)
        plain_seconds = mean.step_seconds(0)
        guesses = []
        for k in range(1, mean.max_draft_tokens + 1):
            if k == k_now or optimistic.goodput(k) <= floor:
                continue
            break_even = break_even_acceptance(k, mean.step_seconds(k) / plain_seconds)
            if break_even <= MAX_BREAK_EVEN:
                guesses.append((abs(k - k_now) if k_now else break_even, k))
        if guesses:
            self._start(mean, min(guesses)[1], 0.0 if k_now else price)

    def _start(self, mean: Outlook, k: int, price: float) -> None:
        num_steps = min(max(TRIAL_REQUEST_STEPS // mean.batch_size, MIN_TRIAL_STEPS), MAX_TRIAL_STEPS)
        worst = num_steps * (mean.step_seconds(k) - mean.step_seconds(0)) + price
        if self._lost + worst <= self._fraction * self._elapsed:
            self.is_blind = False
            self._trial_k, self._num_left = k, num_steps

    def advance(self) -> None:
        """A step of the trial was decided; after the last one there is a pause, each longer than the last."""
        self._num_left -= 1
        if not self._num_left:
            self.end()

    def end(self) -> None:
        """End the trial now."""
        self._num_left = 0
        self._num_paused = self._pause_steps
        self._pause_steps = min(2 * self._pause_steps, MAX_PAUSE_STEPS)
