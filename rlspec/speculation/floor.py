"""Owns the promise that speculation does not make a user slower: the floor under measured goodput."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_STEPS = 24
"""Speculating steps that are judged together. Step times scatter by 10 %, so their mean by 2 %: a slowdown of
5 % is then 2.5 standard errors away from none."""

COOL_DOWN_STEPS = 64
"""Plain steps after the floor is broken. They also measure plain decoding anew."""

MAX_COOL_DOWN_STEPS = 2048
"""Each further break doubles the cool-down up to this."""


@dataclass(frozen=True, slots=True)
class FloorVerdict:
    """The floor was broken: what the window's steps took, and plain decoding would have taken, in seconds."""

    actual_seconds: float
    plain_seconds: float
    cool_down_steps: int

    def __str__(self) -> str:
        slowdown = self.actual_seconds / self.plain_seconds - 1.0
        seconds = f"{self.actual_seconds:.3f} s, {slowdown:.1%} longer than the {self.plain_seconds:.3f} s"
        off = f"expected of plain decoding; off for {self.cool_down_steps} steps"
        return f"{WINDOW_STEPS} speculating steps took {seconds} {off}"


class Floor:
    """Compares speculating steps with plain decoding's estimate; orders cool-downs."""

    def __init__(self, max_slowdown: float) -> None:
        """`max_slowdown`: share longer than plain decoding that is allowed."""
        self._max_slowdown = max_slowdown
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self._actual = self._plain = 0.0
        self._num_left = 0
        self._cool_down_steps = COOL_DOWN_STEPS

    @property
    def is_cooling(self) -> bool:
        """Whether speculation has to stay off."""
        return self._num_left > 0

    def observe_plain(self) -> None:
        """A step at K = 0 has passed."""
        self._num_left = max(self._num_left - 1, 0)

    def observe(self, step_seconds: float, plain_seconds: float) -> FloorVerdict | None:
        """A speculating step, and the seconds that plain decoding would have taken for its tokens."""
        if len(self._window) == WINDOW_STEPS:
            actual, plain = self._window[0]
            self._actual -= actual
            self._plain -= plain
        self._window.append((step_seconds, plain_seconds))
        self._actual += step_seconds
        self._plain += plain_seconds
        if len(self._window) < WINDOW_STEPS:
            return None
        if self._actual <= (1.0 + self._max_slowdown) * self._plain:
            if self._actual <= self._plain:
                self._cool_down_steps = COOL_DOWN_STEPS
            return None
        verdict = FloorVerdict(self._actual, self._plain, self._cool_down_steps)
        self._num_left = self._cool_down_steps
        self._cool_down_steps = min(2 * self._cool_down_steps, MAX_COOL_DOWN_STEPS)
        self._window.clear()
        self._actual = self._plain = 0.0
        return verdict
