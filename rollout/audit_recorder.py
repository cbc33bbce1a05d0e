"""Owns what the correctness audit records inside the scheduler: drafts, sampled tokens, vLLM's own counts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput

VerificationRow = tuple[str, list[int], list[int]]


class AuditRecorder:
    """One recording; it grows by every verification, so it is for short runs."""

    def __init__(self) -> None:
        self._verifications: list[VerificationRow] = []
        self._counts: Counter[str] = Counter()

    def add_verifications(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Keep draft and sampled tokens of each request of a step that had drafts and was sampled."""
        sampled, index = output.sampled_token_ids, output.req_id_to_index
        self._verifications += [
            (request_id, list(tokens), list(sampled[index[request_id]]))
            for request_id, tokens in scheduled.scheduled_spec_decode_tokens.items()
            if sampled and sampled[index[request_id]]
        ]

    def add_stats(self, stats: SchedulerStats | None) -> None:
        """Sum what vLLM counted in a step; it counts nothing with `disable_log_stats`."""
        if stats is None:
            return
        self._counts["prefix_cache_hits"] += stats.prefix_cache_stats.hits
        drafting = stats.spec_decoding_stats
        if drafting is not None:
            self._counts["num_drafts"] += drafting.num_drafts
            self._counts["num_draft_tokens"] += drafting.num_draft_tokens
            self._counts["num_accepted_tokens"] += drafting.num_accepted_tokens

    def row(self) -> tuple[list[VerificationRow], dict[str, int]]:
        """All of it as plain values."""
        return self._verifications, dict(self._counts)
