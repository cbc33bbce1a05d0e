"""The roofline chooser: its ladder, its toggle, and steps without room."""

from __future__ import annotations

import pytest

from rlspec.speculation.policies.base import Outcome
from rlspec.speculation.policies.roofline import RooflineChooser
from tests.unit.bandit_world import PAYS, World

LADDER = (5, 7, 9, 11)


def roofline_after(acceptance: list[float], ladder: tuple[int, ...]) -> int:
    """K where all of it pays, after one window of each acceptance."""
    chooser = RooflineChooser(ladder, window_steps=2)
    cheap = World((0.95,) * 12, tuple(1.0 + 0.01 * k for k in range(13))).outlook(4)
    for value in acceptance:
        chooser.choose(cheap)
        for _ in range(2):
            chooser.observe(Outcome(4, 5, 0, 1000, round(1000 * value), 0.02))
    return chooser.choose(cheap)


@pytest.mark.parametrize(
    ("acceptance", "rung"),
    [
        ([], 0),
        ([0.94], 0),
        ([0.94, 0.94], 1),
        ([0.94, 0.93, 0.94], 0),
        ([0.94, 0.85, 0.94], 0),
        ([1.0] * 4, 2),
        ([1.0] * 40, 3),
        ([1.0] * 40 + [0.85] * 2, 2),
        ([1.0] * 40 + [0.85, 0.9, 0.85], 3),
        ([0.5] * 40, 0),
        ([0.5] * 40 + [1.0] * 2, 1),
    ],
)
def test_roofline_moves_its_ladder_after_two_windows_that_agree(acceptance: list[float], rung: int) -> None:
    assert roofline_after(acceptance, LADDER) == LADDER[rung]


def test_roofline_keeps_its_rung_over_steps_without_room() -> None:
    chooser = RooflineChooser(window_steps=1, min_speedup=0.0)
    roomy = PAYS.outlook(4)
    for _ in range(4):
        chooser.choose(roomy)
        chooser.observe(Outcome(4, 5, 20, 20, 20, 0.02))
    assert chooser.choose(roomy) == 3
    assert chooser.choose(roomy.up_to(1)) == 1
    assert chooser.choose(roomy.up_to(0)) == 0
    assert chooser.choose(roomy) == 3


def test_roofline_needs_its_speedup() -> None:
    def k_at(cost: float) -> int:
        return RooflineChooser().choose(World((0.5,), (1.0, cost)).outlook(4))

    assert k_at(1.5 / 1.05 * 0.999) == 1
    assert k_at(1.5 / 1.05 * 1.001) == 0
    assert RooflineChooser(ladder=LADDER).choose(PAYS.outlook(4).up_to(2)) == 2
