"""Owns `rlspec profile`: step costs of this machine over batch, K and context, in a few minutes.

for each batch and context: one run whose K changes every few steps ─► facts ─► table, plot, words
                                                                         └────► estimates for the next run
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlspec import provenance
from rlspec.accelerator import Accelerator
from rlspec.config import Config
from rlspec.console import print_rows
from rlspec.errors import ConfigError, InputError
from rlspec.plots import draw_svg, render_page
from rlspec.profile_table import Profile, profile_of
from rlspec.rollout_files import write_text
from rlspec.types import Prompt, StepFacts

STEPS_A_K = 8
"""Steps at each K: the first changes over, the median of the others is taken."""

WARM_UP_STEPS = 4
CONTEXTS = (64, 512)
"""Prompt tokens: a short context and one that shows what attention costs, where the engine has the room."""


@dataclass(frozen=True)
class ProfileJob:
    """What `rlspec profile` was asked to do.

    Attributes:
        out: Folder for profile.json and profile.html.
        batches: Batch sizes; None takes powers of two up to the engine's `max_num_seqs`.
        contexts: Prompt lengths in tokens; None takes those of `CONTEXTS` that the engine has room for.
    """

    out: Path
    batches: Sequence[int] | None = None
    contexts: Sequence[int] | None = None


def run_profile(config: Config, job: ProfileJob) -> None:
    """Measure, print the table, and write profile.json and profile.html.

    Raises:
        RlspecError: Something given is not accepted, or the engine does not start.
    """
    if config.drafter.speculative_config is None or not config.speculation.enabled:
        raise ConfigError(
            "drafter.speculative_config",
            given=config.drafter.speculative_config,
            allowed="a drafter: its own cost and that of verifying drafts are what is measured",
            fix="Name a drafter, n-gram lookup if there is no other.",
        )
    if job.out.exists() and not job.out.is_dir():
        raise InputError("--out", given=str(job.out), allowed="a folder", fix="Name another one.")
    with Accelerator(config) as accelerator:
        runs = {}
        for batch, context in _loads(accelerator, job):
            runs[batch, context] = _measure(accelerator, batch, context)
        accelerator.learn_costs([facts for steps in runs.values() for facts in steps])
        profile = profile_of(runs)
    job.out.mkdir(parents=True, exist_ok=True)
    _write(job.out, profile)
    print_rows("Step milliseconds", profile.headers(), profile.rows())
    for line in profile.sentences():
        print(line)
    print(f"{job.out / 'profile.html'}\n{job.out / 'profile.json'}")


def _loads(accelerator: Accelerator, job: ProfileJob) -> list[tuple[int, int]]:
    largest = accelerator.max_batch_size
    batches = job.batches or [1 << power for power in range(largest.bit_length())]
    for batch in batches:
        if not 1 <= batch <= largest:
            fix = "Leave it out, or raise engine.vllm_args.max_num_seqs."
            raise InputError("--batches", given=batch, allowed=f"1 to {largest}, max_num_seqs", fix=fix)
    num_new = _num_new_tokens(accelerator)
    room = accelerator.max_model_len - num_new
    contexts = job.contexts or [context for context in CONTEXTS if context <= room] or [max(room, 1)]
    for context in contexts:
        if not 1 <= context <= room:
            allowed = f"1 to {room}: max_model_len {accelerator.max_model_len} less {num_new} new tokens"
            raise InputError("--contexts", given=context, allowed=allowed, fix="Give shorter ones.")
    capacity = accelerator.kv_memory.num_tokens
    loads = [(batch, context) for context in contexts for batch in batches]
    return [(batch, context) for batch, context in loads if batch * (context + num_new) <= capacity]


def _trace(accelerator: Accelerator) -> list[int]:
    largest = accelerator.config.num_draft_tokens
    return [0] * WARM_UP_STEPS + [k for k in range(largest + 1) for _ in range(STEPS_A_K)]


def _num_new_tokens(accelerator: Accelerator) -> int:
    """So many that no response ends before the trace does, whatever is accepted."""
    return sum(k + 1 for k in _trace(accelerator)) + 2


def _measure(accelerator: Accelerator, batch: int, context: int) -> list[StepFacts]:
    generator = random.Random(batch * 100_003 + context)
    largest = accelerator.vocab_size - 1
    prompts = [
        Prompt(token_ids=tuple(generator.randint(1, largest) for _ in range(context))) for _ in range(batch)
    ]
    trace = _trace(accelerator)
    sampling = {"n": 1, "max_tokens": _num_new_tokens(accelerator), "ignore_eos": True, "temperature": 1.0}
    for _ in accelerator.stream(prompts, sampling, k_trace=trace):
        break  # the trace is over before the first response ends
    print(f"batch {batch}, context {context}: {len(accelerator.steps)} steps", flush=True)
    return accelerator.steps[: len(trace)]


def _write(out: Path, profile: Profile) -> None:
    facts = {
        "cells": [asdict(cell) for cell in profile.cells],
        "sentences": profile.sentences(),
        "command": provenance.command(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "date": provenance.now(),
    }
    write_text(out / "profile.json", json.dumps(facts, indent=1) + "\n")
    page = render_page(
        "tables.html.jinja",
        title="rlspec profile",
        notes=profile.sentences(),
        tables=[("Step milliseconds", profile.headers(), profile.rows())],
        plots=[("Step time", draw_svg(("batch", "milliseconds a step"), _lines(profile)))],
        command=provenance.command(),
        versions=provenance.versions(),
        hardware=provenance.hardware(),
    )
    write_text(out / "profile.html", page)


def _lines(profile: Profile) -> list[Any]:
    context = min(context for _, context in profile.loads())
    return [partial(_draw_k, profile=profile, context=context, k=k) for k in profile.measured_k()]


def _draw_k(axes: Any, style: dict[str, Any], *, profile: Profile, context: int, k: int) -> None:
    cells = [cell for cell in profile.cells if (cell.context, cell.k) == (context, k)]
    axes.plot(
        [cell.batch_size for cell in cells],
        [1000 * cell.seconds for cell in cells],
        marker="o",
        label=f"K = {k}",
        **style,
    )
