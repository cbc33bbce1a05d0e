"""Logprob drift: the formulas, what crosses which threshold, the window, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlspec.audit.drift_report import ADVICE, DriftStatistic
from rlspec.audit.logprob_drift import LogprobDrift, effective_sample_size, k3_kl
from rlspec.config import DriftConfig
from rlspec.errors import InputError
from rlspec.metrics import Metrics
from rlspec.types import PolicySpan, Rollout
from tests.unit.test_rollout_files import ROLLOUT

ROUNDING = 1e-9
"""Sums of at most a hundred doubles of size up to e^16, in another order, relative to their size."""

logprobs = st.lists(st.floats(-8.0, 0.0), min_size=1, max_size=50)
differences = st.lists(st.floats(-8.0, 8.0), min_size=1, max_size=50).map(np.array)


def rollout(values: Sequence[float], group_id: str = "g", **changes: object) -> Rollout:
    values = tuple(values)
    version = changes.get("policy_version", ROLLOUT.policy_version)
    return replace(
        ROLLOUT,
        group_id=group_id,
        completion_token_ids=tuple(range(len(values))),
        logprobs=values,
        policy_spans=(PolicySpan(version, len(values)),),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )


def drift(**changes: float | None) -> LogprobDrift:
    return LogprobDrift(DriftConfig(**changes))  # type: ignore[arg-type]


def crossed(report: object) -> set[str]:
    return {crossing.statistic.value for crossing in report.verdict.crossings}  # type: ignore[attr-defined]


@given(differences)
def test_formulas_equal_a_slow_reference(values: np.ndarray) -> None:
    ratios = [math.exp(value) for value in values.tolist()]
    ess = math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(r * r for r in ratios))
    assert effective_sample_size(values) == pytest.approx(ess, rel=ROUNDING)
    kl = math.fsum(r - 1.0 - math.log(r) for r in ratios) / len(ratios)
    assert k3_kl(values) == pytest.approx(kl, rel=1e-6, abs=ROUNDING)  # the slow one cancels near r = 1


@given(differences)
def test_bounds(values: np.ndarray) -> None:
    assert 1.0 / len(values) - ROUNDING <= effective_sample_size(values) <= 1.0 + ROUNDING
    assert k3_kl(values) >= 0.0


def test_k3_estimates_the_kl_of_known_distributions() -> None:
    """Mean of 200,000 draws against the sum; the bound is 5 standard errors (false alarms: 6e-7)."""
    rng = np.random.default_rng(0)
    engine, trainer = rng.dirichlet(np.ones(16)), rng.dirichlet(np.ones(16))
    exact = float((engine * np.log(engine / trainer)).sum())
    ratio = (trainer / engine)[rng.choice(16, size=200_000, p=engine)]
    error = float(np.std(ratio - 1 - np.log(ratio))) / math.sqrt(len(ratio))
    assert abs(k3_kl(np.log(ratio)) - exact) < 5 * error


@given(st.lists(logprobs, min_size=1, max_size=5))
def test_identical_logprobs_do_not_drift(values: list[list[float]]) -> None:
    report = drift().observe([rollout(one) for one in values], values, trainer_version=3)
    assert (report.mean_abs, report.max_abs, report.mean_signed, report.k3_kl) == (0.0, 0.0, 0.0, 0.0)
    assert report.effective_sample_size == 1.0
    assert report.verdict.passed
    assert report.verdict.notes == ()
    assert report.tokens_by_version == {3: report.num_tokens}
    assert (report.num_tokens, report.num_rollouts) == (sum(map(len, values)), len(values))


@given(logprobs, st.floats(-5.0, -1e-3))
def test_constant_shift(values: list[float], shift: float) -> None:
    report = drift().observe([rollout(values)], [[value + shift for value in values]])
    assert report.mean_abs == pytest.approx(-shift, rel=1e-6)
    assert report.max_abs == pytest.approx(-shift, rel=1e-6)
    assert report.mean_signed == pytest.approx(shift, rel=1e-6)
    assert report.k3_kl == pytest.approx(math.expm1(shift) - shift, rel=1e-5)
    assert report.effective_sample_size == pytest.approx(1.0)  # self-normalised: a common factor is no loss
    assert ("mean_abs" in crossed(report)) == (report.mean_abs > 0.05)


def synthetic(num_tokens: int, temperature: float, noise: float = 0.0) -> tuple[list[float], list[float]]:
    """Engine logprobs of drawn tokens at a temperature, and a trainer's at temperature 1."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0.0, 2.0, (num_tokens, 64))
    other = logits + rng.normal(0.0, noise, logits.shape)
    engine, trainer = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits / temperature, other))
    tokens = (engine + rng.gumbel(size=engine.shape)).argmax(-1)
    rows = np.arange(num_tokens)
    return engine[rows, tokens].tolist(), trainer[rows, tokens].tolist()


