"""Owns the line to vLLM's engine core: calls our scheduler there, and notices when the core dies.

in process:          a direct call
own process:         a utility call of vLLM's client (about 1 ms), and a thread that waits for the
                     process to end and then fails whoever waits for it (vLLM 0.32 lets them wait)
"""

from __future__ import annotations

import multiprocessing.connection
import threading
from typing import Any

from vllm import LLM
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError

from rlspec.types import Event, StepFacts


class EngineCoreLine:
    """Reaches `rlspec_` methods of the scheduler, wherever the engine core runs.

    Attributes:
        has_our_scheduler: False for an engine with vLLM's own scheduler, which has no such methods.
    """

    def __init__(self, llm: LLM) -> None:
        self._client = llm.llm_engine.engine_core
        self.has_our_scheduler = llm.llm_engine.vllm_config.scheduler_config.scheduler_cls is not None
        self._is_in_process = isinstance(self._client, InprocClient)
        if not self._is_in_process:
            threading.Thread(target=self._watch, name="rlspec-engine-core-watch", daemon=True).start()

    def call(self, method: str, *args: Any) -> Any:
        """Call `rlspec_<method>` of the scheduler.

        Raises:
            EngineDeadError: The core's process has ended.
        """
        if self._is_in_process:
            return self._client.engine_core.rlspec_call(method, *args)
        return self._client.call_utility("rlspec_call", method, *args)

    def take_steps(self) -> tuple[list[StepFacts], list[Event]]:
        """The engine's steps since the last call, and what happened in them."""
        if not self.has_our_scheduler:
            return [], []
        if self._is_in_process:
            steps, events = self.call("take_steps")
            return steps, events
        steps, events = self.call("take_step_rows")
        return [StepFacts.from_row(row) for row in steps], [Event.from_row(row) for row in events]

    def mark(self, cause: str) -> None:
        """Tell whoever chooses K that the policy or the drafter changed."""
        if self.has_our_scheduler:
            self.call("mark", cause)

    def forget_kv(self) -> bool:
        """Drop every key and value computed so far; False when vLLM cannot drop them all."""
        if self.has_our_scheduler:
            return bool(self.call("forget_kv"))
        return bool(self._client.reset_prefix_cache())

    def pause(self) -> None:
        """Let the step that runs end and start no other; then `has_outputs` is final.

        Raises:
            EngineDeadError: The core's process has ended.
        """
        if self._is_in_process:
            self._client.engine_core.pause_scheduler("keep", False)
        else:
            self._client.call_utility("pause_scheduler", "keep", False)

    def resume(self) -> None:
        """Start steps again."""
        if self._is_in_process:
            self._client.engine_core.resume_scheduler()
        else:
            self._client.call_utility("resume_scheduler")

    def has_outputs(self) -> bool:
        """Whether steps of a paused core have outputs that nobody has taken.

        In process: batches under way of an asynchronous scheduler. In its own process: messages that have
        come before the answer to `pause`, for the core sends both in order through one socket.
        """
        if self._is_in_process:
            return bool(self._client.engine_core.batch_queue)
        return not self._client.outputs_queue.empty()

    def close(self) -> None:
        """Stop the core; its memory is freed."""
        self._client.shutdown()

    def _watch(self) -> None:
        sentinels = [process.sentinel for process in self._client.resources.engine_manager.processes]
        multiprocessing.connection.wait(sentinels)
        self._client.outputs_queue.put_nowait(EngineDeadError())
        for answer in list(self._client.utility_results.values()):
            if not answer.done():
                answer.set_exception(EngineDeadError())
