"""Each patch on a real engine: without it the defect shows, with it it does not. One process a case.

Run as a module it is one such process: `python -m tests.integration.test_vllm_patches TARGET FACTS NAME...`
starts an engine with n-gram drafts, takes the named measurements, and writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.tiny_models import write_tiny_target
from rollout.vllm_patches import PATCHES
from rollout.vllm_support import DISABLE_VARIABLE

ROOT = Path(__file__).parents[2]
NAMES = ("expand_kernel", "empty_top_k", "rebind_kernels", "stale_lm_head", "plain_processors")
"""The patches that are measured here."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
PROCESS_TIMEOUT_SECONDS = 240

VOCAB_SIZE = 48
PROMPT = list(range(2, VOCAB_SIZE))
"""Nearly every first token is in the prompt, so n-gram lookup drafts for nearly every second token."""
TEMPERATURE = 0.7
TOP_K = 3
FORCED_TOKEN = 5
NUM_SAMPLES = 1024
MIN_EXPECTED = 5.0
"""Bins of the chi-square test that expect fewer samples are pooled: its usual condition."""
FALSE_ALARM_RATE = 1e-6
"""Below this p-value sampling is called wrong. Without the patch p is 0 to double precision."""
MAX_FP32_LOGPROB_ERROR = 1e-4
"""fp32 kernels in another order differ by 1e-6 to 1e-5 here; a stale lm_head by more than 0.1."""

SHOWS_DEFECT: dict[str, Callable[[Any], bool]] = {
    "expand_kernel": lambda p_value: p_value < FALSE_ALARM_RATE,
    "empty_top_k": lambda found: "max()" in str(found["error"]),
    "rebind_kernels": lambda error: "has no attribute 'get'" in str(error),
    "stale_lm_head": lambda error: error > 100 * MAX_FP32_LOGPROB_ERROR,
    "plain_processors": lambda tokens: FORCED_TOKEN not in tokens,
}
"""What an engine does without the patch, by the measurement of that name."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    return write_tiny_target(path, vocab_size=VOCAB_SIZE, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def patched(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every measurement in one process with all patches."""
    return run(target, tmp_path_factory.mktemp("patched"), *NAMES)


def test_the_plugin_applies_every_patch_and_every_check_passes(patched: dict[str, Any]) -> None:
    expected = [[patch.name, True, None] for patch in PATCHES]
    assert patched["before_engine"] == expected
    assert patched["after_engine"] == expected
    assert patched["second_apply_changes_nothing"]


def test_speculation_samples_from_the_policy(patched: dict[str, Any]) -> None:
    assert patched["expand_kernel"] > FALSE_ALARM_RATE


def test_top_k_keeps_the_top_k(patched: dict[str, Any]) -> None:
    assert patched["empty_top_k"] == {"error": None, "num_outside": 0}


def test_a_second_engine_starts(patched: dict[str, Any]) -> None:
    assert patched["rebind_kernels"] is None


def test_logits_follow_a_policy_update(patched: dict[str, Any]) -> None:
    assert patched["stale_lm_head"] < MAX_FP32_LOGPROB_ERROR


def test_processors_of_requests_without_drafts_are_built(patched: dict[str, Any]) -> None:
    assert patched["plain_processors"] == [FORCED_TOKEN]


@pytest.mark.parametrize("name", NAMES)
def test_without_the_patch_the_check_and_the_engine_show_the_defect(
    target: Path, tmp_path: Path, name: str
) -> None:
    facts = run(target, tmp_path, name, disabled=name)
    for statuses in (facts["before_engine"], facts["after_engine"]):
        assert [status for status in statuses if status[0] != name] == [
            [patch.name, True, None] for patch in PATCHES if patch.name != name
        ]
        (status,) = [status for status in statuses if status[0] == name]
        assert status[1] is False
        assert status[2]
    assert SHOWS_DEFECT[name](facts[name]), facts[name]


def run(target: Path, directory: Path, *names: str, disabled: str = "") -> dict[str, Any]:
    """What a fresh process finds; pytest shows its output when the test fails."""
    facts_path = directory / "facts.json"
    result = subprocess.run(
        [sys.executable, "-m", __name__, str(target), str(facts_path), *names],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, DISABLE_VARIABLE: disabled},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_SECONDS,
    )
    print(result.stdout)
    print(result.stderr, file=sys.stderr)
    assert result.returncode == 0, f"exit status {result.returncode} without {disabled or 'no'} patch"
    return dict(json.loads(facts_path.read_text()))


# From here on: what runs in those processes.


def start_engine(target: Path) -> Any:
    from vllm import LLM

    return LLM(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 26,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )


