"""Owns a request to the engine: what was asked, and what is known of it until it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.sampling import RequestSampling


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample to draw: a prompt's token ids, which sample of its group it is, and how to sample."""

    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    sampling: RequestSampling
    data: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class InFlight:
    """What is known of a request between its submission and its end."""

    request: RolloutRequest
    internal_id: str
    seed: int | None
    started_seconds: float
    num_steps: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def add_step(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one engine step of the request."""
        if num_emitted:
            self.num_steps += 1
        while len(self.drafted_by_position) < num_drafted:
            self.drafted_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(num_drafted):
            self.drafted_by_position[position] += 1
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1
