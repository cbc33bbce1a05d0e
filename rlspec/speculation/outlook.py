"""Owns what is expected of each K for a load: acceptance and step cost put together."""

from __future__ import annotations

from collections.abc import Sequence

from rlspec.speculation.acceptance_evidence import Estimate
from rlspec.speculation.policies.base import Outlook
from rlspec.speculation.step_cost import StepCost
from rlspec.types import Load


def outlook_for(
    load: Load, cost: StepCost, estimate: Estimate, survival: Sequence[float], k_before: int, k_max: int
) -> Outlook:
    """The outlook if the load's requests stay: tokens, seconds to verify, seconds to draft, by K.

    tokens(K) = 1 + share * (s_1 + ... + s_K) a request (SmartSpec 2406.14066, for any rates), with s_i the
    share of request-steps that accept position i and `share` the part of the batch that has room for
    drafts. A step at K verifies batch + num_drafting * (d_1 + ... + d_K) tokens, with d_i the share in which
    the drafter proposes position i (1 but for lookup drafters).

    Assumes that acceptance at a position does not depend on K, and that all requests have room for K.

    Args:
        load: The load.
        cost: Step costs.
        estimate: For the drafted shares.
        survival: s_1, s_2, ...: the mean, or the upper bound.
        k_before: K of the step before.
        k_max: The largest K of the outlook.
    """
    batch_size = load.batch_size
    num_drafting = load.num_drafting
    context = sum(load.context_lengths)
    share = num_drafting / batch_size
    tokens, verified = [1.0], [float(batch_size)]
    for k in range(k_max):
        tokens.append(tokens[-1] + share * survival[k])
        verified.append(verified[-1] + num_drafting * estimate.drafted[k])
    return Outlook(
        batch_size=batch_size,
        num_draft_tokens=k_before,
        tokens=tuple(tokens),
        verify_seconds=tuple([cost.verify_seconds(num_tokens, context) for num_tokens in verified]),
        draft_seconds=tuple([cost.draft_seconds(k, num_drafting) for k in range(k_max + 1)]),
    )


def break_even_acceptance(k: int, seconds_ratio: float) -> float:
    """The conditional acceptance a, equal at all positions, at which K = k costs what it gives.

    Solves 1 + a + ... + a^k = step seconds at k over those of plain decoding. 0 where k costs nothing more,
    1 where even a perfect drafter does not pay.
    """
    if seconds_ratio <= 1.0:
        return 0.0
    if seconds_ratio >= k + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(20):  # to 1e-6
        middle = (low + high) / 2
        total = term = 1.0
        for _ in range(k):
            term *= middle
            total += term
        low, high = (middle, high) if total < seconds_ratio else (low, middle)
    return high
