"""Owns what the controller's benchmark runs: engines as arms, prompts, lengths, and runs in turn."""

from __future__ import annotations

import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlspec import Accelerator, Config, Prompt
from rlspec.arithmetic import arithmetic_prompts
from rlspec.config import parse_config
from rlspec.savings import savings
from rlspec.types import StepFacts

PROMPT_SEED = 7
MAX_DRAFT_TOKENS = 5


@dataclass(frozen=True)
class Run:
    """One run of one arm: wall seconds, and its steps."""

    seconds: float
    steps: list[StepFacts]
    num_tokens: int

    def facts(self) -> dict[str, Any]:
        """What is kept of it in the result file."""
        saved = savings(self.steps)
        return {
            "seconds": round(self.seconds, 3),
            "num_steps": len(self.steps),
            "num_tokens": self.num_tokens,
            "steps_by_k": Counter(step.num_draft_tokens for step in self.steps),
            "steps_by_reason": Counter(step.reason.value for step in self.steps),
            "num_speculating_steps": saved.num_speculating_steps,
            "num_drafted": sum(sum(step.num_drafted) for step in self.steps),
            "num_accepted": sum(sum(step.num_accepted) for step in self.steps),
            "saved_seconds": round(saved.saved_seconds, 3),
            "num_preempted": sum(step.num_preempted for step in self.steps),
        }


@dataclass
class Arm:
    """An engine and who decides K on it; several arms may share an engine."""

    name: str
    accelerator: Accelerator
    speculation: Mapping[str, Any] = field(default_factory=dict)

    def run(self, prompts: Sequence[Prompt], seed: int) -> Run:
        """Draw the prompts' responses at temperature 1."""
        accelerator = self.accelerator
        base = accelerator.config
        tree = {**base.speculation.model_dump(), **self.speculation}
        section = parse_config({"drafter": base.drafter.model_dump(), "speculation": tree}).speculation
        accelerator.config = base.model_copy(update={"speculation": section})
        try:
            started = time.perf_counter()
            rollouts = accelerator.generate(prompts, {"seed": seed, "temperature": 1.0, "ignore_eos": True})
            seconds = time.perf_counter() - started
        finally:
            accelerator.config = base
        return Run(seconds, accelerator.steps, sum(len(r.completion_token_ids) for r in rollouts))


def engine(drafter: dict[str, Any] | None, **speculation: Any) -> Accelerator:
    """The embedded policy with a drafter, or with none loaded."""
    tree: dict[str, Any] = {
        "drafter": {"speculative_config": drafter},
        "speculation": {"remember": False, **speculation},
        "observability": {"log_level": "error", "vllm_log_level": "error"},
    }
    config: Config = parse_config(tree)
    return Accelerator(config)


def eagle3(head: Path) -> dict[str, Any]:
    """vLLM's speculative_config for a head."""
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": MAX_DRAFT_TOKENS}


NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": MAX_DRAFT_TOKENS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}


def random_head(head: Path, out: Path) -> Path:
    """A head of the same shape whose weights are noise: its drafts never match."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(head, out)
    generator = np.random.default_rng(0)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.dtype.kind == "f" and tensor.ndim == 2:
                scale = 1.0 / math.sqrt(tensor.shape[-1])
                tensors[name] = generator.normal(0.0, scale, tensor.shape).astype(tensor.dtype)
        save_file(tensors, path)
    return out


def prompts_of(lengths: Sequence[int], seed: int = PROMPT_SEED) -> list[Prompt]:
    """One arithmetic prompt for each length, which its response has exactly (with `ignore_eos`)."""
    prompts = arithmetic_prompts(len(lengths), seed)
    return [
        Prompt(messages=prompt.messages, group_id=prompt.group_id, sampling={"max_tokens": length})
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def heavy_tailed_lengths(count: int, median: int, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths (sigma 0.9) with the given median, scaled at the top so that one has the longest."""
    generator = random.Random(seed)
    lengths = [round(median * generator.lognormvariate(0.0, 0.9)) for _ in range(count - 1)]
    return [longest, *(min(max(length, 4), longest) for length in lengths)]


def interleaved(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    num_rounds: int,
    on_run: Callable[[int, Arm, Run], None],
    seed: int = 0,
) -> None:
    """Run each arm once a round, in an order drawn anew for each round."""
    for index in range(num_rounds):
        order = list(arms)
        random.Random(seed + index).shuffle(order)
        for arm in order:
            on_run(index, arm, arm.run(prompts, seed=1000 + index))
