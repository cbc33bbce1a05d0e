"""Owns report.html: one self-contained page with a table of the arms and four plots."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec.errors import missing_extra
from rlspec.statistics import RunStatistics, active_requests_over_time, tokens_per_second_over_time
from rlspec.types import Rollout, StepFacts

TEMPLATE = Path(__file__).with_name("report.html.jinja")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette: told apart by colour-blind readers, legible on light and dark."""
TEXT_COLOUR = "#808080"
NUM_WINDOWS = 40
NUM_SAMPLES_SHOWN = 6


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One arm of a comparison: its name, its statistics and what they were made from."""

    name: str
    statistics: RunStatistics
    rollouts: Sequence[Rollout]
    steps: Sequence[StepFacts]


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
        ("drafted / accepted tokens", lambda s: f"{s.num_drafted} / {s.num_accepted}"),
        ("acceptance length", lambda s: f"{s.acceptance_length:.2f}"),
        ("tokens per request and step", lambda s: f"{s.tokens_per_request_step:.2f}"),
        ("acceptance by position", _acceptance),
        ("response length p50 / p90 / max", _lengths),
        (
            "ended by",
            lambda s: ", ".join(f"{name} {count}" for name, count in s.finish_reasons.items()) or "-",
        ),
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
    """
    try:
        import jinja2
    except ImportError as error:
        raise missing_extra("jinja2", "report", "report.html") from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        arms=[arm.name for arm in arms],
        rows=comparison_rows(arms),
        plots=_plots(arms),
        samples=[rollout for arm in arms for rollout in arm.rollouts[:NUM_SAMPLES_SHOWN] if rollout.text],
        command=command,
        versions=versions,
        hardware=hardware,
        notes=notes,
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.tmp")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, target)


def _k_used(statistics: RunStatistics) -> str:
    return ", ".join(f"{k}: {count}" for k, count in statistics.steps_by_k.items()) or "-"


def _acceptance(statistics: RunStatistics) -> str:
    return " ".join(f"{share:.2f}" for share in statistics.acceptance_by_position) or "-"


def _lengths(statistics: RunStatistics) -> str:
    return f"{statistics.length_p50:.0f} / {statistics.length_p90:.0f} / {statistics.length_max}"


def _plots(arms: Sequence[ArmReport]) -> list[tuple[str, str]]:
    """The caption and the SVG of each plot."""
    draw: Sequence[tuple[str, str, str, Callable[[Any, ArmReport, str, float], None]]] = (
        ("Response lengths", "tokens", "responses", _draw_lengths),
        ("Tokens per second over time", "seconds", "tokens per second", _draw_rate),
        ("Active requests over time", "seconds", "requests", _draw_active),
        ("Acceptance by position", "draft position", "accepted share", _draw_acceptance),
    )
    seconds = max((arm.statistics.seconds for arm in arms), default=0.0)
    return [(caption, _svg(arms, x, y, function, seconds)) for caption, x, y, function in draw]


def _svg(
    arms: Sequence[ArmReport],
    x_label: str,
    y_label: str,
    draw: Callable[[Any, ArmReport, str, float], None],
    seconds: float,
) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "report", "report.html") from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": x_label + y_label}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for arm, colour in zip(arms, COLOURS, strict=False):
            draw(axes, arm, colour, max(seconds / NUM_WINDOWS, 1e-3))
        axes.set_xlabel(x_label, color=TEXT_COLOUR)
        axes.set_ylabel(y_label, color=TEXT_COLOUR)
        axes.tick_params(colors=TEXT_COLOUR)
        axes.set_ylim(bottom=0)
        for spine in axes.spines.values():
            spine.set_color(TEXT_COLOUR)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, labelcolor=TEXT_COLOUR)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw_lengths(axes: Any, arm: ArmReport, colour: str, window_seconds: float) -> None:
    lengths = [len(rollout.completion_token_ids) for rollout in arm.rollouts]
    if lengths:
        axes.hist(lengths, bins=20, histtype="step", linewidth=2, color=colour, label=arm.name)


def _draw_rate(axes: Any, arm: ArmReport, colour: str, window_seconds: float) -> None:
    seconds, rates = tokens_per_second_over_time(arm.steps, window_seconds)
    axes.plot(seconds, rates, color=colour, label=arm.name)


def _draw_active(axes: Any, arm: ArmReport, colour: str, window_seconds: float) -> None:
    seconds, counts = active_requests_over_time(arm.steps)
    axes.step(seconds, counts, where="post", color=colour, label=arm.name)


def _draw_acceptance(axes: Any, arm: ArmReport, colour: str, window_seconds: float) -> None:
    shares = arm.statistics.acceptance_by_position
    if shares:
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=arm.name)
        axes.set_xticks(range(1, len(shares) + 1))
        axes.set_ylim(0, 1)
