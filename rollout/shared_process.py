"""Owns the repair that lets several in-process engines be closed one by one (see `vllm_patches.py`).

vLLM's engines in one process share its process groups; the last one to close takes them down.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

_open_cores: WeakSet[Any] = WeakSet()
"""Engine cores of this process that have started and are not shut down."""


def apply_shared_process() -> None:
    """Keep the process groups while another engine core of this process is open."""
    from vllm.v1.engine import core

    if core.cleanup_dist_env_and_memory.__module__ == __name__:
        return
    core.cleanup_dist_env_and_memory = _cleanup_after_the_last(core.cleanup_dist_env_and_memory)
    core.EngineCore.__init__ = _counted_init(core.EngineCore.__init__)
    core.EngineCore.shutdown = _counted_shutdown(core.EngineCore.shutdown)


def check_shared_process() -> str | None:
    """Looks whether the hook is bound: calling it would take down the engine that is being started."""
    from vllm.v1.engine import core

    if core.cleanup_dist_env_and_memory.__module__ == __name__:
        return None
    return "Shutting an engine core down clears what the others of the process run on."


def _cleanup_after_the_last(original: Callable[..., None]) -> Callable[..., None]:
    def cleanup_dist_env_and_memory(*args: Any, **kwargs: Any) -> None:
        if _open_cores:
            gc.collect()
        else:
            original(*args, **kwargs)

    return cleanup_dist_env_and_memory


def _counted_init(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _open_cores.add(self)

    return init


def _counted_shutdown(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def shutdown(self: Any) -> None:
        _open_cores.discard(self)
        original(self)

    return shutdown
