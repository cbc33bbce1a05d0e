"""Measures what Intel's OpenMP runtime does for a CPU engine, and writes docs/results/openmp.json.

Four cases, interleaved: with and without the library in LD_PRELOAD, alone and beside a process that keeps
one core busy. Each is a process of its own; the figure is the median step time at batch 8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rlspec.accelerator import Accelerator
from rlspec.arithmetic import arithmetic_prompts
from rlspec.config_files import load_config
from rlspec.openmp import LIBRARY, openmp_environment
from rlspec.provenance import write_result

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "openmp.json"
SAMPLING = {"n": 1, "max_tokens": 24, "ignore_eos": True, "seed": 0}


def measure() -> float:
    """Median seconds of a decoding step of the embedded policy at batch 8, in this process."""
    overrides = ["drafter.speculative_config=null", "observability.vllm_log_level=error"]
    with Accelerator(load_config(None, overrides)) as accelerator:
        for _ in range(2):
            accelerator.generate(arithmetic_prompts(8), SAMPLING)
        return statistics.median(facts.step_seconds for facts in accelerator.steps)


def run(preloaded: bool, busy: bool) -> float:
    """The same in a new process, with or without the library, beside a busy one or not."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and not k.startswith("KMP_")}
    if preloaded:
        environment |= openmp_environment(environment)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        command = [sys.executable, __file__, "--measure"]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=500)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measure", action="store_true", help="measure in this process and print the seconds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure()))
        return
    raw: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for busy in (False, True):
            for preloaded in (True, False):
                key = f"{'with' if preloaded else 'without'}_{'busy' if busy else 'alone'}"
                raw.setdefault(key, []).append(run(preloaded, busy))
                print(key, raw[key][-1], flush=True)
    summary = {f"step_seconds_{key}": statistics.median(values) for key, values in raw.items()}
    write_result(
        RESULT, summary=summary, raw={"library": LIBRARY, **raw}, command_line="python benchmarks/openmp.py"
    )


if __name__ == "__main__":
    main()
