"""Owns the cost of an engine step, learnt online: seconds of verification and of drafting.

    step_seconds = V(num_tokens) + context_slope * total_context + D(K, batch_size)

    observe ─► K = 0 ─────────────────► V at the nearest knot ─► rising fit ─► verify_seconds
           └─► K > 0 ─► V known there? ─► D of (K, batch bucket) ─► rising fit ─► draft_seconds
                    └─► else V, or V and D in shares

The rules against stalls are in `robust.py`. A step's kind of work is assumed to cost the same whoever asks
for it: a prompt chunk of 32 tokens and 32 draft tokens to verify are both 32 tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rlspec.speculation.robust import (
    CLIP,
    LEARNING_RATE,
    WARM_SAMPLES,
    PooledSlope,
    RobustMean,
    count,
    interpolate,
    number,
    rising,
    table,
)

KNOTS = (1, *(tokens for power in range(1, 14) for tokens in (2**power, 3 * 2 ** (power - 1))), 16384)
"""Token counts at which V is kept: 1, 2, 3, 4, 6, 8, 12, ... 16384; a sample teaches the nearest one."""

MEMORY_BOUND_TOKENS = 64
"""With one measured token count, twice its seconds are assumed this many tokens on: an unknown machine."""

UNKNOWN_STEP_SECONDS = 0.01
"""V of one token before there is any sample. Only ratios of such costs mean anything."""

MIN_STEP_SECONDS, MAX_STEP_SECONDS = 1e-7, 3600.0
"""What a clock may say of a step; anything else (0, negative, NaN, a suspended machine) is ignored."""

MIN_SHARE = 0.05
"""The share of a step's seconds that is left to the target's weights at least, whatever is subtracted."""

CONTEXT_SAMPLES = 64
"""The context slope is read again after this many samples of V; between, it is constant."""

MEASURED_SAMPLES = 3
"""Samples whose median is trusted for a first decision: one stall cannot move it."""

_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(KNOTS))
_VERSION = 1


class StepCost:
    """Seconds of an engine step: the target's by tokens and context, the drafter's by K and batch.

    V is non-decreasing in tokens and context, D in K, after whatever samples. One sample moves
    `verify_seconds` at a warm knot, at the sample's context, by at most `robust.MAX_MOVE`, but for the eighth
    in a row that speaks for a lasting change (then every other knot's value is only a guess until it is
    measured again, as the machine changed) and for the context slope, read every CONTEXT_SAMPLES.

    Attributes:
        num_ignored: Samples that no clock should give, or of steps without tokens.
    """

    def __init__(self, draft_fraction: float = 0.15) -> None:
        """`draft_fraction`: seconds of a draft token over V(batch), as a prior; 0 without a draft model."""
        if not 0.0 <= draft_fraction < float("inf"):
            raise ValueError(f"draft_fraction is {draft_fraction!r}, it must be a finite number from 0")
        self.num_ignored = 0
        self._draft_fraction = draft_fraction
        self._knots: dict[int, RobustMean] = {}
        self._contexts: dict[int, float] = {}
        self._context = PooledSlope()
        self._context_slope = 0.0
        self._num_until_context = CONTEXT_SAMPLES
        self._drafts: dict[int, dict[int, RobustMean]] = {}
        self._draft_ratio = RobustMean(1.0)
        self._measured: tuple[list[int], list[float], list[float]] | None = None
        self._curve: tuple[list[int], list[float], float] | None = None
        self._draft_curves: dict[int, tuple[list[int], list[float]]] = {}

    def verify_seconds(self, num_tokens: float, total_context: int = 0) -> float:
        """Seconds of the target's forward for the tokens scheduled, with the sum of the batch's contexts.

        Linear between measured knots, flat below the first. Beyond the last it rises with the last measured
        slope (from the nearest knot at half of it or below), at most in proportion to the tokens: the
        roofline's compute-bound line. With one knot measured, t seconds at n: t / max(n, 64) a token.
        """
        xs, ys, slope = self._curve or self._fit()
        return interpolate(xs, ys, slope, num_tokens) + self._context_slope * total_context

    def draft_seconds(self, k: int, batch_size: int) -> float:
        """Seconds to draft K tokens a request; 0 at K = 0, as an idle drafter's cost is part of V.

        Linear between the K measured in the batch's bucket (powers of two). Beyond them each token costs
        draft_fraction * V(batch_size), times the one ratio of measured to expected of all buckets.
        """
        if k <= 0 or batch_size <= 0:
            return 0.0
        bucket = batch_size.bit_length()
        xs, ys = self._draft_curves.get(bucket) or self._fit_draft(bucket)
        if k <= xs[-1]:
            return interpolate(xs, ys, 0.0, k)
        token_seconds = self._draft_fraction * self.verify_seconds(batch_size)
        return ys[-1] + (k - xs[-1]) * max(self._draft_ratio.value, 0.0) * token_seconds

    @property
    def max_measured_tokens(self) -> int:
        """The largest knot with `MEASURED_SAMPLES` or more; 0: none."""
        knots = (index for index, knot in self._knots.items() if knot.count >= MEASURED_SAMPLES)
        return KNOTS[largest] if (largest := max(knots, default=-1)) >= 0 else 0

    def is_warm(self, num_tokens: float) -> bool:
        """Whether the knot nearest to the token count has `robust.WARM_SAMPLES` (5) samples or more."""
        knot = self._knots.get(bisect_right(_MIDDLES, num_tokens))
        return knot is not None and knot.count >= WARM_SAMPLES

    def observe(
        self, num_tokens: int, total_context: int, k: int, batch_size: int, step_seconds: float
    ) -> None:
        """Learn from one step in which the drafter proposed K tokens for each request of the batch.

        K = 0 teaches V. K > 0 teaches only the sum of V and D, so it goes by what is known (5 samples that
        measured it alone): V known at the nearest knot: D gets the rest; else D of this K and bucket known,
        from the steps that draft but have nothing to verify: V gets the rest; else both get their shares of
        the present estimates. What shares taught is a guess again once a sample measures it alone.
        """
        sane_clock = MIN_STEP_SECONDS <= step_seconds <= MAX_STEP_SECONDS
        if not sane_clock or num_tokens < 1 or total_context < 0 or k < 0 or (k > 0 and batch_size < 1):
            self.num_ignored += 1
            return
        if k == 0:
            self._teach_verify(num_tokens, total_context, step_seconds, firm=True)
            return
        knot = self._knots.get(bisect_right(_MIDDLES, num_tokens))
        cell = self._drafts.get(batch_size.bit_length(), {}).get(k)
        verify = self.verify_seconds(num_tokens, total_context)
        draft = self.draft_seconds(k, batch_size)
        total = verify + draft
        if knot is not None and knot.num_firm >= WARM_SAMPLES:
            self._teach_draft(k, batch_size, step_seconds - verify, total, firm=True)
        elif cell is not None and cell.num_firm >= WARM_SAMPLES:
            rest = max(step_seconds - draft, MIN_SHARE * step_seconds)
            self._teach_verify(num_tokens, total_context, rest, firm=False)
        else:
            self._teach_draft(k, batch_size, step_seconds * (draft / total), total, firm=False)
            self._teach_verify(num_tokens, total_context, step_seconds * (verify / total), firm=False)

    def _teach_verify(self, num_tokens: int, total_context: int, seconds: float, firm: bool) -> None:
        """Move V at the nearest knot, to which the seconds are carried in proportion to the present fit."""
        index = bisect_right(_MIDDLES, num_tokens)
        context_seconds = self._context_slope * total_context
        knot = self._knots.get(index)
        if knot is None:
            known = self.verify_seconds(KNOTS[index]) if self._knots else None
            knot = self._knots[index] = RobustMean(known)
            self._contexts[index] = total_context
            self._measured = None
        if num_tokens != KNOTS[index]:
            here = self.verify_seconds(num_tokens, total_context)
            seconds *= self.verify_seconds(KNOTS[index], total_context) / here if here else 1.0
        scale = knot.value + context_seconds
        changed = knot.update(seconds - context_seconds, scale, firm)
        knot.value = max(knot.value, MIN_SHARE * (knot.value + context_seconds), MIN_SHARE * MIN_STEP_SECONDS)
        rate = max(LEARNING_RATE, 1.0 / knot.count)
        self._contexts[index] += rate * (total_context - self._contexts[index])
        self._curve = None
        if self._measured is not None:
            xs, values, weights = self._measured
            place = bisect_right(xs, KNOTS[index]) - 1
            values[place], weights[place] = knot.value, knot.weight
        if changed:
            self._measured = None
            for other in self._knots.values():
                if other is not knot:
                    other.doubt()
            self._context.forget_levels()
        elif knot.count > WARM_SAMPLES:
            clipped = min(max(seconds, (1.0 - CLIP) * scale), (1.0 + CLIP) * scale)
            self._teach_context(index, total_context, clipped)

    def _teach_context(self, index: int, total_context: int, seconds: float) -> None:
        """Learn the seconds per context token; where it changes, V gives up or takes back what it moves.

        At most 1 - MIN_SHARE of the seconds of any knot, at the context it was measured with, are context's.
        """
        self._context.observe(index, total_context, seconds)
        self._num_until_context -= 1
        if self._num_until_context > 0:
            return
        self._num_until_context = CONTEXT_SAMPLES
        slope = self._context.read()
        if slope is None:
            return
        old = self._context_slope
        for knot_index, context in self._contexts.items():
            if context > 0.0:
                total = self._knots[knot_index].value + old * context
                slope = min(slope, (1.0 - MIN_SHARE) * total / context)
        for knot_index, context in self._contexts.items():
            self._knots[knot_index].shift((old - slope) * context)
        self._context_slope = slope
        self._measured = self._curve = None

    def _teach_draft(self, k: int, batch_size: int, seconds: float, total: float, firm: bool) -> None:
        """Move D of the K and the batch's bucket, and the ratio that the other cells are expected by.

        A clock's noise is that of the whole step, so clipping goes by `total`, the step seconds expected.
        """
        cells = self._drafts.setdefault(batch_size.bit_length(), {})
        cell = cells.get(k)
        if cell is None:
            cell = cells[k] = RobustMean(self.draft_seconds(k, batch_size))
        cell.update(seconds, total, firm)
        expected = k * self._draft_fraction * self.verify_seconds(batch_size)
        if firm and expected > 0.0:
            self._draft_ratio.update(seconds / expected, total / expected, firm)
        self._draft_curves.pop(batch_size.bit_length(), None)

    def _fit(self) -> tuple[list[int], list[float], float]:
        """The rising fit of V through the measured knots, and the slope beyond the last one."""
        if not self._knots:
            return [1], [UNKNOWN_STEP_SECONDS], UNKNOWN_STEP_SECONDS / MEMORY_BOUND_TOKENS
        if self._measured is None:
            order = sorted(self._knots)
            knots = [self._knots[index] for index in order]
            tokens = [KNOTS[index] for index in order]
            self._measured = tokens, [knot.value for knot in knots], [knot.weight for knot in knots]
        xs, values, weights = self._measured
        ys = rising(values, weights)
        last, seconds = xs[-1], ys[-1]
        if len(xs) == 1:
            slope = seconds / max(last, MEMORY_BOUND_TOKENS)
        else:
            base = max(bisect_right(xs, last / 2) - 1, 0)
            slope = min((seconds - ys[base]) / (last - xs[base]), seconds / last)
        self._curve = xs, ys, slope
        return self._curve

    def _fit_draft(self, bucket: int) -> tuple[list[int], list[float]]:
        """The rising fit of D over the K measured in a bucket, from 0 seconds at K = 0."""
        items = sorted(self._drafts.get(bucket, {}).items())
        fit = rising([max(cell.value, 0.0) for _, cell in items], [cell.weight for _, cell in items])
        self._draft_curves[bucket] = [0, *(k for k, _ in items)], [0.0, *fit]
        return self._draft_curves[bucket]

    def state(self) -> dict[str, Any]:
        """Everything learnt as plain JSON values, for `from_state`."""
        return {
            "version": _VERSION,
            "draft_fraction": self._draft_fraction,
            "num_ignored": self.num_ignored,
            "knots": {
                str(KNOTS[index]): {**knot.state(), "context": self._contexts[index]}
                for index, knot in self._knots.items()
            },
            "context": self._context.state(),
            "context_slope": self._context_slope,
            "num_until_context": self._num_until_context,
            "drafts": {
                str(bucket): {str(k): cell.state() for k, cell in cells.items()}
                for bucket, cells in self._drafts.items()
            },
            "draft_ratio": self._draft_ratio.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StepCost:
        """The cost behind `state()`; `ValueError` names what is wrong."""
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ValueError(f"state: it must be a table of version {_VERSION}, as StepCost.state() gives it")
        cost = cls(number(state, "draft_fraction", 0))
        cost.num_ignored = count(state, "num_ignored")
        for tokens, values in table(state, "knots").items():
            if not tokens.isdigit() or int(tokens) not in KNOTS:
                raise ValueError(f"state: knot {tokens!r} is none of {KNOTS}")
            values = table({tokens: values}, tokens)
            number(values, "value", 0)
            index = KNOTS.index(int(tokens))
            cost._knots[index] = RobustMean.from_state(values)
            cost._contexts[index] = number(values, "context", 0)
        cost._context = PooledSlope.from_state(table(state, "context"))
        cost._context_slope = number(state, "context_slope", 0)
        cost._num_until_context = count(state, "num_until_context")
        for bucket, cells in table(state, "drafts").items():
            for k, values in table({"drafts": cells}, "drafts").items():
                if not bucket.isdigit() or not k.isdigit() or int(k) < 1:
                    raise ValueError(
                        f"state: draft cell {bucket!r}, {k!r} must be whole numbers, K at least 1"
                    )
                cell = RobustMean.from_state(table({k: values}, k))
                cost._drafts.setdefault(int(bucket), {})[int(k)] = cell
        cost._draft_ratio = RobustMean.from_state(table(state, "draft_ratio"))
        return cost
