"""Owns the distribution check: sampled tokens against what the policy gives them, drafter by drafter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlspec.audit.distribution import chi_square, samples_needed, smallest_error_seen, uniform_ranks
from rlspec.audit.exact import NUM_POSITIONS, probabilities
from rlspec.audit.verdicts import Check, CheckResult, decided
from rollout.audit_runs.bench import AuditEngine, Bench
from rollout.audit_runs.subjects import Subject

QUICK_SAMPLES = 1500
"""Responses a case in the quick audit."""

NUM_LONG_SAMPLES = {False: 4, True: 16}
"""Responses a prompt and case for a policy whose marginals cannot be enumerated, quick and full."""
LONG_TOKENS = 32
NUM_RANK_BINS = 20

VARIED_LENGTHS = (5, 6, 8, 12, 5, 7, 10)
"""`max_tokens` in turn where requests join and leave; all keep the tested tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """Sampling parameters and how K and the batch move."""

    sampling: Mapping[str, Any]
    random_k: bool = False
    joins_and_leaves: bool = False

    def __str__(self) -> str:
        names = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        k = ", K random" if self.random_k else ""
        return f"{names}{k}{', joining and leaving' if self.joins_and_leaves else ''}"


CASES = (
    Case({"temperature": 0.7, "top_k": 8}, joins_and_leaves=True),
    Case({"temperature": 1.0, "top_p": 0.8}),
    Case({"temperature": 1.0}, random_k=True, joins_and_leaves=True),
)
"""For every drafter: both temperatures; top_k, top_p, neither; K fixed and random; batch still and moving."""


def num_tests(subject: Subject) -> int:
    """Statistical tests of one audit."""
    tests_a_case = NUM_POSITIONS + 1 if subject.is_enumerable else 1
    num_drafters = sum(Check.DISTRIBUTION in drafter.checks for drafter in subject.drafters)
    return num_drafters * len(CASES) * tests_a_case


def run(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Every case on one engine."""
    for case in CASES:
        yield _exact(bench, engine, case) if bench.subject.is_enumerable else _ranks(bench, engine, case)


def _exact(bench: Bench, engine: AuditEngine, case: Case) -> CheckResult:
    """Chi-square of tokens 1 to 4 and of the pair (1, 2) against exact marginals."""
    marginals = bench.marginals(case.sampling)
    cells = marginals.cells()
    num_samples = QUICK_SAMPLES
    if bench.is_full:
        num_samples = max(samples_needed(p, bench.alpha) for p in cells.values())
    # The step that verifies token 2 may also give 3, 4 and 5: shorter responses would cut K.
    drawn = engine.draw(
        bench.subject.prompts[:1],
        {**case.sampling, "max_tokens": NUM_POSITIONS + 1},
        num_samples=num_samples,
        random_k=case.random_k,
        varied_lengths=VARIED_LENGTHS if case.joins_and_leaves else (),
    )
    counts = marginals.counts(drawn.token_ids)
    tests = {name: chi_square(counts[name], p) for name, p in cells.items()}
    worst = min(tests, key=lambda name: tests[name].p_value)
    seen = max(smallest_error_seen(p, num_samples, bench.alpha) for p in list(cells.values())[:NUM_POSITIONS])
    seen_pair = smallest_error_seen(cells["tokens 1, 2"], num_samples, bench.alpha)
    figures = ", ".join(f"{name}: {t.statistic:.0f} ({t.degrees} degrees)" for name, t in tests.items())
    return CheckResult(
        check=Check.DISTRIBUTION,
        case=f"{engine.drafter.name}; {case}",
        verdict=decided(tests[worst].p_value >= bench.alpha),
        statistic=f"smallest p = {tests[worst].p_value:.1e} ({worst})",
        threshold=f"p >= {bench.alpha:.1e}",
        false_alarm_rate=bench.alpha * len(tests),
        detail=f"{num_samples} responses; chi-square {figures}; total-variation errors found in 99 % of "
        f"audits: {seen:.3f} (a token), {seen_pair:.3f} (the pair)",
    )


def _ranks(bench: Bench, engine: AuditEngine, case: Case) -> CheckResult:
    """Chi-square of each token's place in its own exact distribution, which must be uniform."""
    generator = np.random.default_rng((bench.seed, 3))
    drawn = engine.draw(
        bench.subject.prompts,
        {**case.sampling, "max_tokens": LONG_TOKENS},
        num_samples=NUM_LONG_SAMPLES[bench.is_full],
        random_k=case.random_k,
        varied_lengths=tuple(4 * n for n in VARIED_LENGTHS) if case.joins_and_leaves else (),
    )
    counts = np.zeros(NUM_RANK_BINS, dtype=np.int64)
    for rollout in drawn.rollouts:
        logits = bench.reference.completion_logits(rollout.prompt_token_ids, rollout.completion_token_ids)
        tokens = np.array(rollout.completion_token_ids)
        ranks = uniform_ranks(probabilities(logits, **case.sampling), tokens, generator)
        counts += np.bincount((ranks * NUM_RANK_BINS).astype(int), minlength=NUM_RANK_BINS)
    uniform = np.full(NUM_RANK_BINS, 1.0 / NUM_RANK_BINS)
    test = chi_square(counts, uniform)
    num_accepted = sum(rollout.num_accepted for rollout in drawn.rollouts)
    return CheckResult(
        check=Check.DISTRIBUTION,
        case=f"{engine.drafter.name}; {case}",
        verdict=decided(test.p_value >= bench.alpha),
        statistic=f"p = {test.p_value:.1e}",
        threshold=f"p >= {bench.alpha:.1e}",
        false_alarm_rate=bench.alpha,
        detail=f"{counts.sum()} tokens, {num_accepted} of them accepted drafts; chi-square "
        f"{test.statistic:.0f} ({test.degrees} degrees) of their places in their own distributions; an error "
        f"that moves {smallest_error_seen(uniform, int(counts.sum()), bench.alpha):.3f} between the "
        f"{NUM_RANK_BINS} bins is found in 99 % of audits",
    )
