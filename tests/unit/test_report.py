"""report.html: self-contained, escaped, four plots, also for runs with nothing in them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlspec.errors import SetupError
from rlspec.plots import COLOURS
from rlspec.report import NUM_SAMPLES_SHOWN, ArmReport, comparison_rows, write_report
from rlspec.statistics import summarise
from rlspec.types import Rollout, StepFacts
from tests.unit.test_rollout_files import ROLLOUT
from tests.unit.test_statistics import OTHER, STEPS


def arm(name: str, rollouts: list[Rollout], steps: list[StepFacts]) -> ArmReport:
    return ArmReport(name, summarise(rollouts, steps, seconds=2.0), rollouts, steps)


def write(path: Path, arms: list[ArmReport]) -> str:
    write_report(
        path,
        arms,
        title="t",
        command="rlspec <x>",
        versions={"vllm": "0"},
        hardware="cpu",
        notes=["note & more"],
    )
    return path.read_text()


class Tags(HTMLParser):
    """Counts tags and collects addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    hostile = replace(ROLLOUT, text="<script>alert(1)</script>")
    page = write(
        tmp_path / "deep" / "report.html", [arm("plain", [hostile], STEPS), arm("spec", [OTHER], STEPS)]
    )
    tags = Tags()
    tags.feed(page)
    assert tags.names.count("svg") == 4
    assert "script" not in tags.names
    assert all(not address.startswith("http") for address in tags.addresses)
    assert "&lt;script&gt;" in page
    assert "note &amp; more" in page
    assert not list(tmp_path.rglob("*.tmp"))


def test_empty_arm_is_drawn(tmp_path: Path) -> None:
    assert write(tmp_path / "r.html", [arm("none", [], [])]).count("<svg") == 4


def test_rows_have_one_value_an_arm() -> None:
    rows = dict(comparison_rows([arm("a", [ROLLOUT], STEPS), arm("b", [], [])]))
    assert rows["tokens"] == ["3", "0"]
    assert rows["acceptance by position"] == ["0.50 0.00", "-"]
    assert rows["why K: steps"] == ["fixed 2", "-"]
    assert rows["mean reward"] == ["1.00", "-"]


def test_every_arm_is_in_every_plot_whatever_its_name(tmp_path: Path) -> None:
    """More arms than colours, and names that matplotlib or HTML would read as markup."""
    names = [f"arm {index}" for index in range(len(COLOURS) + 1)] + ["$\\nonsense$", "<b>&"]
    page = write(tmp_path / "r.html", [arm(name, [OTHER], STEPS) for name in names])
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 4
    shown = ["&lt;b&gt;&amp;" if name == "<b>&" else name for name in names]
    assert all(f">{name}</text>" in plot for plot in plots for name in shown)


def test_ids_are_unique_and_references_resolve(tmp_path: Path) -> None:
    page = write(tmp_path / "r.html", [arm("plain", [ROLLOUT], STEPS), arm("spec", [OTHER], STEPS)])
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:url\(|href=")#([^")]+)', page)
    assert references
    assert set(references) <= set(ids)


def test_plots_take_the_colour_of_the_page(tmp_path: Path) -> None:
    page = write(tmp_path / "r.html", [arm("plain", [ROLLOUT], STEPS)])
    assert "currentColor" in page
    assert "#010203" not in page


def test_samples_are_the_first_with_a_text(tmp_path: Path) -> None:
    silent = [replace(ROLLOUT, text=None)] * NUM_SAMPLES_SHOWN
    spoken = [replace(ROLLOUT, sample_index=index) for index in range(NUM_SAMPLES_SHOWN + 1)]
    page = write(tmp_path / "r.html", [arm("plain", silent + spoken, STEPS)])
    assert page.count('<pre class="response">') == NUM_SAMPLES_SHOWN
    assert "plain: g0, sample 0: 3 tokens" in page


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_missing_extra_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SetupError, match=rf"{package}: got not installed.*rlspec\[report\]"):
        write(tmp_path / "r.html", [arm("plain", [ROLLOUT], STEPS)])
    assert not list(tmp_path.iterdir())
