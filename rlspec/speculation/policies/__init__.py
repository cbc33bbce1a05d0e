"""Owns the lists of draft-length policies and choosers, and how a policy is made from plain values.

A policy lives in the scheduler's process, which may be another one than the caller's; so the caller sends
a `spec`, a mapping of plain values: `{"name": "fixed", "num_draft_tokens": 3}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlspec.speculation.policies.base import Chooser, DraftLengthPolicy
from rlspec.speculation.policies.beg_mab import BegMabChooser
from rlspec.speculation.policies.exp3 import Exp3Chooser
from rlspec.speculation.policies.fixed import FixedPolicy, ReplayPolicy
from rlspec.speculation.policies.goodput import GoodputChooser
from rlspec.speculation.policies.roofline import RooflineChooser
from rlspec.speculation.policies.static_table import StaticTablePolicy
from rlspec.speculation.policies.ucb import UcbChooser

POLICIES: dict[str, Callable[..., DraftLengthPolicy]] = {
    "fixed": FixedPolicy,
    "replay": ReplayPolicy,
    "static_table": StaticTablePolicy,
}

CHOOSERS: dict[str, Callable[..., Chooser]] = {
    "goodput": GoodputChooser,
    "roofline": RooflineChooser,
    "beg_mab": BegMabChooser,
    "ucb": UcbChooser,
    "exp3": Exp3Chooser,
}

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


__all__ = [
    "CHOOSERS",
    "POLICIES",
    "Chooser",
    "DraftLengthPolicy",
    "PolicySpec",
    "build_policy",
    "fixed_spec",
    "replay_spec",
]
