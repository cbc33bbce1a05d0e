"""Owns `rlspec rollout`: prompts file in, rollouts file out, a table and a report.

    prompts.jsonl ─► read ─► encode ─► engine ─► groups ─► out.jsonl (flushed a group at a time)
                       └── rejected.jsonl     └► steps      out.meta.json, out.report.html, out.steps.jsonl

Part of the composition root, as `cli.py` is.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import provenance
from rlspec.accelerator import Accelerator
from rlspec.config import Config, parse_config
from rlspec.console import print_table, progress
from rlspec.errors import InputError
from rlspec.kv_memory import KvMemory
from rlspec.prompts import Rejected, first_error, read_prompts
from rlspec.report import ArmReport, comparison_rows, write_report
from rlspec.rollout_files import RolloutWriter, check_resumable, write_rejected, write_text
from rlspec.statistics import summarise
from rlspec.step_files import STEPS, StepWriter
from rlspec.types import Event, Rollout, StepFacts

logger = logging.getLogger("rlspec.rollout")

REJECTED = "rejected.jsonl"

SAME_ON_RESUME = ("policy", "drafter", "speculation", "sampling")
"""Sections of the configuration that must not change between a run and its continuation."""

SAME_VLLM_ARGS = ("logprobs_mode", "dtype", "quantization", "max_model_len")
"""Engine arguments that change what is written; others (memory, batch size) may change."""


@dataclass(frozen=True)
class RolloutJob:
    """What `rlspec rollout` was asked to do."""

    prompts: Path
    out: Path
    skip_bad: bool = False
    resume: bool = False
    k_trace: Path | None = None

    @property
    def meta(self) -> Path:
        """Where the run is described: configuration, versions, K of each step."""
        return self._beside(".meta.json")

    @property
    def report(self) -> Path:
        """The page with table and plots."""
        return self._beside(".report.html")

    @property
    def metrics(self) -> Path:
        """The metrics at the end."""
        return self._beside(".prom")

    @property
    def steps(self) -> Path:
        """What each engine step did, for `rlspec explain`."""
        return self._beside(f".{STEPS}")

    def _beside(self, ending: str) -> Path:
        return self.out.with_name(self.out.name.removesuffix(".jsonl") + ending)

    def check_paths(self) -> None:
        """Refuse an `out` that is no file name, and prompts that the run would overwrite.

        Raises:
            InputError: So it is.
        """
        if self.out.is_dir() or self.out.name in ("", REJECTED):
            allowed = f"a file, other than {REJECTED} where bad lines go"
            raise InputError("--out", given=str(self.out), allowed=allowed, fix="Name another file.")
        written = (self.out, self.meta, self.report, self.metrics, self.steps, self.rejected)
        if self.prompts.resolve() in [path.resolve() for path in written]:
            fix = "Name another --out, or move the prompts."
            raise InputError(
                "--prompts", given=str(self.prompts), allowed="a file the run does not write", fix=fix
            )

    @property
    def rejected(self) -> Path:
        """Where the lines go that were not accepted."""
        return self.out.with_name(REJECTED)


def run_rollouts(config: Config, job: RolloutJob) -> None:
    """Draw the rollouts of a prompts file.

    Raises:
        RlspecError: Something is not accepted; groups that were finished are on disk.
    """
    job.check_paths()
    prompts, rejected = read_prompts(job.prompts)
    if not prompts and not rejected:
        fix = "Write one JSON object a line."
        raise InputError("--prompts", given=f"{job.prompts}, without a line", allowed="prompts", fix=fix)
    _check_rejected(job, rejected)
    k_trace = _read_k_trace(job.k_trace) if job.k_trace else None
    if job.resume:
        _check_same_run(job.meta, config)
    group_size = config.sampling.n
    with (
        RolloutWriter(job.out, group_size=group_size, resume=job.resume) as writer,
        StepWriter(job.steps, resume=job.resume) as step_writer,
        Accelerator(config) as accelerator,
    ):
        accepted, unfit = accelerator.encode(prompts)
        if unfit:
            _check_rejected(job, [*rejected, *unfit])
        accelerator.metrics.count_skipped("bad_prompts", len(rejected) + len(unfit))
        if not accepted:
            given = f"{job.prompts}, with {len(rejected) + len(unfit)} bad prompts and no good one"
            raise InputError("--prompts", given=given, allowed="prompts", fix=f"See {job.rejected}.")
        tokens = {prompt.group_id: prompt.token_ids for prompt in accepted}
        check_resumable(writer.finished, tokens)
        todo = [prompt for prompt in accepted if prompt.group_id not in writer.finished]
        if not todo:
            print(f"{job.out} holds every group already; nothing to do.")
            return
        _write_meta(job.meta, config, k_trace=None)
        started = time.perf_counter()
        stream = accelerator.stream_encoded(todo, k_trace=k_trace)
        with (
            _recorded(stream, accelerator.steps, accelerator.events, step_writer) as recorded,
            progress(recorded, len(todo) * group_size, "rollouts") as shown,
        ):
            rollouts = writer.write_groups(shown)
        seconds = time.perf_counter() - started
        _write_meta(job.meta, config, k_trace=None if writer.finished else accelerator.k_trace)
        write_text(job.metrics, accelerator.metrics.text())
        _report(job, rollouts, accelerator.steps, seconds, accelerator.kv_memory, len(writer.finished))


@contextmanager
def _recorded(
    rollouts: Iterator[Rollout], steps: Sequence[StepFacts], events: Sequence[Event], writer: StepWriter
) -> Iterator[Iterator[Rollout]]:
    """Pass rollouts through; write steps and events, whose lists grow, with each and however it ends."""
    num_steps = num_events = 0

    def write_new() -> None:
        nonlocal num_steps, num_events
        new_steps, new_events = steps[num_steps:], events[num_events:]
        num_steps += len(new_steps)
        num_events += len(new_events)
        writer.write(new_steps, new_events)

    def passed() -> Iterator[Rollout]:
        for rollout in rollouts:
            write_new()
            yield rollout

    try:
        yield passed()
    finally:
        write_new()


def _check_rejected(job: RolloutJob, rejected: Sequence[Rejected]) -> None:
    if not rejected:
        return
    if not job.skip_bad:
        raise first_error(rejected)
    write_rejected(job.rejected, rejected)
    logger.warning("skipped %d bad prompts; the reasons are in %s", len(rejected), job.rejected)


def _write_meta(path: Path, config: Config, k_trace: Sequence[int] | None) -> None:
    meta = {
        "command": provenance.command(),
        "date": provenance.now(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "config": config.model_dump(mode="json"),
        # Unknown while the run goes on, and of no use for a run in several parts.
        "k_trace": k_trace,
    }
    write_text(path, json.dumps(meta, indent=1) + "\n")


def _read_meta(path: Path, field: str) -> Mapping[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        allowed = "the .meta.json of an earlier run"
        raise InputError(field, given=str(path), allowed=allowed, fix=f"Name that file ({error}).") from error
    if not isinstance(meta, dict):
        raise InputError(field, given=str(path), allowed="a JSON object", fix="Name the .meta.json of a run.")
    return meta


def _read_k_trace(path: Path) -> list[int]:
    trace = _read_meta(path, "--k-trace").get("k_trace")
    if not isinstance(trace, list) or not all(isinstance(k, int) for k in trace):
        fix = "Only a run that ended, and was not resumed, can be replayed."
        raise InputError("--k-trace", given=str(path), allowed="a file with the K of each step", fix=fix)
    return trace


def _check_same_run(meta_path: Path, config: Config) -> None:
    """Refuse to continue a run under other settings than it was begun with."""
    if not meta_path.exists():
        return
    tree = _read_meta(meta_path, "--resume").get("config")
    before = parse_config(tree if isinstance(tree, dict) else {})
    for key, value in _output_settings(config).items():
        earlier = _output_settings(before)[key]
        if earlier != value:
            fix = "Resume with the settings of the first run, or name another --out."
            raise InputError(f"--resume: {key}", given=value, allowed=f"{earlier!r}", fix=fix)


def _output_settings(config: Config) -> dict[str, Any]:
    """What decides the rollouts, by configuration key."""
    tree = config.model_dump(mode="json")
    settings = {f"{name}.{key}": value for name in SAME_ON_RESUME for key, value in tree[name].items()}
    return settings | {f"engine.vllm_args.{key}": config.vllm_args.get(key) for key in SAME_VLLM_ARGS}


def _report(
    job: RolloutJob,
    rollouts: list[Rollout],
    steps: list[StepFacts],
    seconds: float,
    memory: KvMemory,
    num_resumed: int,
) -> None:
    statistics = summarise(rollouts, steps, seconds)
    arm = ArmReport(name="rollouts", statistics=statistics, rollouts=rollouts, steps=steps)
    notes = [str(memory)]
    if num_resumed:
        notes.append(f"{num_resumed} groups were finished by an earlier run and are not counted here.")
    write_report(
        job.report,
        [arm],
        title="rlspec rollouts",
        command=provenance.command(),
        versions=provenance.versions(),
        hardware=provenance.hardware(),
        notes=notes,
    )
    print_table("Rollouts", [arm.name], comparison_rows([arm]))
    for note in notes:
        print(note)
    print(f"{job.out}\n{job.report}\nrlspec explain {job.steps}")