def generate(llm: Any, num_samples: int, **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(ignore_eos=True, detokenize=False, **sampling)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * num_samples, parameters, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def reference_logits(target: Path, token_ids: list[list[int]]) -> Any:
    """Logits of transformers in double precision, by sequence, position and token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor(token_ids)).logits.double()


def second_token_p_value(llm: Any, target: Path) -> float:
    """Pearson's chi-square test of the second token's counts against its exact marginal.

    p(b) = sum over a of p(a | prompt) p(b | prompt, a); samples are independent.
    """
    import torch

    sequences = [[*PROMPT, token] for token in range(VOCAB_SIZE)]
    probabilities = (reference_logits(target, sequences)[:, -2:] / TEMPERATURE).softmax(-1)
    expected = NUM_SAMPLES * (probabilities[0, 0] @ probabilities[:, 1])
    samples = generate(llm, NUM_SAMPLES, temperature=TEMPERATURE, max_tokens=2)
    second = torch.tensor([sample.token_ids[1] for sample in samples])
    counts = second.bincount(minlength=VOCAB_SIZE).double()
    is_pooled = expected < MIN_EXPECTED
    expected, counts = (
        torch.cat([values[~is_pooled], values[is_pooled].sum()[None]]) for values in (expected, counts)
    )
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def top_k_outcome(llm: Any, target: Path) -> dict[str, Any]:
    """The error of sampling with top_k, or how many tokens were outside the reference's top k."""
    try:
        samples = generate(llm, 8, temperature=TEMPERATURE, top_k=TOP_K, max_tokens=8)
    except (RuntimeError, IndexError) as error:
        return {"error": str(error), "num_outside": None}
    logits = reference_logits(target, [[*PROMPT, *sample.token_ids] for sample in samples])
    best = logits[:, len(PROMPT) - 1 : -1].topk(TOP_K).indices
    outside = [
        token
        for sample, rows in zip(samples, best.tolist(), strict=True)
        for token, row in zip(sample.token_ids, rows, strict=True)
        if token not in row
    ]
    return {"error": None, "num_outside": len(outside)}


def logprob_error_after_update(llm: Any, target: Path) -> float:
    """The largest difference to the reference's logprobs after new weights were loaded."""
    from safetensors.torch import load_file

    new = write_tiny_target(
        target.with_name("updated"), seed=1, vocab_size=VOCAB_SIZE, tie_word_embeddings=True
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.model_runner.reload_weights(weights_iterator=iter(load_file(new / "model.safetensors").items()))
    (sample,) = generate(llm, 1, temperature=0.0, max_tokens=16, logprobs=0)
    token_ids = list(sample.token_ids)
    logprobs = reference_logits(new, [[*PROMPT, *token_ids]])[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return max(
        abs(float(row[token]) - given[token].logprob)
        for token, row, given in zip(token_ids, logprobs, sample.logprobs, strict=True)
    )


def second_engine_error(llm: Any, target: Path) -> str | None:
    """The error of starting an engine after this one, in a process in which drafting has loaded numba."""
    from vllm.distributed import cleanup_dist_env_and_memory

    assert "numba" in sys.modules
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    try:
        generate(start_engine(target), 1, max_tokens=2)
    except AttributeError as error:
        return str(error)
    return None


def first_token_under_logit_bias(llm: Any, target: Path) -> list[int]:
    """The first token, which is never drafted, with the bias put in where our scheduler puts it."""
    from vllm import SamplingParams

    refusal = SamplingParams._validate_spec_decode
    SamplingParams._validate_spec_decode = lambda self, speculative_config: None
    try:
        (sample,) = generate(llm, 1, temperature=0.0, max_tokens=1, logit_bias={FORCED_TOKEN: 100.0})
    finally:
        SamplingParams._validate_spec_decode = refusal
    return list(sample.token_ids)


def second_apply_changes_nothing() -> bool:
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.sample.ops import topk_topp_sampler

    from rollout.vllm_patches import apply_patches

    before = (topk_topp_sampler.apply_top_k_only, layerwise.finalize_layerwise_processing)
    apply_patches()
    return before == (topk_topp_sampler.apply_top_k_only, layerwise.finalize_layerwise_processing)


MEASUREMENTS: dict[str, Callable[[Any, Path], Any]] = {
    "expand_kernel": second_token_p_value,
    "empty_top_k": top_k_outcome,
    "plain_processors": first_token_under_logit_bias,
    "stale_lm_head": logprob_error_after_update,
    "rebind_kernels": second_engine_error,
}
"""By patch; in the order of one process: the last two change the policy and end the engine."""


def main(target: Path, facts_path: Path, names: list[str]) -> None:
    from vllm.plugins import load_general_plugins

    from rollout.vllm_patches import patch_statuses

    load_general_plugins()  # as each process of vLLM does first
    facts: dict[str, Any] = {"before_engine": [status.as_row() for status in patch_statuses()]}
    llm = start_engine(target)
    facts["after_engine"] = [status.as_row() for status in patch_statuses()]
    facts["second_apply_changes_nothing"] = second_apply_changes_nothing()
    facts |= {name: measure(llm, target) for name, measure in MEASUREMENTS.items() if name in names}
    facts_path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
