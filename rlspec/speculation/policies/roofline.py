"""Owns the roofline chooser: speculation on above a modelled speedup, its length on a ladder."""

from __future__ import annotations

from collections.abc import Sequence

from rlspec.speculation.policies.arguments import at_least_0, fraction, rising, whole
from rlspec.speculation.policies.base import Outcome, Outlook

MIN_SPEEDUP = 1.05
"""Modelled speedup from which speculation is on: EfficientRollout's; 5 % for the model's own error."""
ACCEPTANCE_UP = 0.94
"""Accepted / drafted of a window at or above which the length should grow: EfficientRollout's."""
ACCEPTANCE_DOWN = 0.85
"""Accepted / drafted of a window at or below which the length should shrink: EfficientRollout's."""
PERSISTENCE_WINDOWS = 2
"""Windows in a row that must agree before the ladder moves by one rung: EfficientRollout's."""
WINDOW_STEPS = 32
"""Steps with drafts in one window. Ours: at one request and K = 5 these are 160 draft tokens, so that the
standard error of an acceptance of .9 is .024, a quarter of the gap between the two thresholds."""


class RooflineChooser:
    """K = the ladder's rung gamma where speedup(gamma) >= 1.05, else 0.

    speedup(gamma) = L / (gamma T_D / T_T + T_V / T_T), with L the expected tokens of a step, T_D a drafting
    pass, T_V the verification, T_T a plain step. In an `Outlook`: L = tokens[gamma], gamma T_D =
    draft_seconds[gamma], T_V = verify_seconds[gamma], T_T = step_seconds(0), an idle drafter's cost included.

    The ladder starts on its lowest rung. It moves up after two windows in a row with accepted / drafted
    >= .94, down after two with <= .85; a window in between starts the count again.

    A step that may not use the present rung (no room) takes the highest that it may; the ladder stays. The
    toggle looks at that rung alone: where a shorter draft would pay and the rung does not, it is off. All
    drafted tokens count for the acceptance, whatever their K.

    Source: EfficientRollout (arXiv 2606.18967); its rungs are 5/7/9/11, the default here is each K from 1 up.
    Assumptions: the acceptance of the steps before holds for the next ones; it is high throughout, as with
    the paper's quantised copy of the target. With a weaker drafter (below .85 at any length) the ladder stays
    on its lowest rung and only the toggle works.

    Args:
        ladder: Rungs in tokens, rising; None is 1, 2, ... up to the largest K. Rungs above the largest K
            are left out; if none remains, the largest K is the only one.
        window_steps: Steps with drafts in one acceptance window.
        min_speedup, acceptance_up, acceptance_down, persistence_windows: See the constants.
    """

    explores = False

    def __init__(
        self,
        ladder: Sequence[int] | None = None,
        window_steps: int = WINDOW_STEPS,
        min_speedup: float = MIN_SPEEDUP,
        acceptance_up: float = ACCEPTANCE_UP,
        acceptance_down: float = ACCEPTANCE_DOWN,
        persistence_windows: int = PERSISTENCE_WINDOWS,
    ) -> None:
        self._ladder = None if ladder is None else rising("ladder", ladder)
        self._window_steps = whole("window_steps", window_steps, 1)
        self._min_speedup = at_least_0("min_speedup", min_speedup)
        self._acceptance_up = fraction("acceptance_up", acceptance_up)
        self._acceptance_down = fraction("acceptance_down", acceptance_down)
        if acceptance_down >= acceptance_up:
            raise ValueError(f"acceptance_down: below acceptance_up, {acceptance_up}, not {acceptance_down}")
        self._persistence_windows = whole("persistence_windows", persistence_windows, 1)
        self._rung = 0
        self._num_rungs = 1
        """Of the longest ladder that any step could use."""
        self._num_steps = self._num_drafted = self._num_accepted = 0
        self._streak = 0
        """Windows in a row that ask for a longer (positive) or shorter (negative) draft."""

    def choose(self, outlook: Outlook) -> int:
        """The rung's K if its modelled speedup is enough, else 0."""
        rungs = self._rungs(outlook.max_draft_tokens)
        if not rungs:
            return 0
        self._num_rungs = max(self._num_rungs, len(rungs))
        gamma = rungs[min(self._rung, len(rungs) - 1)]
        speedup = outlook.goodput(gamma) * outlook.step_seconds(0)
        return gamma if speedup >= self._min_speedup else 0

    def observe(self, outcome: Outcome) -> None:
        """Count the acceptance; a full window may move the ladder."""
        if outcome.num_drafted <= 0:
            return
        self._num_steps += 1
        self._num_drafted += outcome.num_drafted
        self._num_accepted += outcome.num_accepted
        if self._num_steps >= self._window_steps:
            self._end_window(self._num_accepted / self._num_drafted)
            self._num_steps = self._num_drafted = self._num_accepted = 0

    def _rungs(self, max_draft_tokens: int) -> tuple[int, ...]:
        if max_draft_tokens == 0:
            return ()
        if self._ladder is None:
            return tuple(range(1, max_draft_tokens + 1))
        return tuple(k for k in self._ladder if 1 <= k <= max_draft_tokens) or (max_draft_tokens,)

    def _end_window(self, acceptance: float) -> None:
        if acceptance >= self._acceptance_up:
            self._streak = max(self._streak, 0) + 1
        elif acceptance <= self._acceptance_down:
            self._streak = min(self._streak, 0) - 1
        else:
            self._streak = 0
        if abs(self._streak) >= self._persistence_windows:
            step = 1 if self._streak > 0 else -1
            self._rung = min(max(self._rung + step, 0), self._num_rungs - 1)
            self._streak = 0
