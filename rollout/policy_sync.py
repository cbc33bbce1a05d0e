"""Owns the policy of a running engine: which weights it has, and how it gets others.

One update:
    check          the checkpoint's files; refused here, nothing has happened
    drain          with `drain`: what is in flight is finished, then
    pause          no step runs; outputs of earlier steps are taken in
    cut            with `abort`: what is in flight ends with what it has
    load           vLLM replaces the weights in every worker
    forget         the KV cache: prefixes, and with `keep` what running requests have computed
    resume
From load to forget the engine is neither the old policy nor the new one: what fails there ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from vllm import LLM
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.engine.exceptions import EngineDeadError

from rlspec.config import InFlightMode
from rlspec.errors import EngineError, InputError, ModelError
from rlspec.metrics import Metrics
from rollout.checkpoints import CheckpointFacts, read_checkpoint
from rollout.engine_core import EngineCoreLine
from rollout.policy_checks import check_replacement, read_hub_checkpoint
from rollout.run import Run

logger = logging.getLogger("rlspec.rollout.policy_sync")


class PolicySync:
    """The policy of one engine.

    Attributes:
        version: Version of the weights in the engine.
        path: Path or hub name of the checkpoint they came from.
    """

    def __init__(self, llm: LLM, core: EngineCoreLine, metrics: Metrics, *, version: int) -> None:
        self.version = version
        self.path: str = llm.llm_engine.model_config.model
        self._llm = llm
        self._core = core
        self._metrics = metrics
        # Read now: a trainer may have removed the folder by the time of an update. None is a hub name.
        self._running = read_checkpoint(self.path, "policy.model")
        self._failure: str | None = None
        metrics.set_policy_version(version)

    def check(self, path: str | Path, version: int, in_flight: InFlightMode) -> CheckpointFacts:
        """Read the checkpoint and refuse what does not fit; the engine is not touched.

        Raises:
            InputError: The version is not a later one, or `in_flight` is unknown.
            ModelError: The checkpoint cannot replace the policy.
        """
        if type(version) is not int or version <= self.version:
            fix = "Count versions upwards, one for each update."
            allowed = f"an integer above {self.version}, the version of the running policy"
            raise InputError("version", given=version, allowed=allowed, fix=fix)
        if in_flight not in get_args(InFlightMode):
            fix = "Name one of them, or leave it out for policy.in_flight of the configuration."
            allowed = ", ".join(get_args(InFlightMode))
            raise InputError("in_flight", given=in_flight, allowed=allowed, fix=fix)
        if in_flight != "drain" and not self._core.has_our_scheduler:
            fix = "Use drain, or set speculation.enabled to true (with drafter.speculative_config: null)."
            allowed = "drain, with vLLM's own scheduler, which does not tell who has got tokens"
            raise InputError("in_flight", given=in_flight, allowed=allowed, fix=fix)
        self._require_loader()
        if self._running is None:
            revision = self._llm.llm_engine.model_config.revision
            self._running = read_hub_checkpoint(self.path, revision, "policy.model")
        return check_replacement(self._running, path)

    def update(
        self, checkpoint: CheckpointFacts, version: int, run: Run | None, in_flight: InFlightMode
    ) -> None:
        """Replace the weights by those of a checkpoint that `check` returned.

        Raises:
            EngineError: Loading failed; the engine must be made again.
            EngineDeadError: The engine core's process has ended.
        """
        started = time.perf_counter()
        path = str(checkpoint.path.absolute())
        num_drained = self._drain(run) if run is not None and in_flight == "drain" else 0
        paused = time.perf_counter()
        num_cut = num_again = num_kept = 0
        with self._no_return():
            self._core.pause()
            if run is not None:
                run.settle()
                if in_flight == "abort":
                    num_cut, num_again = run.cut()
            self._load(path)
            self._core.mark(f"after the update to policy version {version}")
            old_version, self.version, self.path = self.version, version, path
            if run is not None:
                num_kept = run.go_on_under(version)
            self._core.resume()
        now = time.perf_counter()
        self._metrics.observe_policy_update(version, in_flight, now - paused)
        if num_cut:
            self._metrics.count_skipped("responses_cut_by_policy_update", num_cut)
        logger.info(
            "policy %d to %d in %.2f s, %.2f s of them without engine steps: %s; in flight (%s): "
            "%d finished before, %d cut, %d begin again, %d go on",
            *(old_version, version, now - started, now - paused, self.path, in_flight),
            *(num_drained, num_cut, num_again, num_kept),
        )

    def require_intact(self) -> None:
        """Raise if an update has failed half-way.

        Raises:
            EngineError: It has.
        """
        if self._failure is not None:
            raise EngineError(
                "engine",
                given=f"weights of a policy update that failed half-way: {self._failure}",
                allowed="the weights of one checkpoint",
                fix="Make a new Accelerator.",
            )

    def _drain(self, run: Run) -> int:
        try:
            return run.drain()
        except EngineDeadError:
            self._failure = "the engine core died"
            raise

    @contextmanager
    def _no_return(self) -> Iterator[None]:
        """What is inside succeeds, or the engine is of no use any more, whatever was raised."""
        self._failure = self._failure or "it did not end"
        yield
        self._failure = None

    def _load(self, path: str) -> None:
        answers = self._llm.collective_rpc("rlspec_load_policy", args=(path,))
        failures = [answer for answer in answers if answer is not None]
        if not failures and not self._core.forget_kv():
            failures.append("vLLM did not reset its KV cache, which holds the old policy's keys and values")
        if failures:
            self._failure = failures[0]
            self.require_intact()

    def _require_loader(self) -> None:
        """vLLM 0.32 reloads from files with its default loader only (model_loader/reload/inplace.py)."""
        load_config = self._llm.llm_engine.vllm_config.load_config
        if not hasattr(get_model_loader(load_config), "get_all_weights"):
            raise ModelError(
                "engine.vllm_args.load_format",
                given=str(load_config.load_format),
                allowed="auto, hf or safetensors, for an engine whose policy is updated",
                fix="Make the engine with another load_format.",
            )
