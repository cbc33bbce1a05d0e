"""Owns explain.html: one self-contained page with summary, timeline and plots of a run's steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlspec.explanation import REASON_HEADERS, TIMELINE_HEADERS, Explanation, reason_rows, timeline_rows
from rlspec.plots import NUM_WINDOWS, DrawLine, draw_svg, render_page
from rlspec.rollout_files import write_text
from rlspec.savings import cumulative_savings
from rlspec.step_files import StepFile
from rlspec.timeline import Row, start_seconds
from rlspec.types import StepFacts

MAX_POINTS = 400
"""Of a line over time: about one a pixel of the plot. Longer runs show the mean of as many parts."""


def write_explain_page(
    path: Path, *, file: StepFile, explanation: Explanation, rows: Sequence[Row], name: str
) -> None:
    """Write the page; it needs no other file and no network.

    Raises:
        SetupError: matplotlib or jinja2 is not installed.
        InputError: The file cannot be written.
    """
    page = render_page(
        "tables.html.jinja",
        title=f"rlspec explain {name}",
        notes=explanation.lines(),
        tables=[
            ("Why K", REASON_HEADERS, reason_rows(explanation)),
            ("Timeline", TIMELINE_HEADERS, timeline_rows(rows)),
        ],
        plots=_plots(file.steps),
        command=f"{file.command}\n{file.date}",
        versions=file.versions,
        hardware=file.hardware,
    )
    write_text(path, page)


def _plots(steps: Sequence[StepFacts]) -> list[tuple[str, str]]:
    """The caption and the SVG of each plot."""
    starts = start_seconds(steps)
    lines = _parts(len(steps), MAX_POINTS)
    saved = cumulative_savings(steps)

    def mean(value: Callable[[StepFacts], float]) -> list[float]:
        return [statistics.fmean(value(facts) for facts in steps[part.start : part.stop]) for part in lines]

    times = [starts[part.start] for part in lines]
    active = _line(times, mean(lambda facts: facts.batch_size))
    draft_tokens = _line(times, mean(lambda facts: facts.num_draft_tokens))
    saved_line = _line(times, [saved[part.stop - 1] for part in lines])
    return [
        ("Active requests over time", draw_svg(("seconds", "requests"), [active])),
        ("K over time", draw_svg(("seconds", "K"), [draft_tokens])),
        ("Acceptance over time", draw_svg(("seconds", "accepted share"), [_acceptance(steps, starts)])),
        (
            "Step time, actual and predicted (medians)",
            draw_svg(("seconds", "milliseconds"), _step_times(steps, starts)),
        ),
        (
            "Seconds saved against plain decoding, estimated",
            draw_svg(("seconds", "seconds saved"), [saved_line], from_zero=False),
        ),
    ]


def _parts(num_steps: int, max_parts: int) -> list[range]:
    """At most `max_parts` parts of the steps, each as long as the next."""
    length = max(-(-num_steps // max_parts), 1)
    return [range(begin, min(begin + length, num_steps)) for begin in range(0, num_steps, length)]


def _line(times: Sequence[float], values: Sequence[float]) -> DrawLine:
    """A value that holds until the next one."""

    def draw(axes: Any, style: dict[str, Any]) -> None:
        axes.step(times, values, where="post", **style)

    return draw


def _acceptance(steps: Sequence[StepFacts], starts: Sequence[float]) -> DrawLine:
    """The share of draft tokens accepted in each part of the run; no point where none was drafted."""
    times, shares = [], []
    for part in _parts(len(steps), NUM_WINDOWS):
        drafted = sum(sum(steps[index].num_drafted) for index in part)
        if drafted:
            times.append(starts[part.start])
            shares.append(sum(sum(steps[index].num_accepted) for index in part) / drafted)

    def draw(axes: Any, style: dict[str, Any]) -> None:
        axes.plot(times, shares, marker=".", **style)
        axes.set_ylim(0, 1.05)

    return draw


def _step_times(steps: Sequence[StepFacts], starts: Sequence[float]) -> list[DrawLine]:
    def line(label: str, value: Callable[[StepFacts], float]) -> DrawLine:
        times, medians = [], []
        for part in _parts(len(steps), NUM_WINDOWS):
            known = [seconds for index in part if (seconds := value(steps[index])) > 0]
            if known:
                times.append(starts[part.start])
                medians.append(1000 * statistics.median(known))
        return lambda axes, style: axes.plot(times, medians, marker=".", label=label, **style)

    return [
        line("actual", lambda facts: facts.step_seconds),
        line("predicted", lambda facts: facts.predicted_seconds),
    ]
