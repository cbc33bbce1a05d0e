"""Owns how a draft-length policy is made from plain values.

A policy lives in the scheduler's process, which may be another one than the caller's; so the caller sends
a `spec`, a mapping of plain values: `{"name": "fixed", "num_draft_tokens": 3}`, or for the adaptive ones
`{"name": "goodput", "settings": {...}, "arguments": {...}}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlspec.speculation.acceptance import Acceptance
from rlspec.speculation.controller import Controller
from rlspec.speculation.guard import GuardedPolicy
from rlspec.speculation.health import DrafterHealth
from rlspec.speculation.policies import CHOOSERS, POLICIES
from rlspec.speculation.policies.base import DraftLengthPolicy
from rlspec.speculation.settings import ControllerSettings
from rlspec.speculation.step_cost import StepCost

PolicySpec = Mapping[str, Any]

LOOKUP_DRAFT_FRACTION = 0.0
"""Prior seconds of a draft token over those of a step, for drafters that compute nothing on the device."""

MODEL_DRAFT_FRACTION = 0.15
"""The same for heads and draft models; measured values replace it within a few steps."""


def build_policy(spec: PolicySpec) -> DraftLengthPolicy:
    """The policy that `spec` describes.

    Raises:
        KeyError: The name is unknown.
        TypeError: It does not take these arguments.
    """
    arguments = dict(spec)
    name = arguments.pop("name")
    if name in POLICIES:
        return POLICIES[name](**arguments)
    settings = ControllerSettings(**arguments["settings"])
    controller = Controller(
        CHOOSERS[name](**arguments["arguments"]),
        settings,
        StepCost(arguments["draft_fraction"]),
        Acceptance(settings.max_draft_tokens),
        DrafterHealth(),
    )
    return GuardedPolicy(controller, settings.max_draft_tokens)


def learns(spec: PolicySpec) -> bool:
    """Whether the policy of this spec learns, so that it is kept from run to run."""
    return spec["name"] in CHOOSERS


def fixed_spec(num_draft_tokens: int) -> PolicySpec:
    """A constant K; 0 is off."""
    return {"name": "fixed", "num_draft_tokens": num_draft_tokens}


def replay_spec(k_trace: Sequence[int]) -> PolicySpec:
    """The K of each step of an earlier run."""
    return {"name": "replay", "k_trace": list(k_trace)}


def table_spec(table: Sequence[Sequence[int]], max_draft_tokens: int) -> PolicySpec:
    """K by batch size."""
    rows = [list(row) for row in table]
    return {"name": "static_table", "table": rows, "max_draft_tokens": max_draft_tokens}


def adaptive_spec(
    name: str, arguments: Mapping[str, Any], settings: Mapping[str, Any], draft_fraction: float
) -> PolicySpec:
    """A chooser within the controller; `settings` are the fields of `ControllerSettings`."""
    values = {"arguments": dict(arguments), "settings": dict(settings), "draft_fraction": draft_fraction}
    return {"name": name, **values}
