"""Owns report.html: one self-contained page with a table of the arms and four plots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlspec.plots import NUM_WINDOWS, draw_svg, render_page
from rlspec.rollout_files import write_text
from rlspec.statistics import RunStatistics, active_requests_over_time, tokens_per_second_over_time
from rlspec.types import Rollout, StepFacts

MIN_STEPS_A_WINDOW = 5
"""With fewer, the rate shows how steps fall into windows rather than speed."""
NUM_LENGTH_BINS = 20
NUM_SAMPLES_SHOWN = 6
"""Responses printed of each arm."""


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One arm of a comparison: its name, its statistics and what they were made from."""

    name: str
    statistics: RunStatistics
    rollouts: Sequence[Rollout]
    steps: Sequence[StepFacts]


@dataclass(frozen=True, slots=True)
class _Scales:
    """What the arms of one plot share, so that their lines can be compared."""

    window_seconds: float
    length_edges: Sequence[int]


_Draw = Callable[[ArmReport, _Scales, Any, dict[str, Any]], None]


def comparison_rows(arms: Sequence[ArmReport]) -> list[tuple[str, list[str]]]:
    """The rows of the table: a name and one formatted value an arm."""
    formats: Sequence[tuple[str, Callable[[RunStatistics], str]]] = (
        ("responses", lambda s: f"{s.num_rollouts}"),
        ("tokens", lambda s: f"{s.num_completion_tokens:,}"),
        ("seconds", lambda s: f"{s.seconds:.1f}"),
        ("tokens per second", lambda s: f"{s.tokens_per_second:.1f}"),
        ("last response finished, s", lambda s: f"{s.last_finished_seconds:.1f}"),
        ("engine steps (mean ms)", lambda s: f"{s.num_steps} ({1000 * s.mean_step_seconds:.0f})"),
        ("K: steps", _k_used),
        ("why K: steps", lambda s: _counts(s.steps_by_reason)),
        ("drafted / accepted tokens", lambda s: f"{s.num_drafted} / {s.num_accepted}"),
        ("acceptance length", lambda s: f"{s.acceptance_length:.2f}"),
        ("tokens per request and step", lambda s: f"{s.tokens_per_request_step:.2f}"),
        ("acceptance by position", _acceptance),
        ("response length p50 / p90 / max", _lengths),
        ("preempted requests", lambda s: f"{s.num_preempted}"),
        ("ended by", lambda s: _counts(s.finish_reasons)),
        ("mean reward", lambda s: "-" if s.mean_reward is None else f"{s.mean_reward:.2f}"),
    )
    return [(name, [text(arm.statistics) for arm in arms]) for name, text in formats]


def write_report(
    path: str | Path,
    arms: Sequence[ArmReport],
    *,
    title: str,
    command: str,
    versions: Mapping[str, str],
    hardware: str,
    notes: Sequence[str],
) -> None:
    """Write the page; it needs no other file and no network.

    Raises:
        SetupError: matplotlib or jinja2 is not installed.
        InputError: The file cannot be written.
    """
    page = render_page(
        "report.html.jinja",
        title=title,
        arms=[arm.name for arm in arms],
        rows=comparison_rows(arms),
        plots=_plots(arms),
        samples=[(arm.name, rollout) for arm in arms for rollout in _samples(arm)],
        command=command,
        versions=versions,
        hardware=hardware,
        notes=notes,
    )
    write_text(path, page)


def _k_used(statistics: RunStatistics) -> str:
    return ", ".join(f"{k}: {count}" for k, count in statistics.steps_by_k.items()) or "-"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "-"


def _acceptance(statistics: RunStatistics) -> str:
    return " ".join(f"{share:.2f}" for share in statistics.acceptance_by_position) or "-"


def _lengths(statistics: RunStatistics) -> str:
    return f"{statistics.length_p50:.0f} / {statistics.length_p90:.0f} / {statistics.length_max}"


def _samples(arm: ArmReport) -> list[Rollout]:
    return list(itertools.islice((rollout for rollout in arm.rollouts if rollout.text), NUM_SAMPLES_SHOWN))


def _plots(arms: Sequence[ArmReport]) -> list[tuple[str, str]]:
    """The caption and the SVG of each plot."""
    draw: Sequence[tuple[str, str, str, _Draw]] = (
        ("Response lengths", "tokens", "responses", _draw_lengths),
        ("Tokens per second over time", "seconds", "tokens per second", _draw_rate),
        ("Active requests over time", "seconds", "requests", _draw_active),
        ("Acceptance by position", "draft position", "accepted share", _draw_acceptance),
    )
    scales = _scales([arm.statistics for arm in arms])
    return [
        (caption, draw_svg((x, y), [partial(function, arm, scales) for arm in arms]))
        for caption, x, y, function in draw
    ]


def _scales(statistics: Sequence[RunStatistics]) -> _Scales:
    seconds = max((s.seconds for s in statistics), default=0.0)
    step_seconds = max((s.mean_step_seconds for s in statistics), default=0.0)
    longest = max((s.length_max for s in statistics), default=0)
    width = longest // NUM_LENGTH_BINS + 1  # Whole tokens: each bin holds as many lengths as the next.
    return _Scales(
        window_seconds=max(seconds / NUM_WINDOWS, MIN_STEPS_A_WINDOW * step_seconds, 1e-3),
        length_edges=range(0, longest + width + 1, width),
    )


def _draw_lengths(arm: ArmReport, scales: _Scales, axes: Any, style: dict[str, Any]) -> None:
    lengths = [len(rollout.completion_token_ids) for rollout in arm.rollouts]
    if lengths:
        axes.hist(lengths, bins=scales.length_edges, histtype="step", linewidth=2, label=arm.name, **style)


def _draw_rate(arm: ArmReport, scales: _Scales, axes: Any, style: dict[str, Any]) -> None:
    axes.plot(*tokens_per_second_over_time(arm.steps, scales.window_seconds), label=arm.name, **style)


def _draw_active(arm: ArmReport, scales: _Scales, axes: Any, style: dict[str, Any]) -> None:
    axes.step(*active_requests_over_time(arm.steps), where="post", label=arm.name, **style)


def _draw_acceptance(arm: ArmReport, scales: _Scales, axes: Any, style: dict[str, Any]) -> None:
    shares = arm.statistics.acceptance_by_position
    if shares:
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=arm.name, **style)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1)
