"""Owns a run's steps in summary and in words: which K for which reason, what it saved, what was foreseen."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlspec.savings import Savings, savings
from rlspec.step_files import StepFile
from rlspec.timeline import REASON_TEXTS, Happening, Row, Stretch, num_calls
from rlspec.types import Reason, StepFacts

TIMELINE_HEADERS = (
    "steps",
    "seconds",
    "requests",
    "waiting",
    "K",
    "why (of so many)",
    "accepted",
    "tokens a request",
    "step ms (predicted)",
    "expected ms (plain)",
    "saved s",
)
REASON_HEADERS = ("reason", "in words", "steps", "seconds", "K: steps")


@dataclass(frozen=True, slots=True)
class ReasonUse:
    """How often a reason decided.

    Attributes:
        reason: The reason.
        num_steps: Steps.
        seconds: What they took.
        steps_by_k: Steps by K.
    """

    reason: Reason
    num_steps: int
    seconds: float
    steps_by_k: dict[int, int]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A run in summary.

    Attributes:
        num_steps, num_calls: Engine steps, and the calls that they belong to.
        step_seconds: What the steps took.
        reasons: By how many steps, the most first.
        savings: Against plain decoding, estimated.
        prediction_error: Median of |predicted - actual| / actual step seconds; None without predictions.
        num_predicted: Steps with a prediction.
        events: Events by kind.
    """

    num_steps: int
    num_calls: int
    step_seconds: float
    reasons: tuple[ReasonUse, ...]
    savings: Savings
    prediction_error: float | None
    num_predicted: int
    events: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        tree = asdict(self)
        for use in tree["reasons"]:
            use["steps_by_k"] = {str(k): count for k, count in use["steps_by_k"].items()}
        return tree

    def lines(self) -> list[str]:
        """The summary in sentences."""
        calls = f" of {self.num_calls} calls" if self.num_calls > 1 else ""
        return [
            f"{self.num_steps} steps{calls} in {self.step_seconds:.2f} s; {self._speculating()}",
            self._saved(),
            self._predicted(),
            "events: " + (", ".join(f"{kind} {count}" for kind, count in self.events.items()) or "none"),
        ]

    def _speculating(self) -> str:
        share = self.savings.num_speculating_steps / max(self.num_steps, 1)
        return f"{self.savings.num_speculating_steps} of them drafted or verified drafts ({share:.0%})"

    def _saved(self) -> str:
        found = self.savings
        rest = (
            f"{found.num_not_comparable_steps} steps ({found.not_comparable_seconds:.2f} s) are not "
            "comparable: a prompt in the step, no token, or no expectation of plain decoding"
        )
        if not found.num_comparable_steps:
            return f"saved against plain decoding: unknown; {rest}"
        verb = "saved" if found.saved_seconds >= 0 else "lost"
        share = abs(found.saved_seconds) / found.plain_seconds
        return (
            f"{verb} against plain decoding, estimated: {abs(found.saved_seconds):.2f} s of "
            f"{found.plain_seconds:.2f} s ({share:.0%}) in {found.num_comparable_steps} steps; {rest}"
        )

    def _predicted(self) -> str:
        if self.prediction_error is None:
            return "step time predicted: for no step"
        return (
            f"step time predicted: for {self.num_predicted} steps; "
            f"median |predicted - actual| / actual {self.prediction_error:.1%}"
        )


def explain(file: StepFile) -> Explanation:
    """The summary of a steps file."""
    steps = file.steps
    errors = [
        abs(facts.predicted_seconds - facts.step_seconds) / facts.step_seconds
        for facts in steps
        if facts.predicted_seconds > 0 and facts.step_seconds > 0
    ]
    counts = Counter(facts.reason for facts in steps)
    return Explanation(
        num_steps=len(steps),
        num_calls=num_calls(steps),
        step_seconds=sum(facts.step_seconds for facts in steps),
        reasons=tuple(_use(reason, steps) for reason, _ in counts.most_common()),
        savings=savings(steps),
        prediction_error=statistics.median(errors) if errors else None,
        num_predicted=len(errors),
        events=dict(Counter(event.kind.value for event in file.events)),
    )


def reason_rows(explanation: Explanation) -> list[list[str]]:
    """The reasons under `REASON_HEADERS`."""
    return [
        [
            use.reason.value,
            REASON_TEXTS[use.reason],
            f"{use.num_steps}",
            f"{use.seconds:.2f}",
            ", ".join(f"{k}: {count}" for k, count in use.steps_by_k.items()),
        ]
        for use in explanation.reasons
    ]


def timeline_rows(rows: Sequence[Row]) -> list[list[str]]:
    """The timeline under `TIMELINE_HEADERS`; an event has its text where a stretch has its reason."""
    return [_stretch_row(row) if isinstance(row, Stretch) else _event_row(row) for row in rows]


def _use(reason: Reason, steps: Sequence[StepFacts]) -> ReasonUse:
    part = [facts for facts in steps if facts.reason is reason]
    by_k = dict(sorted(Counter(facts.num_draft_tokens for facts in part).items()))
    return ReasonUse(reason, len(part), sum(facts.step_seconds for facts in part), by_k)


def _stretch_row(row: Stretch) -> list[str]:
    majority = f" ({row.majority:.0%})" if row.majority < 1 else ""
    others = _range(row.min_draft_tokens, row.max_draft_tokens)
    k = f"{row.num_draft_tokens}"
    accepted = f"{row.num_accepted / row.num_drafted:.0%} of {row.num_drafted}" if row.num_drafted else "-"
    return [
        _range(row.first_step, row.last_step),
        f"{row.begin_seconds:.2f}-{row.end_seconds:.2f}",
        _range(row.min_active, row.max_active),
        f"{row.max_waiting}" if row.max_waiting else "-",
        k if k == others else f"{k} ({others})",
        REASON_TEXTS[row.reason] + majority,
        accepted,
        f"{row.tokens_per_request_step:.2f}",
        f"{1000 * row.median_seconds:.1f} ({_known_ms(row.predicted_seconds)})",
        f"{_known_ms(row.expected_seconds)} ({_known_ms(row.plain_seconds)})",
        "-" if row.saved_seconds is None else f"{row.saved_seconds:+.3f}",
    ]


def _event_row(row: Happening) -> list[str]:
    more = f" (and {row.num_more} more in these steps)" if row.num_more else ""
    shown = [f"{row.step}", f"{row.seconds:.2f}", "", "", "!", f"{row.kind}: {row.text}{more}"]
    return shown + [""] * (len(TIMELINE_HEADERS) - len(shown))


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}-{high}"


def _known_ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds > 0 else "?"
