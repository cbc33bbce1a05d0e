"""What measured step costs mean: from formulas whose answers are known."""

from __future__ import annotations

import pytest

from rlspec.profile_table import Cell, Profile, profile_of, steady_steps
from rlspec.speculation.build import build_policy, replay_spec
from tests.unit.simulated_engine import SimulatedEngine

BATCHES, LARGEST_K = (1, 2, 4, 8, 16, 32), 3


def formula(batch: int, k: int) -> float:
    return 0.075 + 0.0046 * batch * (k + 1) + 0.012 * k


@pytest.fixture
def profile() -> Profile:
    return Profile(
        tuple(Cell(batch, 64, k, formula(batch, k), 8) for batch in BATCHES for k in range(LARGEST_K + 1))
    )


def test_break_even_is_where_both_goodputs_are_equal(profile: Profile) -> None:
    for batch in BATCHES:
        found = profile.break_even(batch, 64)
        assert found is not None
        acceptance, k = found
        tokens = sum(acceptance**position for position in range(k + 1))
        assert tokens / formula(batch, k) == pytest.approx(1.0 / formula(batch, 0), rel=1e-4)
        assert profile.best_k(batch, 64, acceptance - 0.01) == 0
        assert profile.best_k(batch, 64, acceptance + 0.01) > 0


def test_no_acceptance_is_enough_where_tokens_cost_all_there_is() -> None:
    dear = Profile(tuple(Cell(8, 64, k, 0.1 * (k + 1), 8) for k in range(3)))
    assert dear.break_even(8, 64) is None
    assert dear.rows()[0][-1] == "above 1"
    assert "no acceptance is enough" in dear.sentences()[-1]


def test_the_words_name_batches_and_acceptances(profile: Profile) -> None:
    text = "\n".join(profile.sentences())
    assert text.startswith(
        "Memory-bound up to batch 4: a plain step takes at most 1.25 times that of batch 1"
    )
    assert "With 80% of draft tokens accepted, speculation pays up to batch" in text
    assert profile.headers()[2:-1] == [f"K = {k}, ms" for k in range(LARGEST_K + 1)]
    assert len(profile.rows()) == len(BATCHES)


def test_cells_are_medians_of_steady_steps() -> None:
    engine = SimulatedEngine(lambda step: [0.5] * 5, noise=0.0)
    trace = [0] * 5 + [2] * 6
    steps = engine.run(build_policy(replay_spec(trace)), [200] * 4, max_steps=len(trace))
    assert len(steady_steps(steps)) == 4 + 5  # without the prompts, and without the step that changes K
    cells = {cell.k: cell for cell in profile_of({(4, 100): steps}).cells}
    assert cells[0].seconds == pytest.approx(engine.step_seconds(4, 0, 4))
    assert cells[2].seconds == pytest.approx(engine.step_seconds(12, 2, 4))
