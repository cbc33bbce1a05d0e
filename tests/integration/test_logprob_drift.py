"""The engine's logprobs beside transformers': the same weights agree, other weights are an event."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspec import Accelerator, Config
from rlspec.errors import InputError
from rollout.reference import ReferenceModel
from rollout.tiny_models import write_tiny_target
from tests.integration.conftest import REPEATING_PROMPT

MAX_FP32_DIFFERENCE = 1e-4
"""fp32 sums over a few hundred terms in another order differ by about 1e-5; ten times that."""

TEMPERATURE = 0.8


def test_same_weights_agree_and_other_weights_are_an_event(
    tiny_config: Callable[..., Config],
    target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("rlspec"), "propagate", True)  # a command line test may end it
    right, wrong = ReferenceModel(target), ReferenceModel(write_tiny_target(tmp_path, seed=1))
    prompts = [REPEATING_PROMPT, (9, 10, 11), tuple(range(2, 30))]
    with (
        Accelerator(tiny_config("ngram")) as accelerator,
        caplog.at_level(logging.WARNING, logger="rlspec.accelerator"),
    ):
        rollouts = accelerator.generate(prompts, {"n": 2, "seed": 3, "temperature": TEMPERATURE})

        def warnings() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.name == "rlspec.accelerator"]

        def trained(model: ReferenceModel) -> list[list[float]]:
            return [
                model.logprobs(one.prompt_token_ids, one.completion_token_ids, TEMPERATURE)
                for one in rollouts
            ]

        report = accelerator.observe_trainer_logprobs(rollouts, trained(right), trainer_version=0)
        assert report.verdict.passed
        assert report.max_abs < MAX_FP32_DIFFERENCE
        assert (report.num_other_version_tokens, report.num_rollouts) == (0, 6)
        with pytest.raises(InputError, match="2 entries"):
            accelerator.observe_trainer_logprobs(rollouts, trained(right)[:2])
        assert not warnings()

        for _ in range(2):  # the second call is no second event
            report = accelerator.observe_trainer_logprobs(rollouts, trained(wrong), trainer_version=0)
        assert {"mean_abs", "k3_kl", "effective_sample_size"} <= {
            crossing.statistic.value for crossing in report.verdict.crossings
        }
        assert report.num_rollouts == 18
        assert ["LOGPROB DRIFT" in record.getMessage() for record in warnings()] == [True]
        assert 'rlspec_drift_events_total{what="k3_kl"} 1.0' in accelerator.metrics.text()
