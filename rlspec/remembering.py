"""Owns what a policy takes from earlier runs when its engine starts, and leaves to later ones at the end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlspec.config import Config
from rlspec.policy_specs import configured_spec
from rlspec.speculation.build import learns
from rlspec.speculation.estimates_file import load_estimates, save_estimates

if TYPE_CHECKING:
    from rollout.engine import RolloutEngine

logger = logging.getLogger("rlspec.accelerator")


def recall(engine: RolloutEngine, config: Config) -> None:
    """Let the policy go on with what an earlier run learnt on this machine."""
    if not _remembers(engine, config):
        return
    key = engine.estimates_key()
    state = load_estimates(key)
    if state is None:
        return
    refusal = engine.restore(configured_spec(config), state)
    if refusal:
        logger.warning("%s is left out, costs are measured anew: %s", key.path(), refusal)
    else:
        logger.info("step costs and acceptance of earlier runs: %s", key.path())


def remember(engine: RolloutEngine, config: Config) -> None:
    """Keep what was learnt for the next run."""
    if _remembers(engine, config) and (state := engine.learnt(configured_spec(config))) is not None:
        save_estimates(engine.estimates_key(), state)


def _remembers(engine: RolloutEngine, config: Config) -> bool:
    is_learning = engine.counts_steps and learns(configured_spec(config))
    return is_learning and config.speculation.remember
