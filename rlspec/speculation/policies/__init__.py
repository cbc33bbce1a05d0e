"""Owns the list of draft-length policies and how one is made from plain values.

A policy lives in the scheduler's process, which may be another one than the caller's; so the caller sends
a `spec`, a mapping of plain values: `{"name": "fixed", "num_draft_tokens": 3}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlspec.speculation.policies.base import DraftLengthPolicy
from rlspec.speculation.policies.fixed import FixedPolicy, ReplayPolicy

POLICIES: dict[str, Callable[..., DraftLengthPolicy]] = {"fixed": FixedPolicy, "replay": ReplayPolicy}

PolicySpec = Mapping[str, Any]


def build_policy(spec: PolicySpec) -> DraftLengthPolicy:
    """The policy that `spec` describes: its `name` in `POLICIES`, the rest as arguments."""
    arguments = dict(spec)
    return POLICIES[arguments.pop("name")](**arguments)


def fixed_spec(num_draft_tokens: int) -> PolicySpec:
    """A constant K; 0 is off."""
    return {"name": "fixed", "num_draft_tokens": num_draft_tokens}


def replay_spec(k_trace: Sequence[int]) -> PolicySpec:
    """The K of each step of an earlier run."""
    return {"name": "replay", "k_trace": list(k_trace)}


__all__ = ["POLICIES", "DraftLengthPolicy", "PolicySpec", "build_policy", "fixed_spec", "replay_spec"]
