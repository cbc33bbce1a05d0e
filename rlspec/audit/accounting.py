"""Owns the accounting check: what each step drafted, sampled and emitted must add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlspec.types import Rollout, StepFacts


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """One verification as the scheduler saw it: a request's draft tokens and what was sampled in return."""

    request_id: str
    draft_token_ids: tuple[int, ...]
    sampled_token_ids: tuple[int, ...]

    @property
    def num_matched(self) -> int:
        """Leading draft tokens that were sampled."""
        pairs = zip(self.draft_token_ids, self.sampled_token_ids, strict=False)
        return next((i for i, (draft, sampled) in enumerate(pairs) if draft != sampled), self._shorter)

    @property
    def _shorter(self) -> int:
        return min(len(self.draft_token_ids), len(self.sampled_token_ids))


@dataclass(frozen=True, slots=True)
class AccountingFaults:
    """What did not add up; every count must be 0.

    Attributes:
        num_verifications: Verifications looked at.
        num_wrong_emission: Those that did not give accepted + 1 tokens, where accepted are the leading draft
            tokens that were sampled: a token of a rejected position differs from its draft (the residual
            distribution of 2211.17192 gives a rejected draft probability zero), so this needs no word of
            the engine about what it accepted.
        num_gaps: Requests whose context in some step is not the one before plus what was emitted.
        num_wrong_lengths: Tokens that steps emitted and rollouts lack, or the other way round.
        wrong_counters: Engine counters that differ from the sums over steps: name, ours, the engine's.
    """

    num_verifications: int
    num_wrong_emission: int
    num_gaps: int
    num_wrong_lengths: int
    wrong_counters: tuple[tuple[str, int, int], ...]

    @property
    def num_faults(self) -> int:
        """All of them."""
        return self.num_wrong_emission + self.num_gaps + self.num_wrong_lengths + len(self.wrong_counters)

    def __str__(self) -> str:
        wrong = ", ".join(
            f"{name}: steps {ours}, engine {theirs}" for name, ours, theirs in self.wrong_counters
        )
        return (
            f"{self.num_verifications} verifications: {self.num_wrong_emission} without accepted + 1 tokens, "
            f"{self.num_gaps} gaps in positions, {self.num_wrong_lengths} tokens lost or added"
            f"{'; counters: ' + wrong if wrong else ''}"
        )


def check_accounting(
    rollouts: Sequence[Rollout],
    steps: Sequence[StepFacts],
    verified: Sequence[VerifiedDrafts],
    counters: Mapping[str, int],
) -> AccountingFaults:
    """Compare steps, verifications, rollouts and the engine's counters of one run.

    Args:
        rollouts: All responses of the run.
        steps: All its engine steps.
        verified: All its verifications.
        counters: vLLM's own: `num_drafts`, `num_draft_tokens`, `num_accepted_tokens`; one that it does not
            have counts as 0, for engines without a drafter have none.
    """
    drafted = sum(sum(facts.num_drafted) for facts in steps)
    accepted = sum(sum(facts.num_accepted) for facts in steps)
    emitted = sum(sum(facts.num_emitted) for facts in steps)
    num_drafts = sum(sum(n > 0 for n in facts.num_drafted) for facts in steps)
    ours = {
        "num_drafts": num_drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }
    in_rollouts = {
        "num_draft_tokens": sum(rollout.num_drafted for rollout in rollouts),
        "num_accepted_tokens": sum(rollout.num_accepted for rollout in rollouts),
    }
    num_tokens = sum(len(rollout.completion_token_ids) for rollout in rollouts)
    matched = sum(verification.num_matched for verification in verified)
    theirs = {name: counters.get(name, 0) for name in ours}
    wrong = [(name, value, theirs[name]) for name, value in ours.items() if theirs[name] != value]
    wrong += [(f"{name} of rollouts", v, ours[name]) for name, v in in_rollouts.items() if ours[name] != v]
    wrong += [("matched drafts", matched, accepted)] if matched != accepted else []
    return AccountingFaults(
        num_verifications=len(verified),
        num_wrong_emission=sum(len(v.sampled_token_ids) != v.num_matched + 1 for v in verified),
        num_gaps=_num_gaps(steps),
        num_wrong_lengths=abs(num_tokens - emitted),
        wrong_counters=tuple(wrong),
    )


def _num_gaps(steps: Sequence[StepFacts]) -> int:
    """Requests with a position left out or repeated: contexts must grow by what was emitted."""
    expected: dict[str, int] = {}
    broken: set[str] = set()
    for facts in steps:
        columns = zip(facts.request_ids, facts.context_lengths, facts.num_emitted, strict=True)
        for request_id, context, emitted in columns:
            if expected.get(request_id, context) != context:
                broken.add(request_id)
            expected[request_id] = context + emitted
    return len(broken)
