"""Measures the controller against plain decoding, fixed K and an oracle; writes docs/results/controller.json.

Parts, each kept in the result file when it ends, so that they can be run one by one:
    decide    microseconds of observe and decide at batch 256, without an engine
    off       K = 0 with the drafter loaded against no drafter, at batch 1, 8 and 32
    wake      acceptance after switching on: warm, caught up, cold
    tail      32 responses with heavy-tailed lengths: the controller, fixed K, the oracle
    ngram     the same lengths with n-gram drafting
    uniform   32 responses of one length, where speculation does not pay
    bad       a head that never matches
    policies  all policies on the tail
Every ratio is of seconds, to an engine with no drafter loaded, run in turn with it in one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.arms import (
    MAX_DRAFT_TOKENS,
    NGRAM,
    Arm,
    Run,
    eagle3,
    engine,
    heavy_tailed_lengths,
    interleaved,
    prompts_of,
    random_head,
)
from benchmarks.decide_cost import decide_microseconds
from benchmarks.oracle import oracle_table
from rlspec import Accelerator
from rlspec.openmp import restart_with_openmp
from rlspec.provenance import write_result
from rlspec.statistics import bootstrap_upper_bound
from rlspec.types import StepFacts

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "controller.json"
TAIL = heavy_tailed_lengths(count=32, median=24, longest=240)
UNIFORM = [32] * 32
FIXED = (1, 2, 3, 5)
OFF_TOKENS = {1: 32, 8: 24, 32: 16}
OFF_BATCHES = (1, 8, 32)
BAD_LENGTHS = [640, 320, 160, 80]
WAKE_LENGTHS = [160] * 8
WAKE_IDLE_STEPS = 100


class Benchmark:
    """The engines, made when a part first needs them, and what was measured."""

    def __init__(self, head: Path, pairs: int) -> None:
        self.raw: dict[str, Any] = json.loads(RESULT.read_text())["raw"] if RESULT.exists() else {}
        self._head, self._pairs = head, pairs
        self._engines: dict[str, Accelerator] = {}

    def _engine(self, name: str) -> Accelerator:
        makers: dict[str, Callable[[], Accelerator]] = {
            "none": lambda: engine(None),
            "head": lambda: engine(eagle3(self._head)),
            "warm": lambda: engine(eagle3(self._head), skip_idle_drafter=False),
            "cold": lambda: engine(eagle3(self._head), catch_up_tokens=0),
            "ngram": lambda: engine(NGRAM),
            "bad": lambda: engine(eagle3(random_head(self._head, self._head.with_name("random_head")))),
        }
        if name not in self._engines:
            self._engines[name] = makers[name]()
            Arm(name, self._engines[name], {"policy": "off"}).run(prompts_of([8] * 32), seed=0)
        return self._engines[name]

    def _arm(self, name: str, engine_name: str, **speculation: Any) -> Arm:
        return Arm(name, self._engine(engine_name), speculation)

    def _plain(self) -> Arm:
        return self._arm("plain", "none")

    def _compare(self, arms: list[Arm], lengths: list[int], num_rounds: int) -> dict[str, Any]:
        """Runs by arm, and the arms' ratios to the first one, with the steps of the last round."""
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}

        def on_run(index: int, arm: Arm, run: Run) -> None:
            runs[arm.name].append(run)
            facts = run.facts()
            print(index, arm.name, facts["seconds"], facts["steps_by_k"], facts["saved_seconds"], flush=True)

        interleaved(arms, prompts_of(lengths), num_rounds, on_run)
        self.last_runs = runs
        first = [run.seconds for run in runs[arms[0].name]]
        return {
            name: {
                "runs": [run.facts() for run in found],
                **_ratios([run.seconds for run in found], first),
            }
            for name, found in runs.items()
        }

    def decide(self) -> Any:
        return decide_microseconds()

    def off(self) -> Any:
        arms = [
            self._plain(),
            self._arm("off", "head", policy="off"),
            self._arm("warm", "warm", policy="off"),
        ]
        return {
            str(batch): self._compare(arms, [OFF_TOKENS[batch]] * batch, self._pairs) for batch in OFF_BATCHES
        }

    def wake(self) -> Any:
        found = {}
        for name, engine_name in (("warm", "warm"), ("caught_up", "head"), ("cold", "cold")):
            accelerator = self._engine(engine_name)
            trace = [0] * WAKE_IDLE_STEPS + [3] * 200
            sampling = {"seed": 5, "temperature": 1.0, "ignore_eos": True}
            runs = []
            for seed in range(4):
                accelerator.generate(prompts_of(WAKE_LENGTHS, seed=20 + seed), sampling, k_trace=trace)
                runs.append(_tokens_after_wake(accelerator.steps))
            by_step = [statistics.mean(step) for step in itertools.zip_longest(*runs, fillvalue=0.0)][:30]
            found[name] = {"tokens_a_request_step": [round(value, 3) for value in by_step]}
            print(name, found[name], flush=True)
        return found

    def tail(self) -> Any:
        fixed = [self._arm(f"fixed {k}", "head", policy="fixed", num_draft_tokens=k) for k in FIXED]
        by_fixed = self._compare([self._plain(), *fixed], TAIL, 3)
        steps = [step for found in self.last_runs.values() for run in found for step in run.steps]
        table = oracle_table(steps, MAX_DRAFT_TOKENS, max_batch_size=32)
        cold = self._arm("controller", "head").run(prompts_of(TAIL), seed=999).facts()
        arms = [
            self._plain(),
            self._arm("controller", "head"),
            self._arm("oracle", "head", policy="static_table", table=table),
        ]
        return {
            "lengths": TAIL,
            "fixed": by_fixed,
            "oracle_table": table,
            "first_run_of_the_controller": cold,
            "compared": self._compare(arms, TAIL, self._pairs),
        }

    def ngram(self) -> Any:
        return self._compare([self._plain(), self._arm("controller", "ngram")], TAIL, self._pairs)

    def uniform(self) -> Any:
        return self._compare([self._plain(), self._arm("controller", "head")], UNIFORM, self._pairs)

    def bad(self) -> Any:
        return self._compare([self._plain(), self._arm("controller", "bad")], BAD_LENGTHS, 5)

    def policies(self) -> Any:
        table = self.raw["tail"]["oracle_table"]
        names = ("goodput", "roofline", "beg_mab", "ucb", "exp3")
        arms = [self._plain(), *(self._arm(name, "head", policy=name) for name in names)]
        arms.append(self._arm("static_table (hindsight)", "head", policy="static_table", table=table))
        arms.append(self._arm("off", "head", policy="off"))
        return self._compare(arms, TAIL, 4)

    def summary(self) -> dict[str, float]:
        """The figures that README and docs quote, of the parts that were run."""
        raw, found = self.raw, {}
        if "decide" in raw:
            found["decide_microseconds_b256"] = raw["decide"]["median_microseconds"]
        for batch, arms in raw.get("off", {}).items():
            found[f"off_seconds_ratio_b{batch}"] = arms["off"]["median_seconds_ratio"]
            found[f"off_seconds_ratio_b{batch}_upper"] = arms["off"]["upper_seconds_ratio"]
            found[f"warm_seconds_ratio_b{batch}"] = arms["warm"]["median_seconds_ratio"]
        if "tail" in raw:
            compared = raw["tail"]["compared"]
            controller = compared["controller"]
            found["makespan_seconds_ratio_vs_plain"] = controller["median_seconds_ratio"]
            found["makespan_seconds_ratio_vs_plain_upper"] = controller["upper_seconds_ratio"]
            seconds = [[run["seconds"] for run in compared[arm]["runs"]] for arm in ("controller", "oracle")]
            ratio = _ratios(*seconds)
            found["makespan_seconds_ratio_vs_oracle"] = ratio["median_seconds_ratio"]
            found["speculating_steps"] = statistics.median(
                run["num_speculating_steps"] for run in controller["runs"]
            )
            found["seconds_saved"] = statistics.median(run["saved_seconds"] for run in controller["runs"])
            found["seconds_saved_measured"] = round(
                statistics.median(
                    plain["seconds"] - run["seconds"]
                    for plain, run in zip(compared["plain"]["runs"], controller["runs"], strict=True)
                ),
                3,
            )
            for k in FIXED:
                fixed = raw["tail"]["fixed"][f"fixed {k}"]
                found[f"fixed_{k}_seconds_ratio_vs_plain"] = fixed["median_seconds_ratio"]
        worst = [found["makespan_seconds_ratio_vs_plain"]] if "tail" in raw else []
        worst += [
            raw[part]["controller"]["median_seconds_ratio"]
            for part in ("ngram", "uniform", "bad")
            if part in raw
        ]
        if worst:
            found["worst_seconds_ratio_vs_plain"] = max(worst)
        if "bad" in raw:
            found["bad_drafter_seconds_ratio_vs_plain"] = raw["bad"]["controller"]["median_seconds_ratio"]
        if "wake" in raw:
            found["steps_to_90_percent_after_on"] = _steps_to_90_percent(raw["wake"])
        return found

    def write(self, arguments: str) -> None:
        """Write what is known so far."""
        write_result(RESULT, summary=self.summary(), raw=self.raw, command_line=arguments)


