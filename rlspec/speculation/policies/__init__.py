"""Owns the lists of policies that decide K by themselves, and of those that choose within the controller."""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = ["CHOOSERS", "POLICIES", "Chooser", "DraftLengthPolicy"]
