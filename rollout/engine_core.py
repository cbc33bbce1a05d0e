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

from rlspec.types import StepFacts


class EngineCoreLine:
    """Reaches `rlspec_` methods of the scheduler, wherever the engine core runs."""

    def __init__(self, llm: LLM) -> None:
        self._client = llm.llm_engine.engine_core
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

    def take_steps(self) -> list[StepFacts]:
        """The engine's steps since the last call."""
        if self._is_in_process:
            steps: list[StepFacts] = self.call("take_steps")
            return steps
        return [StepFacts.from_row(row) for row in self.call("take_step_rows")]

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
