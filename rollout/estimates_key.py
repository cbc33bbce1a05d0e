"""Owns what makes two engines cost the same: machine, architectures, vLLM build and arguments."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from rlspec.config import Config
from rlspec.provenance import hardware
from rlspec.speculation.estimates_file import EstimatesKey
from rollout.vllm_support import installed_vllm_version


def estimates_key(vllm_config: Any, config: Config) -> EstimatesKey:
    """The key of this engine's estimates. Weights are left out: they change while the policy trains."""
    speculative = vllm_config.speculative_config
    drafter_config = speculative.draft_model_config if speculative is not None else None
    method = dict(config.drafter.speculative_config or {})
    method.pop("model", None)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return EstimatesKey(
        machine=", ".join([hardware(), f"{torch.get_num_threads()} threads", *devices]),
        policy=_architecture(vllm_config.model_config),
        drafter=json.dumps(method, sort_keys=True, default=str) + _architecture(drafter_config),
        engine=f"vLLM {installed_vllm_version()} {json.dumps(config.vllm_args, sort_keys=True, default=str)}",
    )


def _architecture(model_config: Any) -> str:
    """A short name of a model's shape: the digest of its transformers configuration, without its path."""
    if model_config is None or model_config.hf_config is None:
        return ""
    values = model_config.hf_config.to_dict()
    values.pop("_name_or_path", None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
