"""Owns the estimators behind the step cost: a mean that a stall cannot move, a rising fit, a pooled slope.

All are online, deterministic and without a clock. Values keep the unit of their samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

WARM_SAMPLES = 5
"""Samples after which a mean is warm. Until then it is their median, which two stalls in five cannot move."""

LEARNING_RATE = 0.025
"""Least weight of a new sample: a memory of 40. Noise of 10 % leaves 1.1 %: sqrt(rate / (2 - rate))."""

CLIP = 0.3
"""A warm mean takes no sample for further away than this share of the scale: a stall is 1.3 steps. That is
three standard deviations of 10 % noise; 0.4 let three stalls in 15 samples move V by 4 %."""

MAX_MOVE = CLIP / (WARM_SAMPLES + 1)
"""The most, in shares of the scale, that one sample moves a warm mean: 5 %; 0.75 % after 40 samples."""

LASTING_DEVIATION = 0.2
"""A sample this share of the scale away speaks for a change: two standard deviations of 10 % noise."""

LASTING_SAMPLES = 8
"""Samples in a row that speak for the same change make it real; 20 % noise does so in one of 10 ** 6 runs."""

FORGETTING = 1.0 - 1.0 / 2000.0
"""What a slope keeps of its evidence at each sample: contexts grow over thousands of steps."""

SLOPE_MIN_SAMPLES = 64
"""Samples before a slope is read at all."""

SLOPE_MIN_SPREAD = 0.1
"""Standard deviation of x within the groups, as a share of the mean x, below which x did not really vary."""


def number(state: Mapping[str, Any], name: str, low: float | None = None) -> float:
    """The finite number under `name`, at least `low`; `ValueError` names what is wrong."""
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"state: {name!r} is {value!r}, it must be a finite number")
    if low is not None and value < low:
        raise ValueError(f"state: {name!r} is {value!r}, it must be at least {low}")
    return value


def count(state: Mapping[str, Any], name: str, signed: bool = False) -> int:
    """The whole number under `name`, not negative unless `signed`; `ValueError` names what is wrong."""
    value = number(state, name, None if signed else 0)
    if not isinstance(value, int):
        raise ValueError(f"state: {name!r} is {value!r}, it must be a whole number")
    return value


def table(state: object, name: str) -> dict[str, Any]:
    """The table under `name` of the table `state`; `ValueError` names what is wrong."""
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"state: {name!r} is {value!r}, it must be a table")
    return value


def rising(values: list[float], weights: list[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent violators).

    Scaling or shifting the values does the same to the answer, and raising one value lowers no answer: what
    bounds the move of each value, as a share or in seconds, bounds the move of each answer.
    """
    ordered = sorted(values)
    if ordered == values:
        return ordered
    means: list[float] = []
    masses: list[float] = []
    ends: list[int] = []
    for index, (value, weight) in enumerate(zip(values, weights, strict=True)):
        while means and means[-1] > value:
            mass = masses.pop()
            value = (means.pop() * mass + value * weight) / (mass + weight)
            weight += mass
            ends.pop()
        means.append(value)
        masses.append(weight)
        ends.append(index + 1)
    fit: list[float] = []
    for value, end in zip(means, ends, strict=True):
        fit += [value] * (end - len(fit))
    return fit


def interpolate(xs: Sequence[float], ys: Sequence[float], slope: float, x: float) -> float:
    """The value at x: flat below the first of xs, linear between, rising by `slope` beyond the last."""
    after = bisect_right(xs, x)
    if after == 0:
        return ys[0]
    left, low = xs[after - 1], ys[after - 1]
    if after == len(xs):
        return low + slope * (x - left)
    high = ys[after]
    value = low + (high - low) * ((x - left) / (xs[after] - left))
    return value if value < high else high


