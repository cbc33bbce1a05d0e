"""Prometheus metrics: what is counted, and that accelerators do not share a registry."""

import urllib.request
from dataclasses import replace

import pytest

from rlspec.errors import ConfigError
from rlspec.metrics import Metrics
from rlspec.types import Reason
from tests.unit.test_rollout_files import ROLLOUT
from tests.unit.test_types import FACTS


def test_steps_and_rollouts_are_counted() -> None:
    metrics = Metrics()
    metrics.observe_steps([FACTS, replace(FACTS, reason=Reason.REPLAY_EXHAUSTED, num_draft_tokens=0)])
    metrics.observe_rollout(ROLLOUT)
    metrics.count_skipped("bad_prompts", 2)
    metrics.set_policy_version(3)
    metrics.observe_policy_update(4, "keep", 0.3)
    lines = metrics.text().splitlines()
    for expected in (
        'rlspec_engine_steps_total{reason="fixed"} 1.0',
        "rlspec_draft_tokens_total 6.0",
        'rlspec_accepted_tokens_total{position="1"} 2.0',
        'rlspec_accepted_tokens_total{position="2"} 2.0',
        "rlspec_completion_tokens_total 3.0",
        'rlspec_rollouts_total{finish_reason="stop"} 1.0',
        'rlspec_skipped_total{what="replay_beyond_trace"} 1.0',
        'rlspec_skipped_total{what="bad_prompts"} 2.0',
        "rlspec_num_draft_tokens 0.0",
        "rlspec_policy_version 4.0",
        'rlspec_policy_updates_total{in_flight="keep"} 1.0',
        'rlspec_policy_pause_seconds_bucket{le="0.5"} 1.0',
    ):
        assert expected in lines
    assert "rlspec_draft_tokens_total 0.0" in Metrics().text()


def test_served_over_http() -> None:
    metrics = Metrics()
    port = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"rlspec_step_seconds" in answer.read()
    with pytest.raises(ConfigError, match="Address already in use"):
        Metrics().serve(port)
    metrics.close()
    metrics.close()
