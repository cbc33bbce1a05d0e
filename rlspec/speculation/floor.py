"""Owns the promise that speculation does not make a user slower: the floor under measured goodput."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOSS_STEPS = 8.0
"""Plain steps' worth of time that speculation may lose before it goes off: twice what one request's luck with
0.5 accepted tokens a step comes to now and then, and a hundredth of a run of 800 steps."""

MAX_STEP_LOSS = 2.0
"""A single step counts for no more plain steps than this, so that a stall of the machine is no verdict."""

COOL_DOWN_STEPS = 64
"""Plain steps after the floor is broken. They also measure plain decoding anew."""

MAX_COOL_DOWN_STEPS = 2048
"""Each further break doubles the cool-down up to this."""

RENEWED_AFTER_STEPS = 64.0
"""Plain steps' worth of time that steps faster than plain have won since the last break, for the next
cool-down to be the shortest again."""


@dataclass(frozen=True, slots=True)
class FloorVerdict:
    """The floor was broken: seconds since the sum was last 0, those expected of plain decoding, and steps."""

    actual_seconds: float
    plain_seconds: float
    num_steps: int
    cool_down_steps: int

    def __str__(self) -> str:
        slowdown = self.actual_seconds / self.plain_seconds - 1.0
        seconds = f"{self.actual_seconds:.3f} s, {slowdown:.1%} longer than the {self.plain_seconds:.3f} s"
        off = f"expected of plain decoding; off for {self.cool_down_steps} steps"
        return f"{self.num_steps} speculating steps took {seconds} {off}"


class Floor:
    """Adds up what speculating steps lose against plain decoding's estimate; orders cool-downs.

    The statistic is Page's (1954) cumulative sum S = max(0, S + loss - allowance) in units of plain steps:
    luck of either sign cancels out, a lasting slowdown adds up. The allowance is half of `max_slowdown`, so
    that slowdowns beyond it reach MAX_LOSS_STEPS after MAX_LOSS_STEPS / (slowdown - allowance) steps.
    """

    def __init__(self, max_slowdown: float) -> None:
        """`max_slowdown`: share longer than plain decoding that must be noticed."""
        self._allowance = max_slowdown / 2.0
        self._num_left = 0
        self._cool_down_steps = COOL_DOWN_STEPS
        self._won = 0.0
        self._restart()

    def _restart(self) -> None:
        self._sum = self._actual = self._plain = 0.0
        self._num_steps = 0

    @property
    def is_cooling(self) -> bool:
        """Whether speculation has to stay off."""
        return self._num_left > 0

    def observe_plain(self) -> None:
        """A step at K = 0 has passed."""
        self._num_left = max(self._num_left - 1, 0)

    def observe(
        self, step_seconds: float, plain_seconds: float, plain_step_seconds: float
    ) -> FloorVerdict | None:
        """Judge a speculating step.

        Args:
            step_seconds: What it took.
            plain_seconds: What plain decoding would have taken for its tokens.
            plain_step_seconds: What one plain step takes.
        """
        self._actual += step_seconds
        self._plain += plain_seconds
        self._num_steps += 1
        loss = (step_seconds - (1.0 + self._allowance) * plain_seconds) / plain_step_seconds
        self._sum += min(loss, MAX_STEP_LOSS)
        self._won += max(-loss, 0.0)
        if self._sum <= 0.0:
            if self._won >= RENEWED_AFTER_STEPS:
                self._cool_down_steps = COOL_DOWN_STEPS
            self._restart()
            return None
        if self._sum < MAX_LOSS_STEPS:
            return None
        verdict = FloorVerdict(self._actual, self._plain, self._num_steps, self._cool_down_steps)
        self._num_left, self._won = self._cool_down_steps, 0.0
        self._cool_down_steps = min(2 * self._cool_down_steps, MAX_COOL_DOWN_STEPS)
        self._restart()
        return verdict