def test_temperature_mismatch_crosses_and_bf16_noise_does_not() -> None:
    engine, trainer = synthetic(4096, 1.0, noise=0.02)
    assert drift().observe([rollout(engine)], [trainer]).verdict.passed
    engine, trainer = synthetic(4096, 0.7)
    report = drift().observe([rollout(engine)], [trainer])
    assert {"mean_abs", "effective_sample_size", "k3_kl"} <= crossed(report)
    assert "temperature" in str(report)
    assert report.mean_signed < 0.0


def test_one_stale_rollout_among_many_is_found_and_named() -> None:
    values = [-0.5] * 50
    rollouts = [rollout(values, group_id=f"g{i}", policy_version=4) for i in range(500)]
    rollouts[77] = rollout(values, group_id="stale", sample_index=5, policy_version=3)
    trainer = [list(values) for _ in rollouts]
    trainer[77][31] = -3.5
    report = drift().observe(rollouts, trainer, trainer_version=4)
    assert crossed(report) == {"max_abs"}
    worst = report.worst
    assert (worst.group_id, worst.sample_index, worst.position, worst.policy_version) == ("stale", 5, 31, 3)
    assert (worst.engine_logprob, worst.trainer_logprob) == (-0.5, -3.5)
    assert report.tokens_by_version == {3: 50, 4: 499 * 50}
    assert report.num_other_version_tokens == 50
    assert report.verdict.only_other_versions
    assert "All of it comes from 50 tokens of an older version than the trainer's (3)" in str(report)


def test_drift_of_the_own_version_is_not_laid_on_the_others() -> None:
    rollouts = [rollout([-0.5], policy_version=version) for version in (3, 4)]
    verdict = drift().observe(rollouts, [[-3.5], [-3.5]], trainer_version=4).verdict
    assert not verdict.passed
    assert not verdict.only_other_versions
    assert verdict.notes == ()


def test_all_tokens_of_other_versions() -> None:
    report = drift().observe([rollout([-0.5])], [[-3.5]], trainer_version=5)
    assert report.verdict.only_other_versions
    assert "there are no others" in str(report)


def test_a_version_ahead_of_the_trainer_is_said_even_without_a_crossing() -> None:
    report = drift().observe([rollout([-0.5])], [[-0.5]], trainer_version=2)
    assert report.verdict.passed
    assert "newer version" in str(report)
    assert drift().observe([rollout([-0.5])], [[-0.5]]).num_other_version_tokens is None


def test_raw_logprobs_are_pointed_out() -> None:
    report = drift().observe([rollout([-0.5], logprobs_mode="raw_logprobs")], [[-0.9]])
    assert report.logprobs_modes == ("raw_logprobs",)
    assert "temperature 1 only" in str(report)
    assert "processed_logprobs" in str(report)


def spanned(spans: tuple[PolicySpan, ...]) -> Rollout:
    return replace(rollout([-0.5, -0.5, -0.5]), policy_spans=spans)


def test_spans_give_each_token_its_version() -> None:
    report = drift().observe(
        [spanned((PolicySpan(3, 2), PolicySpan(4, 1)))], [[-0.5, -4.0, -0.5]], trainer_version=4
    )
    assert report.tokens_by_version == {3: 2, 4: 1}
    assert report.worst.policy_version == 3
    assert report.verdict.only_other_versions
    with pytest.raises(InputError, match="policy_spans"):
        drift().observe([spanned((PolicySpan(3, 2),))], [[-0.5] * 3])


def test_window_forgets_whole_rollouts_but_none_of_the_last_call() -> None:
    auditor = drift(window_tokens=4)
    bad = auditor.observe([rollout([-0.5, -0.5])], [[-0.5, -5.0]])
    assert crossed(bad) == set(DriftStatistic)
    values = [-0.25, -0.25]
    still = auditor.observe([rollout(values)], [values])
    assert (still.num_tokens, still.max_abs) == (4, 4.5)
    gone = auditor.observe([rollout(values)], [values])
    assert (gone.num_tokens, gone.num_rollouts, gone.max_abs) == (4, 2, 0.0)
    whole = auditor.observe([rollout(values)] * 5, [values] * 5)
    assert (whole.num_tokens, whole.num_rollouts) == (10, 5)


def test_a_bad_call_does_not_hide_among_good_ones() -> None:
    auditor = drift(max_abs=None)
    values = [-1.5] * 64
    for _ in range(50):
        assert auditor.observe([rollout(values)], [values]).verdict.passed
    bad = auditor.observe([rollout(values)], [[-1.0] * 64])
    assert (bad.num_last_tokens, bad.last_mean_abs) == (64, pytest.approx(0.5))
    assert DriftStatistic.MEAN_ABS in crossed(bad)
    assert auditor.observe([rollout(values)], [values]).verdict.passed
    few = auditor.observe([rollout(values[:8])], [[-1.0] * 8])
    assert few.verdict.passed  # too few tokens to judge on their own


