"""Owns a request to the engine: what was asked, and what is known of it until it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.sampling import RequestSampling

from rlspec.types import PolicySpan


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample to draw: a prompt's token ids, which sample of its group it is, and how to sample."""

    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    sampling: RequestSampling
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recording:
    """What the audit records of a run: (request id, draft tokens, sampled tokens) rows, and vLLM's counts."""

    verifications: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class InFlight:
    """What is known of a request between its submission and its end.

    `policy_version` is that of the engine's next step; `tokens_by_version` counts, oldest version first.
    """

    request: RolloutRequest
    internal_id: str
    seed: int | None
    started_seconds: float
    policy_version: int
    num_steps: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    tokens_by_version: dict[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that the engine's steps gave the response."""
        return sum(self.tokens_by_version.values())

    def add_step(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one engine step of the request."""
        if num_emitted:
            self.num_steps += 1
            before = self.tokens_by_version.get(self.policy_version, 0)
            self.tokens_by_version[self.policy_version] = before + num_emitted
        while len(self.drafted_by_position) < num_drafted:
            self.drafted_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(num_drafted):
            self.drafted_by_position[position] += 1
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1

    def count_all(self, num_tokens: int) -> None:
        """Give all tokens to the present version: for engines that do not count steps."""
        self.tokens_by_version = {self.policy_version: num_tokens}

    def policy_spans(self, num_tokens: int) -> tuple[PolicySpan, ...]:
        """The versions of the response's `num_tokens` tokens.

        A stop string is found outside the engine core: what its steps gave beyond it is cut off at the end.
        """
        spans = []
        num_left = num_tokens
        for version, count in self.tokens_by_version.items():
            taken = min(count, num_left)
            num_left -= taken
            if taken:
                spans.append(PolicySpan(version, taken))
        assert num_left == 0, (num_tokens, self.tokens_by_version)
        return tuple(spans)
