"""Measures observe and decide of the controller at batch 256, without an engine."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from rlspec.config import parse_config
from rlspec.policy_specs import configured_spec
from rlspec.speculation.build import build_policy
from rlspec.types import Load, Reason, StepFacts

BATCH_SIZE = 256
NUM_STEPS = 3000
NUM_WARM_UP = 1000


def decide_microseconds() -> dict[str, Any]:
    """Median and 99th percentile of one observe and one decide, while plain and while speculating."""
    found: dict[str, Any] = {}
    for name, acceptance in (("plain", 0.0), ("speculating", 0.8)):
        times = _times(acceptance)
        found[name] = {
            "median": round(statistics.median(times), 1),
            "p99": round(sorted(times)[int(0.99 * len(times))], 1),
        }
        print(name, found[name], flush=True)
    found["median_microseconds"] = max(found[name]["median"] for name in ("plain", "speculating"))
    return found


def _times(acceptance: float) -> list[float]:
    speculative = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5}
    config = parse_config({"policy": {"model": "m"}, "drafter": {"speculative_config": speculative}})
    policy = build_policy(configured_spec(config))
    generator = random.Random(0)
    ids = tuple(f"request-{index}" for index in range(BATCH_SIZE))
    times, k_before, offered = [], 0, (0,) * BATCH_SIZE
    for index in range(NUM_STEPS):
        contexts = tuple(1000 + index + place for place in range(BATCH_SIZE))
        drafted = offered
        accepted = tuple(_accepted(generator, acceptance, count) for count in drafted)
        num_tokens = BATCH_SIZE + sum(drafted)
        load = Load(index, 0, num_tokens, ids, contexts, (500,) * BATCH_SIZE)
        started = time.perf_counter()
        decision = policy.decide(load)
        decided = time.perf_counter()
        k = decision.num_draft_tokens
        caps = decision.caps
        next_offered = (k,) * BATCH_SIZE if caps is None else tuple(min(k, cap) for cap in caps)
        facts = StepFacts(
            step_index=index,
            started_seconds=0.0,
            step_seconds=0.02 + 1e-6 * num_tokens + 1e-3 * k,
            num_scheduled_tokens=num_tokens,
            num_waiting=0,
            num_draft_tokens=k,
            reason=decision.reason if decision.reason else Reason.OFF,
            expected_tokens=decision.expected_tokens,
            expected_seconds=decision.expected_seconds,
            plain_seconds=decision.plain_seconds,
            predicted_seconds=decision.predicted_seconds,
            request_ids=ids,
            num_offered=offered,
            num_drafted=drafted,
            num_accepted=accepted,
            num_emitted=tuple(count + 1 for count in accepted),
            context_lengths=contexts,
        )
        observing = time.perf_counter()
        policy.observe(facts)
        observed = time.perf_counter()
        if index >= NUM_WARM_UP:
            times.append(1e6 * (decided - started + observed - observing))
        k_before, offered = k, next_offered
    assert (k_before > 0) == (acceptance > 0.0), policy.policy.__dict__
    return times


def _accepted(generator: random.Random, acceptance: float, num_drafted: int) -> int:
    count = 0
    while count < num_drafted and generator.random() < acceptance:
        count += 1
    return count
