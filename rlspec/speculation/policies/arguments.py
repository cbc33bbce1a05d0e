"""Owns the checks of the arguments that a user may give a chooser (`speculation.policy_arguments`)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fraction(name: str, value: float) -> float:
    """A number from 0 to 1, or `ValueError`."""
    return _number(name, value, 0.0, 1.0)


def at_least_0(name: str, value: float) -> float:
    """A finite number from 0, or `ValueError`."""
    return _number(name, value, 0.0, math.inf)


def whole(name: str, value: int, least: int) -> int:
    """An integer of at least `least`, or `ValueError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: a whole number from {least}, not {value!r}")
    return value


def rising(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Integers from 1 that rise, at least one, or `ValueError`."""
    is_list = isinstance(values, list | tuple) and bool(values)
    if not is_list or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ValueError(f"{name}: a list of whole numbers, not {values!r}")
    if values[0] < 1 or list(values) != sorted(set(values)):
        raise ValueError(f"{name}: whole numbers from 1 that rise, not {values!r}")
    return tuple(values)


def _number(name: str, value: float, least: float, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        allowed = (
            f"a number from {least:g} to {most:g}" if math.isfinite(most) else f"a number from {least:g}"
        )
        raise ValueError(f"{name}: {allowed}, not {value!r}")
    return float(value)