class RobustMean:
    """A running mean of noisy samples that single outliers hardly move and lasting changes do.

    It starts as the median of its guess and the first samples (the lower of two middle ones, as clocks err
    upwards: a first stall is outvoted by the second sample). Then each sample is clipped and weighs
    max(1 / count, LEARNING_RATE). LASTING_SAMPLES in a row on the same side of what the mean was before
    them replace it by their median.

    Attributes:
        value: The estimate.
        count: Samples behind it; 0: only a guess.
        num_firm: Of them, those that measured this quantity alone; the others are shares of a sum.
    """

    __slots__ = ("_anchor", "_recent", "_run", "count", "num_firm", "value")

    def __init__(self, guess: float | None = None) -> None:
        """A mean without samples; the guess has one vote among the first ones."""
        self.value = self._anchor = 0.0 if guess is None else guess
        self.count = self.num_firm = self._run = 0
        self._recent: list[float] = [] if guess is None else [guess]

    @property
    def weight(self) -> float:
        """Its say in a rising fit: constant once warm, so that MAX_MOVE holds there too; tiny for a guess."""
        return (self.count if self.count < WARM_SAMPLES else WARM_SAMPLES) or 0.01

    def doubt(self) -> None:
        """Make the value a guess: the next samples are the first ones again."""
        self.count = self.num_firm = self._run = 0
        self._recent = [self.value]

    def shift(self, difference: float) -> None:
        """Move everything by a difference, as when another term of a sum took it over."""
        self.value += difference
        self._anchor += difference
        self._recent = [sample + difference for sample in self._recent]

    def update(self, sample: float, scale: float, firm: bool) -> bool:
        """Take a sample; the first firm one makes what soft ones taught a guess. True: a lasting change.

        `scale` (same unit) is what 100 % of the clipping means: the whole measured time, of which this mean
        may be a part.
        """
        if firm:
            if not self.num_firm and self.count:
                self.doubt()
            self.num_firm += 1
        self.count += 1
        recent = self._recent
        recent.append(sample)
        if self.count <= WARM_SAMPLES:
            self.value = sorted(recent)[(len(recent) - 1) // 2]
            return False
        if len(recent) > LASTING_SAMPLES:
            del recent[0]
        value, run = self.value, self._run
        reference, margin = (self._anchor if run else value), LASTING_DEVIATION * scale
        side = (sample > reference + margin) - (sample < reference - margin)
        if side * run <= 0:
            run, self._anchor = 0, value
        self._run = run + side if side else 0
        if abs(self._run) >= LASTING_SAMPLES:
            middle = sorted(recent)
            self.value = (middle[len(middle) // 2] + middle[(len(middle) - 1) // 2]) / 2
            self.count, self._run = WARM_SAMPLES, 0
            return True
        step = min(max(sample - value, -CLIP * scale), CLIP * scale)
        self.value = value + max(LEARNING_RATE, 1.0 / self.count) * step
        return False

    def state(self) -> dict[str, Any]:
        """Plain values for `from_state`."""
        return {
            "value": self.value,
            "count": self.count,
            "num_firm": self.num_firm,
            "recent": list(self._recent),
            "run": self._run,
            "anchor": self._anchor,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RobustMean:
        """The mean behind `state()`; `ValueError` names what is wrong."""
        mean = cls()
        mean.value, mean._anchor = number(state, "value"), number(state, "anchor")
        mean.count, mean.num_firm = count(state, "count"), count(state, "num_firm")
        mean._run = count(state, "run", signed=True)
        recent = state.get("recent")
        if not isinstance(recent, list) or len(recent) > LASTING_SAMPLES:
            raise ValueError(f"state: 'recent' is {recent!r}, it must list at most {LASTING_SAMPLES} samples")
        mean._recent = [number({"recent": sample}, "recent") for sample in recent]
        return mean


class PooledSlope:
    """How y rises with x inside groups whose levels differ: one least-squares slope of all groups together.

    Assumes that the slope is the same in every group and not negative. It is shrunk by its own noise,
    slope * (1 - 4 * variance / slope ** 2), so it stays 0 until it is two standard errors away from 0.
    """

    __slots__ = ("_groups", "_weight", "_xx", "_xy", "_yy")

    def __init__(self) -> None:
        """No evidence, slope 0."""
        self._groups: dict[int, tuple[int, float, float]] = {}
        self._xx = self._xy = self._yy = self._weight = 0.0

    def observe(self, group: int, x: float, y: float) -> None:
        """Take a sample of a group; only its distance from the group's own means tells."""
        size, mean_x, mean_y = self._groups.get(group, (0, x, y))
        rate = max(1.0 / (size + 1), 1.0 - FORGETTING)
        dx, dy = x - mean_x, y - mean_y
        self._groups[group] = (size + 1, mean_x + rate * dx, mean_y + rate * dy)
        rest = 1.0 - rate
        self._xx = FORGETTING * self._xx + rest * dx * dx
        self._xy = FORGETTING * self._xy + rest * dx * dy
        self._yy = FORGETTING * self._yy + rest * dy * dy
        self._weight = FORGETTING * self._weight + 1.0

    def forget_levels(self) -> None:
        """The groups' levels changed, as after a change of the machine's speed: their means start anew."""
        self._groups.clear()

    def read(self) -> float | None:
        """The slope in y per x, at least 0; None where x varied too little to tell."""
        size = sum(group[0] for group in self._groups.values())
        if self._weight < SLOPE_MIN_SAMPLES or not size:
            return None
        mean_x = sum(group[0] * group[1] for group in self._groups.values()) / size
        if self._xx <= 0.0 or self._xx < self._weight * (SLOPE_MIN_SPREAD * mean_x) ** 2:
            return None
        slope = self._xy / self._xx
        if slope <= 0.0:
            return 0.0
        variance = max(self._yy - slope * self._xy, 0.0) / (self._weight * self._xx)
        return max(slope - 4.0 * variance / slope, 0.0)

    def state(self) -> dict[str, Any]:
        """Plain values for `from_state`."""
        groups = {str(name): list(group) for name, group in self._groups.items()}
        return {"groups": groups, "xx": self._xx, "xy": self._xy, "yy": self._yy, "weight": self._weight}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PooledSlope:
        """The slope behind `state()`; `ValueError` names what is wrong."""
        slope = cls()
        slope._xx, slope._yy = number(state, "xx", 0), number(state, "yy", 0)
        slope._xy, slope._weight = number(state, "xy"), number(state, "weight", 0)
        for name, group in table(state, "groups").items():
            if not name.isdigit() or not isinstance(group, list) or len(group) != 3:
                raise ValueError(f"state: group {name!r} is {group!r}, it must be [count, mean x, mean y]")
            parts = dict(zip(("group count", "mean x", "mean y"), group, strict=True))
            means = number(parts, "mean x"), number(parts, "mean y")
            slope._groups[int(name)] = (count(parts, "group count"), *means)
        return slope
