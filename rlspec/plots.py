"""Owns how pages are drawn: plots as SVG in the colours of the page, and pages that need no other file."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlspec.errors import missing_extra

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette: told apart by colour-blind readers, legible on light and dark."""
LINE_STYLES = ("-", "--", ":", "-.")
"""One more for each time the colours are used up."""
TEXT_COLOUR = "#010203"
"""Stands for the page's own text colour until the SVG is finished: legible on light and on dark."""
NUM_WINDOWS = 40
"""Points of a rate over time: fine enough to see the tail of long responses, few enough to read."""

DrawLine = Callable[[Any, dict[str, Any]], None]
"""Draws on matplotlib's axes in a style (colour and line style)."""


def draw_svg(labels: tuple[str, str], lines: Sequence[DrawLine], *, from_zero: bool = True) -> str:
    """One plot.

    Args:
        labels: Of the x and the y axis; a pair that no other plot of the page has.
        lines: What is drawn, each in a style of its own.
        from_zero: The y axis begins at 0.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "report", "plots") from error
    # Names are text, not formulas, and stay text in the SVG; the salt keeps the ids of the plots apart.
    settings = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "".join(labels)}
    styles = itertools.cycle(itertools.product(LINE_STYLES, COLOURS))
    with rc_context(settings):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for draw, (line_style, colour) in zip(lines, styles, strict=False):
            draw(axes, {"color": colour, "linestyle": line_style})
        axes.set_xlabel(labels[0], color=TEXT_COLOUR)
        axes.set_ylabel(labels[1], color=TEXT_COLOUR)
        axes.tick_params(colors=TEXT_COLOUR)
        if from_zero:
            axes.set_ylim(bottom=0)
        for spine in axes.spines.values():
            spine.set_color(TEXT_COLOUR)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, labelcolor=TEXT_COLOUR)
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return _for_page(buffer.getvalue())


def render_page(template: str, **values: Any) -> str:
    """The page of a template beside this file, everything in it escaped.

    Raises:
        SetupError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise missing_extra("jinja2", "report", "pages with plots") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return str(environment.get_template(template).render(**values))


def _for_page(svg: str) -> str:
    """The bare <svg>, in the page's text colour, without the ids of groups: each plot has the same ones."""
    svg = svg[svg.index("<svg") :].replace(TEXT_COLOUR, "currentColor")
    return re.sub(r'<g id="[^"]*"', "<g", svg)
