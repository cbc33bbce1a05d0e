"""`rlspec rollout` as a user runs it: files in and out, bad lines, SIGKILL half-way, resume, replay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlspec.config import Config
from rlspec.openmp import openmp_environment
from rlspec.rollout_files import read_rollouts
from rlspec.types import Rollout

NUM_PROMPTS = 12
GROUP_SIZE = 2
START_TIMEOUT_SECONDS = 240


@pytest.fixture
def config_file(tmp_path: Path, tiny_config: Callable[..., Config]) -> Path:
    sampling = {"n": GROUP_SIZE, "seed": 3, "max_tokens": 200}
    config = tiny_config("ngram", sampling=sampling, max_num_seqs=2)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    lines = [{"prompt_token_ids": [2 + i, 3, 4, 2 + i, 3], "answer": i} for i in range(NUM_PROMPTS)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlspec.cli", *map(str, arguments)]
    environment = {**os.environ, **openmp_environment(os.environ)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*arguments: object) -> tuple[int, str]:
    process = start(*arguments)
    output, _ = process.communicate(timeout=START_TIMEOUT_SECONDS)
    return process.returncode, output


def tokens(rollouts: list[Rollout]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(rollout.group_id, rollout.sample_index): rollout.completion_token_ids for rollout in rollouts}


def test_killed_run_is_resumed_without_loss_or_repetition(
    tmp_path: Path, config_file: Path, prompts_file: Path
) -> None:
    out = tmp_path / "out" / "rollouts.jsonl"
    job = ("rollout", "--config", config_file, "--prompts", prompts_file, "--out", out)
    process = start(*job)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not (out.exists() and out.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_rollouts(out)
    assert 0 < len(before) < NUM_PROMPTS * GROUP_SIZE

    code, output = run(*job)
    assert (code, "--resume" in output) == (2, True), output
    code, output = run(*job, "--resume")
    assert code == 0, output
    after = read_rollouts(out)
    whole = len(before) - len(before) % GROUP_SIZE
    assert after[:whole] == before[:whole]
    assert [rollout.sample_index for rollout in after] == list(range(GROUP_SIZE)) * NUM_PROMPTS
    assert sorted({rollout.group_id for rollout in after}, key=int) == [
        str(i + 1) for i in range(NUM_PROMPTS)
    ]
    assert all(rollout.data["answer"] == int(rollout.group_id) - 1 for rollout in after)
    assert "finished by an earlier run" in output

    code, output = run(*job, "--resume", "--set", "sampling.temperature=0.5")
    assert code == 2
    assert "sampling.temperature" in output
    assert read_rollouts(out) == after


def test_bad_lines_replay_and_what_is_written(tmp_path: Path, config_file: Path, prompts_file: Path) -> None:
    lines = prompts_file.read_text().splitlines()[:4]
    lines[1] = "{not json"
    lines.insert(2, json.dumps({"prompt_token_ids": [1] * 500}))
    prompts_file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "a.jsonl"
    job = ("rollout", "--config", config_file, "--prompts", prompts_file)

    code, output = run(*job, "--out", out)
    assert code == 2
    assert "line 2" in output
    assert not out.exists()

    code, output = run(*job, "--out", out, "--skip-bad")
    assert code == 0, output
    rollouts = read_rollouts(out)
    assert [rollout.group_id for rollout in rollouts] == ["1", "1", "4", "4", "5", "5"]
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert "one JSON object" in rejected[0]["reason"]
    assert "at most 255" in rejected[1]["reason"]
    assert rejected[0]["line"] == "{not json"
    line = json.loads(out.read_text().splitlines()[0])
    promised = "prompt_token_ids completion_token_ids logprobs finish_reason group_id policy_version"
    assert {*promised.split(), "drafter_version", "num_drafted", "num_accepted"} <= set(line)
    meta = json.loads((tmp_path / "a.meta.json").read_text())
    assert meta["config"]["sampling"]["seed"] == 3
    assert set(meta["k_trace"]) == {3}
    assert "<svg" in (tmp_path / "a.report.html").read_text()
    assert "rlspec_rollouts_total" in (tmp_path / "a.prom").read_text()
    assert 'rlspec_skipped_total{what="bad_prompts"} 2.0' in (tmp_path / "a.prom").read_text()

    code, output = run(
        *job, "--out", tmp_path / "b.jsonl", "--skip-bad", "--k-trace", tmp_path / "a.meta.json"
    )
    assert code == 0, output
    assert tokens(read_rollouts(tmp_path / "b.jsonl")) == tokens(rollouts)
