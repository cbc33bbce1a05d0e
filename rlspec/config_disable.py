"""Owns the switch that gives stock vLLM at once: `speculation.enabled: false`, or RLSPEC_DISABLE=1."""

from __future__ import annotations

import logging
import os

from rlspec.config import Config
from rlspec.errors import ConfigError

logger = logging.getLogger("rlspec.config")

VARIABLE = "RLSPEC_DISABLE"


def without_drafter_if_disabled(config: Config) -> Config:
    """The configuration as it stands, or without a drafter and our scheduler where that is asked for.

    Raises:
        ConfigError: The environment variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(VARIABLE, given=value, allowed="0 or 1", fix="Set it to 1, or unset it.")
    if config.speculation.enabled and value != "1":
        return config
    cause = f"{VARIABLE}=1" if value == "1" else "speculation.enabled: false"
    logger.warning(
        "%s: stock vLLM without a drafter; no step facts, no drafts, and policy updates only drain", cause
    )
    speculation = config.speculation.model_copy(update={"enabled": False})
    drafter = config.drafter.model_copy(update={"speculative_config": None, "version": None})
    return config.model_copy(update={"speculation": speculation, "drafter": drafter})
