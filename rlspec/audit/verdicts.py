"""Owns what a check of the audit says: its verdict, the figure behind it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Check(StrEnum):
    """The checks of the audit, by the names that `--checks` takes."""

    PATCHES = "patches"
    DISTRIBUTION = "distribution"
    GREEDY_IDENTITY = "greedy_identity"
    ACCOUNTING = "accounting"
    LOGPROBS = "logprobs"
    SAMPLING_PARAMETERS = "sampling_parameters"
    WEIGHTS = "weights"
    ACCEPTANCE = "acceptance"


class Verdict(StrEnum):
    """What came out of a check."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The engine does not accept it, and says so before anything is generated: safe."""
    SKIPPED = "skipped"
    """Could not be looked at here; the detail says why."""


TOTAL_FALSE_ALARM_RATE = 1e-3
"""A correct engine fails an audit by chance at most this often: every statistical test gets an equal share
of it (Bonferroni, so the tests need not be independent)."""

FIXES: dict[Check, str] = {
    Check.PATCHES: "Unset RLSPEC_DISABLE_PATCHES, or install a tested vLLM.",
    Check.DISTRIBUTION: "Do not speculate at temperature > 0 on this build: rlspec rollout with "
    "drafter.speculative_config=null samples as stock vLLM does; report the build.",
    Check.GREEDY_IDENTITY: "Do not speculate on this build; report it with the prompt and position.",
    Check.ACCOUNTING: "Do not trust acceptance figures or token positions of this build; report it.",
    Check.LOGPROBS: "Let the trainer compute its own logprobs, or do not speculate on this build.",
    Check.SAMPLING_PARAMETERS: "Do not use this parameter with a drafter (speculation.on_unsupported).",
    Check.WEIGHTS: "Start a new engine after each policy update; report the build.",
    Check.ACCEPTANCE: "The drafter is fed something else than the policy sees; report the build.",
}
"""What a user does when a check fails."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the audit.

    Attributes:
        check: Which check.
        case: On what: the drafter, the sampling parameters, the position.
        verdict: What came out.
        statistic: The figure that decided, in words and units: `p = 0.31`, `max |dlogp| = 2e-6`.
        threshold: What it had to keep to: `p > 1e-5`.
        false_alarm_rate: How often a correct engine fails this line; 0 for what is not statistical.
        detail: What was looked at, how much of it, and what was found.
    """

    check: Check
    case: str
    verdict: Verdict
    statistic: str
    threshold: str
    false_alarm_rate: float
    detail: str

    @property
    def fix(self) -> str:
        """What to do; empty unless it failed."""
        return FIXES[self.check] if self.verdict is Verdict.FAILED else ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {**asdict(self), "fix": self.fix}


def decided(passed: bool) -> Verdict:
    """Passed or failed."""
    return Verdict.PASSED if passed else Verdict.FAILED


def failed_checks(results: Sequence[CheckResult]) -> list[Check]:
    """The checks with a failed line, each once, in order."""
    return [
        check for check in Check if any(r.check is check and r.verdict is Verdict.FAILED for r in results)
    ]
