"""Owns what a policy takes from earlier runs when its engine starts, and leaves to later ones at the end."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from rlspec.config import Config
from rlspec.policy_specs import configured_spec
from rlspec.speculation.build import PolicySpec, learns
from rlspec.speculation.estimates_file import EstimatesKey, load_estimates, save_estimates

logger = logging.getLogger("rlspec.accelerator")


class LearningEngine(Protocol):
    """What is asked of an engine here."""

    @property
    def counts_steps(self) -> bool:
        """Whether it runs our scheduler."""
        ...

    def estimates_key(self) -> EstimatesKey:
        """What its estimates belong to."""
        ...

    def learnt(self, policy: PolicySpec) -> dict[str, Any] | None:
        """What the policy has learnt."""
        ...

    def restore(self, policy: PolicySpec, state: dict[str, Any]) -> str | None:
        """Go on with what an earlier run learnt; else why not."""
        ...


def recall(engine: LearningEngine, config: Config) -> None:
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


def remember(engine: LearningEngine, config: Config) -> None:
    """Keep what was learnt for the next run."""
    if _remembers(engine, config) and (state := engine.learnt(configured_spec(config))) is not None:
        save_estimates(engine.estimates_key(), state)


def _remembers(engine: LearningEngine, config: Config) -> bool:
    is_learning = engine.counts_steps and learns(configured_spec(config))
    return is_learning and config.speculation.remember
