"""Owns what was learnt of costs and acceptance on disk, so that the next run starts warm.

One file for each machine, policy architecture, drafter and engine build: estimates of another would mislead.
Losing such a file costs a few trials, so nothing that is wrong with it stops a run: it warns and is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlspec.cache import cache_root
from rlspec.whole_files import replace_file

logger = logging.getLogger("rlspec.speculation")

FORMAT = 1


@dataclass(frozen=True, slots=True)
class EstimatesKey:
    """What estimates belong to.

    Attributes:
        machine: Processors and devices.
        policy: The policy's architecture; its weights change while it trains.
        drafter: Method and architecture of the drafter, and the largest K.
        engine: vLLM's version and arguments.
    """

    machine: str
    policy: str
    drafter: str
    engine: str

    def path(self) -> Path:
        """Where they are kept."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_root() / "estimates" / f"{digest[:24]}.json"


def save_estimates(key: EstimatesKey, state: Mapping[str, Any]) -> Path | None:
    """Replace the file of this key, by rename; None where that is not possible, with a warning."""
    path = key.path()
    text = json.dumps({"format": FORMAT, "key": asdict(key), "state": state}, allow_nan=False)
    try:
        replace_file(path, text)
    except OSError as error:
        logger.warning("what was learnt of step costs is not kept: %s: %s", path, error.strerror or error)
        return None
    return path


def load_estimates(key: EstimatesKey) -> dict[str, Any] | None:
    """What an earlier run of this key has learnt; None without one, and with a warning if it is unusable."""
    path = key.path()
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or content["key"] != asdict(key):
            raise ValueError(f"format {content['format']!r} or key {content['key']!r} of something else")
        state = content["state"]
        if not isinstance(state, dict):
            raise TypeError(f"state is {state!r}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is left out, costs are measured anew: %s: %s", path, type(error).__name__, error)
        return None
    return state
