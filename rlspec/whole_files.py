"""Owns the writing of a whole file in one step, so that no reader sees half of it."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file and its folder: readers see the old text or the new one.

    Processes that write the same path at once do not disturb each other; the last one stays.

    Raises:
        OSError: It cannot be written; an older file is left as it was.
    """
    unfinished = Path(f"{path}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
