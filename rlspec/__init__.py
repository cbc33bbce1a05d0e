"""rlspec: faster, lossless rollouts for RL training of language models, on stock vLLM.

    with Accelerator(load_config("my.yaml")) as accelerator:
        rollouts = accelerator.generate(["2 + 2 ="], n=4)

Importing this package is cheap: torch and vLLM are loaded when an `Accelerator` is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlspec.accelerator import Accelerator
    from rlspec.config import Config, parse_config
    from rlspec.config_files import load_config
    from rlspec.errors import RlspecError
    from rlspec.types import Prompt, Rollout

__version__ = "0.1.0"

__all__ = ["Accelerator", "Config", "Prompt", "RlspecError", "Rollout", "load_config", "parse_config"]

_HOMES = {
    "Accelerator": "rlspec.accelerator",
    "Config": "rlspec.config",
    "Prompt": "rlspec.types",
    "RlspecError": "rlspec.errors",
    "Rollout": "rlspec.types",
    "load_config": "rlspec.config_files",
    "parse_config": "rlspec.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