def _ratios(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    upper = bootstrap_upper_bound(ratios) if len(ratios) > 1 else ratios[0]
    return {
        "median_seconds_ratio": round(statistics.median(ratios), 4),
        "upper_seconds_ratio": round(upper, 4),
        "seconds_ratios": [round(ratio, 4) for ratio in ratios],
    }


def _tokens_after_wake(steps: list[StepFacts]) -> list[float]:
    """Mean tokens a request and step in each step that verified drafts, from the first one on."""
    verifying = [step for step in steps if any(step.num_drafted)]
    return [1.0 + sum(step.num_accepted) / step.batch_size for step in verifying]


def _steps_to_90_percent(wake: dict[str, Any]) -> int:
    """Steps with drafts after K rose from 0 until the mean since then is 90 % of the warm drafter's gain."""
    warm, caught_up = (wake[name]["tokens_a_request_step"] for name in ("warm", "caught_up"))
    level = 0.9 * (statistics.mean(warm) - 1.0)
    sums = list(itertools.accumulate(value - 1.0 for value in caught_up))
    return next((n for n, total in enumerate(sums, start=1) if total / n >= level), len(sums) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("decide", "off", "wake", "tail", "ngram", "uniform", "bad", "policies")
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--head", type=Path, default=Path("runs/first_head/head"))
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    restart_with_openmp()
    benchmark = Benchmark(arguments.head, arguments.pairs)
    for part in arguments.parts.split(","):
        if part not in parts:
            parser.error(f"--parts: {part!r} is none of {', '.join(parts)}")
        benchmark.raw[part] = getattr(benchmark, part)()
        benchmark.write("python -m benchmarks.controller " + " ".join(sys.argv[1:]))
    print(json.dumps(benchmark.summary(), indent=1))


if __name__ == "__main__":
    main()
