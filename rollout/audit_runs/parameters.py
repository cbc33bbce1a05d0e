"""Owns the sampling-parameters check: each one is honoured exactly, or refused before anything is drawn.

All accepted parameters run in one batch, each request with its own, so that one leaking into another shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams

from rlspec.audit.exact import probabilities
from rlspec.audit.greedy_identity import TIE_TOLERANCE
from rlspec.audit.parameters import Honoured, greedy_honoured
from rlspec.audit.verdicts import Check, CheckResult, Verdict, decided
from rlspec.config import with_sampling
from rlspec.config_sampling import SamplingConfig
from rlspec.errors import ConfigError, InputError
from rlspec.types import FinishReason, Rollout
from rollout.audit_runs.bench import AuditEngine, Bench
from rollout.vllm_args import engine_arguments

NUM_TOKENS = 24
NUM_SEEDED = 4
CHOICES = ["abc", "bcd"]
"""Of the structured-output case; every tokenizer can write them."""

NAMES_OF_OURS = {"n", "seed"}
"""Parameters that rlspec handles itself: every sample is a request of its own."""

NOT_SAMPLING = {
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "temperature",
    "top_p",
    "top_k",
}
"""Accepted parameters without a case here: they concern text only, or have checks of their own."""

Verify = Callable[[Bench, Rollout, Mapping[str, Any]], Honoured]


@dataclass(frozen=True, slots=True)
class Case:
    """One parameter: how it is set for a prompt, and what each response must look like."""

    name: str
    sampling: Mapping[str, Any]
    verify: Verify


def run(bench: Bench, engine: AuditEngine) -> Iterator[CheckResult]:
    """Every parameter on one engine."""
    accepted: list[Case] = []
    for case in _cases(bench, engine):
        try:
            engine.prepare(case.sampling)
        except (InputError, ConfigError) as error:
            yield _result(engine, case.name, Verdict.REFUSED, "refused", str(error))
        else:
            accepted.append(case)
    yield from _honoured(bench, engine, accepted)
    yield _seeds(bench, engine)
    yield _samples_differ(bench, engine)
    yield _logits_processors(engine)
    yield from _unknown(engine)


def _cases(bench: Bench, engine: AuditEngine) -> list[Case]:
    """Parameters with values that matter to this policy's greedy responses."""
    greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    plain = bench.greedy_response(NUM_TOKENS)
    early, late = plain[2], plain[5]
    allowed = sorted({*plain, *(token + 1 for token in plain[1:])} - {plain[0], bench.reference.vocab_size})
    bias = dict.fromkeys(plain[:3], -5.0)
    cases = [
        Case("presence_penalty", {**greedy, "presence_penalty": 1.5}, _follows_greedy),
        Case("frequency_penalty", {**greedy, "frequency_penalty": 0.7}, _follows_greedy),
        Case("repetition_penalty", {**greedy, "repetition_penalty": 1.4}, _follows_greedy),
        Case("allowed_token_ids", {**greedy, "allowed_token_ids": allowed}, _follows_greedy),
        Case("logit_bias", {**greedy, "logit_bias": bias}, _follows_greedy),
        Case(
            "min_tokens", {**greedy, "stop_token_ids": [early, late], "min_tokens": 8}, _stops_after_minimum
        ),
        Case("stop_token_ids", {**greedy, "stop_token_ids": [late]}, _stops_after_minimum),
        Case("max_tokens", {**greedy, "max_tokens": 7}, _has_length),
        Case(
            "ignore_eos", {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": False}, _stops_at_eos
        ),
        Case("min_p", {"temperature": 1.0, "max_tokens": NUM_TOKENS, "min_p": 0.2}, _keeps_min_p),
    ]
    if engine.tokenizer is not None:
        one, two, three = _words(engine.tokenizer, plain)
        stop = {**greedy, "detokenize": True, "stop": [one + two]}
        choice = {
            **greedy,
            "detokenize": True,
            "ignore_eos": False,
            "structured_outputs": {"choice": CHOICES},
        }
        cases += [
            Case("stop", stop, _stops_at_string),
            Case("bad_words", {**greedy, "bad_words": [one, two + three]}, _avoids_words(engine)),
            Case("structured_outputs", choice, _is_a_choice),
        ]
    return cases


def _words(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, str, str]:
    """Texts of three tokens of a response that are still tokens when they are encoded on their own."""
    texts = [tokenizer.decode([token]) for token in token_ids[2:]]
    words = [text for text in texts if text.strip() and tokenizer.encode(text, add_special_tokens=False)]
    one, two, three = (words * 3)[:3]
    return one, two, three


def _honoured(bench: Bench, engine: AuditEngine, cases: list[Case]) -> Iterator[CheckResult]:
    """Draw all cases in one batch, every prompt with each, and look at every response."""
    prompts = bench.subject.prompts
    mixed = [(prompt, case.sampling) for prompt in prompts for case in cases]
    rollouts = engine.draw_mixed(mixed)
    for index, case in enumerate(cases):
        mine = rollouts[index :: len(cases)]
        found = sum((case.verify(bench, rollout, case.sampling) for rollout in mine), Honoured())
        num_drafted = sum(rollout.num_drafted for rollout in mine)
        proves_nothing = not found.num_decisive and not found.num_wrong
        yield _result(
            engine,
            case.name,
            Verdict.SKIPPED if proves_nothing else decided(not found.num_wrong),
            f"{found.num_wrong} of {found.num_tokens} tokens wrong",
            f"{found.num_decisive} tokens at which it matters, {num_drafted} draft tokens verified"
            f"{': this policy gives it nothing to change' if proves_nothing else ''}",
        )


def _follows_greedy(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    return _follows(bench, rollout, sampling, ())


def _avoids_words(engine: AuditEngine) -> Verify:
    def verify(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
        params = SamplingParams(bad_words=list(sampling["bad_words"]))
        params.update_from_tokenizer(engine.tokenizer)
        return _follows(bench, rollout, sampling, params.bad_words_token_ids or ())

    return verify


def _follows(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any], words: Any) -> Honoured:
    response = rollout.completion_token_ids
    logits = bench.reference.completion_logits(rollout.prompt_token_ids, response)
    return greedy_honoured(
        logits, rollout.prompt_token_ids, response, sampling, bad_word_ids=words, tolerance=TIE_TOLERANCE
    )


def _stops_after_minimum(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    """Stop tokens are masked below `min_tokens`, end the response from there on, and nothing follows them."""
    masked = [*sampling["stop_token_ids"], *bench.reference.eos_token_ids]  # vLLM counts eos in, always
    found = _follows_greedy(bench, rollout, {**sampling, "stop_token_ids": masked})
    response, stops = rollout.completion_token_ids, set(sampling["stop_token_ids"])
    minimum = sampling.get("min_tokens", 0)
    first = next((i for i, token in enumerate(response) if token in stops and i >= minimum), None)
    length = NUM_TOKENS if first is None else first + 1
    is_stopped = rollout.finish_reason is FinishReason.STOP
    is_wrong = len(response) != length or is_stopped != (first is not None)
    return found + Honoured(0, int(is_stopped), int(is_wrong))


def _has_length(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    num_tokens = len(rollout.completion_token_ids)
    return Honoured(num_tokens, 1, int(num_tokens != sampling["max_tokens"]))


def _stops_at_eos(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    response = rollout.completion_token_ids
    eos = bench.reference.eos_token_ids
    first = next((i + 1 for i, token in enumerate(response) if token in eos), NUM_TOKENS)
    return Honoured(len(response), int(first < NUM_TOKENS), int(len(response) != first))


def _keeps_min_p(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    response = rollout.completion_token_ids
    logits = bench.reference.completion_logits(rollout.prompt_token_ids, response)
    found = probabilities(logits, temperature=sampling["temperature"])
    limits = sampling["min_p"] * found.max(axis=-1) * (1.0 - TIE_TOLERANCE)
    num_wrong = sum(
        bool(row[token] < limit) for row, token, limit in zip(found, response, limits, strict=True)
    )
    return Honoured(len(response), len(response), num_wrong)


def _stops_at_string(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    found = _follows_greedy(bench, rollout, {})
    is_stopped = rollout.finish_reason is FinishReason.STOP
    is_wrong = sampling["stop"][0] in (rollout.text or "") or (
        is_stopped != (rollout.stop_reason is not None)
    )
    return found + Honoured(0, int(is_stopped), int(is_wrong))


def _is_a_choice(bench: Bench, rollout: Rollout, sampling: Mapping[str, Any]) -> Honoured:
    num_tokens = len(rollout.completion_token_ids)
    return Honoured(num_tokens, num_tokens, 0 if rollout.text in CHOICES else num_tokens)


def _seeds(bench: Bench, engine: AuditEngine) -> CheckResult:
    """The same seeds give the same tokens, alone and in company; other seeds give others."""
    sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "seed": bench.seed}
    prompts = bench.subject.prompts
    try:
        engine.prepare(sampling)
    except InputError as error:
        return _result(engine, "seed", Verdict.REFUSED, "refused", str(error))
    alone = engine.draw(prompts[:1], sampling, num_samples=NUM_SEEDED).token_ids
    in_company = engine.draw(prompts, sampling, num_samples=NUM_SEEDED).token_ids[:NUM_SEEDED]
    other = engine.draw(prompts[:1], {**sampling, "seed": bench.seed + 1}, num_samples=NUM_SEEDED).token_ids
    num_changed = sum(a != b for a, b in zip(alone, in_company, strict=True))
    num_same = sum(a == b for a, b in zip(alone, other, strict=True))
    statistic = f"{num_changed} of {NUM_SEEDED} changed with the same seed, {num_same} the same with another"
    passed = not num_changed and num_same < NUM_SEEDED
    return _result(engine, "seed", decided(passed), statistic, f"{NUM_TOKENS} tokens each, K fixed")


def _samples_differ(bench: Bench, engine: AuditEngine) -> CheckResult:
    """The samples of a group are drawn independently."""
    sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS}
    drawn = engine.draw(bench.subject.prompts[:1], sampling, num_samples=8).token_ids
    statistic = f"{len(set(drawn))} of {len(drawn)} samples differ"
    return _result(engine, "n", decided(len(set(drawn)) > 1), statistic, f"{NUM_TOKENS} tokens each")


def _logits_processors(engine: AuditEngine) -> CheckResult:
    """Custom logits processors are an engine argument: refused with a drafter."""
    arguments = {**engine.config.engine.vllm_args, "logits_processors": ["some.module:Processor"]}
    section = engine.config.engine.model_copy(update={"vllm_args": arguments})
    config = engine.config.model_copy(update={"engine": section})
    try:
        engine_arguments(config, config.policy.model)
    except InputError as error:
        return _result(engine, "logits_processors", Verdict.REFUSED, "refused", str(error))
    is_plain = engine.drafter.speculative_config is None
    detail = "vLLM's own in plain decoding; not run here" if is_plain else "accepted with a drafter"
    verdict = Verdict.SKIPPED if is_plain else Verdict.FAILED
    return _result(engine, "logits_processors", verdict, "accepted", detail)


def _unknown(engine: AuditEngine) -> Iterator[CheckResult]:
    """Every other parameter of the installed vLLM is refused by name."""
    ours = set(SamplingConfig.model_fields)
    others = [
        name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in ours
    ]
    refused = []
    for name in others:
        try:
            with_sampling(engine.config, {name: 1})
        except ConfigError:
            refused.append(name)
    accepted = sorted(set(others) - set(refused))
    verdict = Verdict.FAILED if accepted else Verdict.REFUSED
    yield _result(
        engine,
        f"{len(others)} others",
        verdict,
        f"{len(accepted)} accepted",
        f"refused: {', '.join(refused)}",
    )


def _result(engine: AuditEngine, name: str, verdict: Verdict, statistic: str, detail: str) -> CheckResult:
    return CheckResult(
        check=Check.SAMPLING_PARAMETERS,
        case=f"{engine.drafter.name}; {name}",
        verdict=verdict,
        statistic=statistic,
        threshold="honoured exactly, or refused",
        false_alarm_rate=0.0,
        detail=detail,
    )
