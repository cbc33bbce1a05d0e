"""Owns what is mixed into every vLLM worker: answers about the worker's own process."""

from __future__ import annotations

from rollout.vllm_patches import patch_statuses


class WorkerExtension:
    """Given to vLLM as `worker_extension_cls`; its methods are reached with `collective_rpc`."""

    def rlspec_patch_rows(self) -> list[list[object]]:
        """The state of each patch in this worker, as plain values."""
        return [list(status.as_row()) for status in patch_statuses()]
