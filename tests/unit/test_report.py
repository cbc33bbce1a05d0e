"""report.html: self-contained, escaped, four plots, also for runs with nothing in them."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from rlspec.report import ArmReport, comparison_rows, write_report
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
    assert rows["mean reward"] == ["1.00", "-"]
