"""Owns what is said of the KV cache's room, and of the drafter's part in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV cache of an engine, and what the drafter's own layers take of it.

    Attributes:
        num_tokens: Tokens that it holds at once, of all requests together.
        drafter_share: Share of its bytes that belongs to the drafter's layers; 0 without any.
    """

    num_tokens: int
    drafter_share: float

    @property
    def num_tokens_lost(self) -> int:
        """Tokens that the same memory would hold beside them without the drafter."""
        return round(self.num_tokens * self.drafter_share / (1.0 - self.drafter_share))

    def __str__(self) -> str:
        if not self.drafter_share:
            return f"KV cache of {self.num_tokens:,} tokens, none of it for a drafter"
        share = f"the drafter's layers take {self.drafter_share:.1%} of its bytes"
        return f"KV cache of {self.num_tokens:,} tokens; {share}, else it were {self.num_tokens_lost:,} more"