def test_a_crossing_is_new_once_and_again_after_recovery() -> None:
    auditor, metrics = drift(window_tokens=1), Metrics()

    def is_new(trainer: float) -> bool:
        report = auditor.observe([rollout([-0.5])], [[trainer]])
        metrics.observe_drift(report)
        return bool(report.verdict.new_crossings)

    assert [is_new(value) for value in (-0.5, -5.0, -5.0, -0.5, -5.0)] == [False, True, False, False, True]
    lines = metrics.text().splitlines()
    assert 'rlspec_drift_events_total{what="max_abs"} 2.0' in lines
    assert "rlspec_drift_max_abs 4.5" in lines
    assert "rlspec_drift_k3_kl NaN" in Metrics().text()


def test_null_switches_a_threshold_off() -> None:
    every = {"max_mean_abs": None, "max_abs": None, "min_effective_sample_size": None, "max_k3_kl": None}
    assert drift(**every).observe([rollout([-0.5])], [[-700.0]]).verdict.passed
    assert crossed(drift(**{**every, "max_abs": 1.0}).observe([rollout([-0.5])], [[-7.0]])) == {"max_abs"}


def test_differences_beyond_the_range_of_a_double_are_infinite_drift() -> None:
    report = drift().observe([rollout([-2000.0, -0.5])], [[-0.5, -0.5]])
    assert report.k3_kl == math.inf
    assert report.effective_sample_size == 0.5
    assert crossed(report) == set(DriftStatistic)


@pytest.mark.parametrize(
    ("trainer", "hint"),
    [
        ([[-0.5]], "shape (1,)"),
        ([[-0.5, -0.5, -0.5]], "shape (3,)"),
        ([[-0.5, math.nan]], "nan at position 1"),
        ([[-0.5, math.inf]], "inf at position 1"),
        ([[-math.inf, -0.5]], "-inf at position 0"),
        ([[-0.5, 1e-3]], "0.001 at position 1"),
        ([[[-0.5, -0.5]]], "shape (1, 2)"),
        ([["a", -0.5]], "plain numbers"),
        ([[[-0.5], [-0.5, -0.1]]], "plain numbers"),
        ([[]], "shape (0,)"),
        ([None], "shape ()"),
        ([], "0 entries"),
        ([[-0.5, -0.5]] * 2, "2 entries"),
        (None, "one list of logprobs for each"),
    ],
)
def test_refused_input_says_what_and_loses_nothing(trainer: object, hint: str) -> None:
    auditor = drift()
    auditor.observe([rollout([-0.5])], [[-0.5]])
    with pytest.raises(InputError) as caught:
        auditor.observe([rollout([-0.5, -0.5])], trainer)  # type: ignore[arg-type]
    assert hint in str(caught.value)
    report = auditor.observe([rollout([-0.25])], [[-0.25]])
    assert (report.num_tokens, report.max_abs) == (2, 0.0)


def test_a_bad_entry_keeps_the_good_ones_before_it_out() -> None:
    auditor = drift()
    with pytest.raises(InputError, match=r"trainer_logprobs\[1\] \(group 'b', sample 0\)"):
        auditor.observe([rollout([-0.5]), rollout([-0.5], group_id="b")], [[-0.5], [math.nan]])
    assert auditor.observe([rollout([-0.5])], [[-0.5]]).num_tokens == 1


@pytest.mark.parametrize(
    ("rollouts", "trainer", "version", "field"),
    [
        ([], [], None, "rollouts"),
        (iter([ROLLOUT]), [[-0.5]], None, "rollouts"),
        ([rollout([])], [[]], None, "rollouts[0]"),
        ([rollout([math.nan])], [[-0.5]], None, "rollouts[0]"),
        ([replace(ROLLOUT, logprobs=(-0.5,))], [[-0.5] * 3], None, "rollouts[0]"),
        ([rollout([-0.5])], [[-0.5]], -1, "trainer_version"),
        ([rollout([-0.5])], [[-0.5]], True, "trainer_version"),
        ([rollout([-0.5])], [[-0.5]], 1.0, "trainer_version"),
    ],
)
def test_refused_rollouts_and_versions(
    rollouts: object, trainer: object, version: object, field: str
) -> None:
    with pytest.raises(InputError) as caught:
        drift().observe(rollouts, trainer, trainer_version=version)  # type: ignore[arg-type]
    assert caught.value.field.startswith(field)


def test_a_logprob_of_zero_up_to_rounding_is_accepted() -> None:
    assert drift().observe([rollout([0.0])], [np.array([5e-7], dtype=np.float32)]).verdict.passed


def test_every_statistic_has_advice_and_a_field() -> None:
    report = drift().observe([rollout([-0.5])], [[-0.5]])
    assert set(ADVICE) == set(DriftStatistic)
    assert all(hasattr(report, statistic) for statistic in DriftStatistic)
