"""Owns the end of an engine core whose caller has ended."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process when its parent has ended; vLLM 0.32 leaves an engine core running for ever.

    Does nothing in a process that multiprocessing has not started.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="rlspec-parent", daemon=True).start()
