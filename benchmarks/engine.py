"""Measures what rlspec's layer costs on plain decoding, and writes docs/results/engine.json.

Two engines with no drafter in one process, interleaved pairs in alternating order: stock `LLM.generate`
against `Accelerator` (own scheduler, step records, rollouts). Then the demo and the import are timed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rlspec.accelerator import Accelerator
from rlspec.arithmetic import arithmetic_prompts
from rlspec.config_files import load_config
from rlspec.openmp import restart_with_openmp
from rlspec.provenance import write_result
from rlspec.statistics import bootstrap_upper_bound

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "engine.json"
NUM_PROMPTS = 8
NUM_TOKENS = 48
NUM_IMPORTS = 10
IMPORT_SCRIPT = "import time; t = time.perf_counter(); import rlspec; print(time.perf_counter() - t)"


def measure_pairs(num_pairs: int) -> list[tuple[float, float]]:
    """Seconds of (stock, ours) for the same prompts and lengths."""
    from vllm import LLM, SamplingParams

    from rollout.embedded_policy import embedded_policy_path
    from rollout.vllm_args import engine_environment

    config = load_config(None, ["drafter.speculative_config=null", "observability.vllm_log_level=error"])
    accelerator = Accelerator(config)
    with engine_environment(config):
        llm = LLM(model=str(embedded_policy_path()), logprobs_mode="processed_logprobs", **config.vllm_args)
    prompts, rejected = accelerator.encode(arithmetic_prompts(NUM_PROMPTS))
    assert not rejected
    stock_prompts = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
    stock_params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, seed=1)
    sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}

    def stock() -> float:
        started = time.perf_counter()
        llm.generate(stock_prompts, stock_params, use_tqdm=False)
        return time.perf_counter() - started

    def ours() -> float:
        started = time.perf_counter()
        assert len(list(accelerator.stream_encoded(prompts, sampling))) == NUM_PROMPTS
        return time.perf_counter() - started

    stock(), ours()
    pairs = []
    for index in range(num_pairs):
        if random.Random(index).random() < 0.5:
            first = stock()
            pairs.append((first, ours()))
        else:
            second = ours()
            pairs.append((stock(), second))
        print(f"pair {index + 1}: stock {pairs[-1][0]:.2f} s, ours {pairs[-1][1]:.2f} s", flush=True)
    return pairs


def measure_imports() -> list[float]:
    """Seconds of `import rlspec` in fresh interpreters, the first (cold) one left out."""
    run = [sys.executable, "-c", IMPORT_SCRIPT]
    seconds = [
        float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(NUM_IMPORTS + 1)
    ]
    return seconds[1:]


def measure_demo() -> float:
    """Seconds of `make demo` after installation."""
    started = time.perf_counter()
    subprocess.run(["make", "demo"], cwd=RESULT.parents[2], check=True, env={**os.environ})
    return time.perf_counter() - started


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    restart_with_openmp()
    demo_seconds = measure_demo()
    imports = measure_imports()
    pairs = measure_pairs(arguments.pairs)
    ratios = [ours / stock for stock, ours in pairs]
    summary = {
        "engine_seconds_ratio": statistics.median(ratios),
        "engine_seconds_ratio_upper_95": bootstrap_upper_bound(ratios),
        "num_pairs": len(ratios),
        "demo_seconds": demo_seconds,
        "import_seconds": statistics.median(imports),
    }
    raw = {"pairs_stock_ours_seconds": pairs, "import_seconds": imports, "demo_seconds": demo_seconds}
    write_result(arguments.out, summary=summary, raw=raw, command_line="python benchmarks/engine.py")
    print(summary)


if __name__ == "__main__":
    main()
