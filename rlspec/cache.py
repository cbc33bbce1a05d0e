"""Owns where rlspec keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """RLSPEC_CACHE, else $XDG_CACHE_HOME/rlspec, else ~/.cache/rlspec."""
    own = os.environ.get("RLSPEC_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"  # XDG: ignore relative paths
    return base / "rlspec"
