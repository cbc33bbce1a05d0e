"""Owns the Prometheus metrics: names, labels and what feeds them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from rlspec.audit.drift_report import DriftReport, DriftStatistic
from rlspec.config import InFlightMode
from rlspec.errors import ConfigError
from rlspec.kv_memory import KvMemory
from rlspec.savings import saved_seconds
from rlspec.types import Event, Reason, Rollout, StepFacts

PAUSE_SECONDS_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STEP_SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
RESPONSE_TOKENS_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536)

DRIFT_TEXTS = {
    DriftStatistic.MEAN_ABS: "Mean |trainer - engine| logprob in the window, nats.",
    DriftStatistic.MAX_ABS: "Largest |trainer - engine| logprob in the window, nats.",
    DriftStatistic.EFFECTIVE_SAMPLE_SIZE: "Effective sample size of the window, fraction of its tokens.",
    DriftStatistic.K3_KL: "Estimate of KL(engine || trainer) in the window, nats a token.",
}


class Metrics:
    """One registry of its own, so that several accelerators live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: WSGIServer | None = None
        counter, registry = Counter, self.registry
        self._rollouts = counter(
            "rlspec_rollouts", "Finished responses.", ["finish_reason"], registry=registry
        )
        self._tokens = counter("rlspec_completion_tokens", "Tokens of finished responses.", registry=registry)
        self._steps = counter(
            "rlspec_engine_steps", "Engine steps by why K was chosen.", ["reason"], registry=registry
        )
        self._drafted = counter("rlspec_draft_tokens", "Draft tokens verified.", registry=registry)
        self._accepted = counter(
            "rlspec_accepted_tokens",
            "Draft tokens accepted, by position from 1.",
            ["position"],
            registry=registry,
        )
        self._skipped = counter("rlspec_skipped", "What was skipped or refused.", ["what"], registry=registry)
        self._drift = {
            statistic: Gauge(f"rlspec_drift_{statistic}", text, registry=registry)
            for statistic, text in DRIFT_TEXTS.items()
        }
        self._drift_events = counter(
            "rlspec_drift_events", "Drift thresholds crossed, by figure.", ["what"], registry=registry
        )
        for statistic, gauge in self._drift.items():
            gauge.set(math.nan)  # 0 would read as measured
            self._drift_events.labels(statistic.value)
        self._events = counter(
            "rlspec_events", "What happened in the scheduler.", ["kind"], registry=registry
        )
        self._preemptions = counter(
            "rlspec_preemptions",
            "Requests that lost their KV cache and computed it again.",
            registry=registry,
        )
        self._speculating = counter(
            "rlspec_speculating_steps", "Engine steps that drafted or verified drafts.", registry=registry
        )
        self._saved_seconds = Gauge(
            "rlspec_saved_seconds",
            "Seconds saved so far against the estimate of plain decoding; below 0: lost.",
            registry=registry,
        )
        self._expected_seconds = Gauge(
            "rlspec_expected_step_seconds",
            "Step seconds expected of the K of the last step.",
            registry=registry,
        )
        self._plain_seconds = Gauge(
            "rlspec_plain_step_seconds", "Step seconds expected of K = 0 in the last step.", registry=registry
        )
        self._kv_tokens = Gauge(
            "rlspec_kv_cache_tokens", "Tokens that the KV cache holds.", registry=registry
        )
        self._kv_drafter_share = Gauge(
            "rlspec_kv_cache_drafter_share",
            "Share of the KV cache's bytes in the drafter's layers.",
            registry=registry,
        )
        self._k = Gauge("rlspec_num_draft_tokens", "K of the last step.", registry=registry)
        self._batch = Gauge("rlspec_batch_size", "Requests in the last step.", registry=registry)
        self._waiting = Gauge(
            "rlspec_waiting_requests", "Requests waiting in the last step.", registry=registry
        )
        self._step_seconds = Histogram(
            "rlspec_step_seconds", "Engine step time.", buckets=STEP_SECONDS_BUCKETS, registry=registry
        )
        self._lengths = Histogram(
            "rlspec_response_tokens", "Tokens a response.", buckets=RESPONSE_TOKENS_BUCKETS, registry=registry
        )

        self._policy_version = Gauge(
            "rlspec_policy_version", "Version of the policy's weights.", registry=registry
        )
        self._updates = counter(
            "rlspec_policy_updates",
            "Policy updates, by what was done with running requests.",
            ["in_flight"],
            registry=registry,
        )
        self._pause_seconds = Histogram(
            "rlspec_policy_pause_seconds",
            "Time without engine steps during a policy update.",
            buckets=PAUSE_SECONDS_BUCKETS,
            registry=registry,
        )

    def observe_steps(self, steps: Iterable[StepFacts]) -> None:
        """Count finished engine steps."""
        for facts in steps:
            self._preemptions.inc(facts.num_preempted)
            self._saved_seconds.inc(saved_seconds(facts))
            self._speculating.inc(facts.is_speculating)
            if facts.expected_seconds:
                self._expected_seconds.set(facts.expected_seconds)
                self._plain_seconds.set(facts.plain_seconds)
            self._steps.labels(facts.reason.value).inc()
            self._step_seconds.observe(facts.step_seconds)
            self._k.set(facts.num_draft_tokens)
            self._batch.set(facts.batch_size)
            self._waiting.set(facts.num_waiting)
            self._drafted.inc(sum(facts.num_drafted))
            for position in range(1, max(facts.num_accepted, default=0) + 1):
                num_accepted = sum(accepted >= position for accepted in facts.num_accepted)
                self._accepted.labels(str(position)).inc(num_accepted)
            if facts.reason is Reason.REPLAY_EXHAUSTED:
                self.count_skipped("replay_beyond_trace")

    def observe_rollout(self, rollout: Rollout) -> None:
        """Count one finished response."""
        self._rollouts.labels(rollout.finish_reason.value).inc()
        self._tokens.inc(len(rollout.completion_token_ids))
        self._lengths.observe(len(rollout.completion_token_ids))

    def observe_drift(self, report: DriftReport) -> None:
        """Show the figures of a drift report and count its new crossings."""
        for statistic, gauge in self._drift.items():
            gauge.set(getattr(report, statistic.value))
        for crossing in report.verdict.new_crossings:
            self._drift_events.labels(crossing.statistic.value).inc()

    def set_kv_memory(self, memory: KvMemory) -> None:
        """Say how much the KV cache holds."""
        self._kv_tokens.set(memory.num_tokens)
        self._kv_drafter_share.set(memory.drafter_share)

    def set_policy_version(self, version: int) -> None:
        """Say which weights the engine has."""
        self._policy_version.set(version)

    def observe_policy_update(self, version: int, in_flight: InFlightMode, pause_seconds: float) -> None:
        """Count one policy update that has succeeded."""
        self.set_policy_version(version)
        self._updates.labels(in_flight).inc()
        self._pause_seconds.observe(pause_seconds)

    def count_event(self, event: Event) -> None:
        """Count something that a person should hear of."""
        self._events.labels(event.kind.value).inc()

    def count_skipped(self, what: str, count: int = 1) -> None:
        """Count something that was asked for and not done."""
        self._skipped.labels(what).inc(count)

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def serve(self, port: int) -> int:
        """Serve /metrics on 127.0.0.1; returns the port (a free one for 0).

        Raises:
            ConfigError: The port cannot be had.
        """
        try:
            self._server, _ = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            fix = f"{error.strerror}. Set it to 0 for a free port, or to null."
            field = "observability.prometheus_port"
            raise ConfigError(field, given=port, allowed="a free port", fix=fix) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
