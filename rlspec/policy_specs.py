"""Owns the way from the configuration to the spec of a draft-length policy, and what is refused on the
way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec.config import Config
from rlspec.errors import ConfigError, InputError, nearest
from rlspec.speculation.build import (
    LOOKUP_DRAFT_FRACTION,
    MODEL_DRAFT_FRACTION,
    PolicySpec,
    adaptive_spec,
    build_policy,
    fixed_spec,
    table_spec,
)
from rlspec.speculation.policies import CHOOSERS

METHODS_WITHOUT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})
"""Methods of vLLM 0.32 that run no model of their own: nothing has to be caught up on."""


def configured_spec(config: Config) -> PolicySpec:
    """The policy that the configuration asks for.

    Raises:
        ConfigError: Its table or arguments are not accepted.
    """
    speculation, largest = config.speculation, config.num_draft_tokens
    name = speculation.policy
    if not largest or name == "off":
        return fixed_spec(0)
    if name == "fixed":
        return fixed_spec(largest)
    if name == "static_table":
        if speculation.table is None:
            fix = "Give ranges, for example [[1, 8, 3], [9, 512, 0]]."
            raise ConfigError("speculation.table", given=None, allowed="a table of K", fix=fix)
        spec = table_spec(speculation.table, largest)
        build_policy(spec)  # refuses what is wrong with the table
        return spec
    _check_arguments(name, speculation.policy_arguments)
    method = (config.drafter.speculative_config or {}).get("method")
    has_model = method not in METHODS_WITHOUT_MODEL
    settings = {
        "max_draft_tokens": largest,
        "switch_margin": speculation.switch_margin,
        "max_slowdown": speculation.max_slowdown,
        "exploration_fraction": speculation.exploration_fraction,
        "catch_up_tokens": speculation.catch_up_tokens if has_model and speculation.skip_idle_drafter else 0,
    }
    fraction = MODEL_DRAFT_FRACTION if has_model else LOOKUP_DRAFT_FRACTION
    return adaptive_spec(name, speculation.policy_arguments, settings, fraction)


def _check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    allowed = inspect.signature(CHOOSERS[name]).parameters
    for key in arguments:
        if key not in allowed:
            raise ConfigError(
                f"speculation.policy_arguments.{key}",
                given=arguments[key],
                allowed=f"arguments of {name}: {', '.join(allowed) or 'none'}",
                fix=f"Remove it or correct its name. {nearest(key, allowed)}",
            )
    try:
        CHOOSERS[name](**arguments)
    except (TypeError, ValueError) as error:
        fix = "docs/policies.md lists them."
        field = "speculation.policy_arguments"
        raise ConfigError(field, given=dict(arguments), allowed=str(error), fix=fix) from error


def check_k_trace(k_trace: Sequence[int], config: Config) -> None:
    """Refuse a trace that cannot be replayed with this configuration.

    Raises:
        InputError: It is no list of K, or the engine cannot repeat one.
    """
    if not isinstance(k_trace, Sequence):
        fix = "Give accelerator.k_trace of an earlier call."
        raise InputError("k_trace", given=k_trace, allowed="a list of integers", fix=fix)
    if not config.engine.in_process:
        fix = "Set engine.in_process to true, or leave k_trace out: a fixed K repeats in both modes."
        allowed = "none with engine.in_process: false, where requests reach running steps by chance"
        raise InputError("k_trace", given=f"{len(k_trace)} steps", allowed=allowed, fix=fix)
    largest = config.drafter.max_draft_tokens
    bad = next((k for k in k_trace if type(k) is not int or not 0 <= k <= largest), None)
    if bad is not None:
        allowed = f"0 to {largest}, the drafter's num_speculative_tokens"
        raise InputError("k_trace", given=bad, allowed=allowed, fix="Replay with the drafter of that run.")
