"""Owns `rlspec demo`: GRPO-style rollouts of the embedded policy, plain and speculating side by side.

    round 1: plain, speculating ─► round 2: plain, speculating ─► greedy pass on both ─► table, report

The plain engine has no drafter loaded: that is what speculation has to beat. Part of the composition root.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from rlspec import provenance
from rlspec.accelerator import Accelerator
from rlspec.arithmetic import arithmetic_prompts, arithmetic_reward
from rlspec.audit.greedy_identity import GreedyVerdict, first_differences, judge
from rlspec.config import Config, parse_config
from rlspec.console import print_table, progress
from rlspec.report import ArmReport, comparison_rows, write_report
from rlspec.rollout_files import RolloutWriter
from rlspec.statistics import concatenate, summarise
from rlspec.step_files import STEPS, StepWriter
from rlspec.types import Rollout, StepFacts

NUM_PROMPTS = 8
NUM_ROUNDS = 2
GROUP_SIZE = 4
GROUP_SAMPLING = {"n": GROUP_SIZE, "temperature": 1.0, "max_tokens": 160}
GREEDY_SAMPLING = {"n": 1, "temperature": 0.0, "max_tokens": 64, "seed": None}


@dataclasses.dataclass
class _Arm:
    """One engine and what it has done."""

    name: str
    accelerator: Accelerator
    runs: list[tuple[list[Rollout], list[StepFacts], float]] = dataclasses.field(default_factory=list)

    def run(self, round_index: int) -> list[Rollout]:
        """One round: every prompt's group, rewarded."""
        prompts = arithmetic_prompts(NUM_PROMPTS, seed=round_index)
        sampling = {**GROUP_SAMPLING, "seed": round_index}
        total = NUM_PROMPTS * GROUP_SIZE
        started = time.perf_counter()
        stream = self.accelerator.stream(prompts, sampling)
        with progress(stream, total, f"{self.name}, round {round_index}") as shown:
            rollouts = [self._rewarded(rollout, round_index) for rollout in shown]
        self.runs.append((rollouts, self.accelerator.steps, time.perf_counter() - started))
        return rollouts

    def report(self) -> ArmReport:
        """All rounds as one run."""
        rollouts, steps, seconds = concatenate(self.runs)
        return ArmReport(self.name, summarise(rollouts, steps, seconds), rollouts, steps)

    def _rewarded(self, rollout: Rollout, round_index: int) -> Rollout:
        reward = arithmetic_reward(rollout.text or "", int(str(rollout.data["answer"])))
        data = {**rollout.data, "reward": reward, "arm": self.name, "round": round_index}
        return dataclasses.replace(rollout, data=data, group_id=f"{self.name}/{rollout.group_id}")


def run_demo(config: Config, runs: Path) -> bool:
    """Run the demo and write `runs/<time>/rollouts.jsonl`, `report.html` and `steps.jsonl`.

    Args:
        config: The speculating arm; the plain one is the same without a drafter.
        runs: The folder for the results of runs.

    Returns:
        Whether speculation changed no greedy token.
    """
    started = time.perf_counter()
    folder = runs / time.strftime("%Y-%m-%dT%H-%M-%S")
    without_drafter = {"drafter": {"speculative_config": None}, "speculation": {}}
    plain_config = parse_config({**config.model_dump(), **without_drafter})
    with Accelerator(plain_config) as plain, Accelerator(config) as speculating:
        arms = [_Arm("plain", plain), _Arm("speculating", speculating)]
        for arm in arms:  # The first steps allocate; they are not measured.
            arm.accelerator.generate(["Hello"], {"max_tokens": 8, "n": 1})
        with (
            RolloutWriter(folder / "rollouts.jsonl", group_size=GROUP_SIZE) as writer,
            StepWriter(folder / STEPS) as step_writer,
        ):
            for round_index in range(NUM_ROUNDS):
                for arm in arms:
                    writer.write_groups(arm.run(round_index))
                step_writer.write(speculating.steps, speculating.events)
        verdict = _greedy_identity(plain, speculating)
    _report(folder, [arm.report() for arm in arms], verdict, time.perf_counter() - started)
    return verdict.passed


def _greedy_identity(plain: Accelerator, speculating: Accelerator) -> GreedyVerdict:
    """Both arms at temperature 0; differences are looked up in the reference model."""
    prompts = arithmetic_prompts(NUM_PROMPTS, seed=NUM_ROUNDS)
    one, other = (accelerator.generate(prompts, GREEDY_SAMPLING) for accelerator in (plain, speculating))
    differences = first_differences(one, other)
    gaps: list[float] = []
    if differences:
        from rollout.reference import ReferenceModel

        reference = ReferenceModel(plain.policy_path)
        gaps = [reference.top_two_gap(difference.prefix_token_ids) for difference in differences]
    return judge(len(prompts), gaps)


def _report(folder: Path, arms: Sequence[ArmReport], verdict: GreedyVerdict, seconds: float) -> None:
    plain, speculating = (arm.statistics.tokens_per_second for arm in arms)
    notes = [
        str(verdict),
        f"speculating / plain, tokens per second: {speculating / plain:.2f}x in this one run "
        f"({NUM_ROUNDS} interleaved rounds; the plain engine has no drafter loaded)",
        f"demo seconds: {seconds:.0f}",
    ]
    write_report(
        folder / "report.html",
        arms,
        title="rlspec demo",
        command=provenance.command(),
        versions=provenance.versions(),
        hardware=provenance.hardware(),
        notes=notes,
    )
    title = f"rlspec demo, {provenance.now()}, {provenance.hardware()}"
    print_table(title, [arm.name for arm in arms], comparison_rows(arms))
    for note in notes:
        print(note)
    print(f"{folder / 'rollouts.jsonl'}\n{folder / 'report.html'}\nrlspec explain {folder}")
