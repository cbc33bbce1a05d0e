"""The engine on a tiny random target: order, counts, seeds, replay, early close, greedy identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rlspec import Accelerator, Config, Prompt
from rlspec.audit.greedy_identity import first_differences, judge
from rlspec.errors import ConfigError, EngineError, InputError, UnsupportedSamplingError
from rlspec.types import Reason, Rollout
from rollout.reference import ReferenceModel
from tests.integration.conftest import REPEATING_PROMPT

PROMPTS = [REPEATING_PROMPT, (9, 10, 11, 9, 10, 11, 9), tuple(range(2, 40)), (3,)]
GREEDY = {"temperature": 0.0, "n": 1}
METHODS = ["ngram", "draft_model", "eagle3"]


@pytest.fixture(scope="module")
def accelerator(tiny_config: Callable[..., Config]) -> Iterator[Accelerator]:
    with Accelerator(tiny_config("draft_model", disable_log_stats=False)) as accelerator:
        yield accelerator


@pytest.fixture(scope="module")
def plain_greedy(tiny_config: Callable[..., Config]) -> list[Rollout]:
    with Accelerator(tiny_config("none")) as plain:
        return plain.generate(PROMPTS, GREEDY)


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.completion_token_ids for rollout in rollouts]


def test_groups_keep_their_order_and_carry_their_data(accelerator: Accelerator) -> None:
    prompts = [Prompt(token_ids=(4, 5 + i), group_id=f"g{9 - i}", data={"i": i}) for i in range(6)]
    rollouts = accelerator.generate(prompts, {"n": 3, "max_tokens": 5})
    assert [(r.group_id, r.sample_index) for r in rollouts] == [
        (p.group_id, i) for p in prompts for i in range(3)
    ]
    assert [rollout.data["i"] for rollout in rollouts] == [i for i in range(6) for _ in range(3)]
    for rollout in rollouts:
        assert len(rollout.completion_token_ids) == len(rollout.logprobs) == 5
        assert all(logprob <= 0.0 for logprob in rollout.logprobs)
        assert (rollout.finish_reason, rollout.text) == ("length", None)
        assert (rollout.policy_version, rollout.drafter_version[:12]) == (0, "draft_model:")
        assert rollout.seconds > 0.0


def test_steps_account_for_every_token(accelerator: Accelerator) -> None:
    rollouts = accelerator.generate(PROMPTS, {"n": 4, "seed": 1})
    emitted: Counter[str] = Counter()
    for facts in accelerator.steps:
        rows = zip(facts.num_drafted, facts.num_accepted, facts.num_emitted, strict=True)
        for drafted, accepted, num_emitted in rows:
            assert 0 <= accepted <= drafted <= 3
            assert num_emitted <= accepted + 1
        emitted.update(dict(zip(facts.request_ids, facts.num_emitted, strict=True)))
    assert sorted(emitted.values()) == [24] * 16 == sorted(len(r.completion_token_ids) for r in rollouts)
    assert sum(sum(facts.num_drafted) for facts in accelerator.steps) == sum(r.num_drafted for r in rollouts)
    assert sum(sum(facts.num_accepted) for facts in accelerator.steps) == sum(
        r.num_accepted for r in rollouts
    )
    assert [facts.step_index for facts in accelerator.steps] == list(range(len(accelerator.steps)))
    assert all(facts.step_seconds > 0 for facts in accelerator.steps)


def test_counts_equal_vllms_own(accelerator: Accelerator) -> None:
    def counters() -> dict[str, int]:
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        metrics = accelerator._engine._llm.get_metrics()
        return {metric.name: metric.value for metric in metrics if metric.name in names}

    before = counters()
    rollouts = accelerator.generate(PROMPTS, {"n": 2})
    after = counters()
    drafted, accepted = (after[name] - before[name] for name in sorted(after, reverse=False)[::-1])
    assert drafted == sum(rollout.num_drafted for rollout in rollouts) > 0
    assert accepted == sum(rollout.num_accepted for rollout in rollouts) > 0


def test_seeds_reproduce_and_differ_by_sample(accelerator: Accelerator) -> None:
    one, two = (accelerator.generate(PROMPTS, {"n": 3, "seed": 5}) for _ in range(2))
    assert tokens(one) == tokens(two)
    assert [rollout.seed for rollout in one] == [rollout.seed for rollout in two]
    assert len({rollout.seed for rollout in one}) == len(one)
    assert len(set(tokens(one))) == len(one)
    assert tokens(accelerator.generate(PROMPTS, {"n": 3, "seed": 6})) != tokens(one)


def test_replayed_k_trace_reproduces(accelerator: Accelerator) -> None:
    k_trace = [index % 4 for index in range(200)]
    one = accelerator.generate(PROMPTS, {"n": 2, "seed": 5}, k_trace=k_trace)
    recorded = accelerator.k_trace
    assert recorded == k_trace[: len(recorded)]
    assert {facts.reason for facts in accelerator.steps} == {Reason.REPLAYED}
    assert tokens(accelerator.generate(PROMPTS, {"n": 2, "seed": 5}, k_trace=recorded)) == tokens(one)
    assert accelerator.k_trace == recorded


def test_replay_beyond_its_trace_is_counted(accelerator: Accelerator) -> None:
    accelerator.generate([REPEATING_PROMPT], {"n": 1}, k_trace=[2, 2])
    assert accelerator.steps[-1].reason is Reason.REPLAY_EXHAUSTED
    assert 'rlspec_skipped_total{what="replay_beyond_trace"}' in accelerator.metrics.text()


def test_k_bounds_what_is_verified_one_step_later(accelerator: Accelerator) -> None:
    accelerator.generate([REPEATING_PROMPT], {"n": 1}, k_trace=[1, 3, 0, 2] * 20)
    for before, after in zip(accelerator.steps, accelerator.steps[1:], strict=False):
        assert after.num_drafted[0] <= before.num_draft_tokens


def test_closing_a_stream_early_aborts_the_rest(accelerator: Accelerator) -> None:
    stream = accelerator.stream(PROMPTS, {"n": 4, "max_tokens": 100})
    next(stream)
    steps = accelerator.steps
    with pytest.raises(EngineError, match="one run at a time"):
        accelerator.generate([REPEATING_PROMPT])
    assert accelerator.steps is steps  # a refused call takes nothing away
    stream.close()
    assert len(accelerator.generate([REPEATING_PROMPT], {"n": 2})) == 2
    assert "aborted_requests" in accelerator.metrics.text()


def test_more_prompts_than_the_engine_holds(accelerator: Accelerator) -> None:
    prompts = [(3, 4 + i % 40) for i in range(50)]
    rollouts = accelerator.generate(prompts, {"n": 1, "max_tokens": 4})
    assert [rollout.prompt_token_ids for rollout in rollouts] == prompts


@pytest.mark.parametrize("method", METHODS)
def test_speculation_changes_no_greedy_token(
    method: str, tiny_config: Callable[..., Config], plain_greedy: list[Rollout]
) -> None:
    with Accelerator(tiny_config(method)) as speculating:
        rollouts = speculating.generate(PROMPTS, GREEDY)
        assert sum(rollout.num_drafted for rollout in rollouts) > 0
        reference = ReferenceModel(speculating.policy_path)
    differences = first_differences(plain_greedy, rollouts)
    verdict = judge(
        len(PROMPTS), [reference.top_two_gap(difference.prefix_token_ids) for difference in differences]
    )
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("prompts", "sampling", "kind", "field"),
    [
        ([()], {}, InputError, "prompts[0]: prompt_token_ids"),
        ([(1, 48)], {}, InputError, "prompt of group 0"),
        ([tuple([1] * 256)], {}, InputError, "prompt of group 0"),
        (["text"], {}, InputError, "prompt of group 0"),
        ([(1, 2)], {"min_p": 0.1}, UnsupportedSamplingError, "sampling.min_p"),
        ([(1, 2)], {"logit_bias": {3: 1.0}}, UnsupportedSamplingError, "sampling.logit_bias"),
        ([(1, 2)], {"temperature": 0.0, "n": 2}, InputError, "sampling.n"),
        ([(1, 2)], {"temperature": 1e-6}, InputError, "sampling.temperature"),
        ([(1, 2)], [1], ConfigError, "sampling"),
        ([(1, 2)], {"top_p": 2.0}, InputError, "sampling"),
        ([(1, 2)], {"allowed_token_ids": [48]}, InputError, "sampling.allowed_token_ids"),
        ([(1, 2)], {"allowed_token_ids": []}, InputError, "sampling.allowed_token_ids"),
        ([(1, 2)], {"stop_token_ids": [3, -1]}, InputError, "sampling.stop_token_ids"),
        ([(1, 2)], {"min_tokens": 2}, UnsupportedSamplingError, "sampling.min_tokens"),
        ([(1, 2)], {"structured_outputs": {"regex": "a"}}, InputError, "sampling.structured_outputs"),
        ([Prompt(token_ids=(1, 2), sampling={"n": 2})], {}, InputError, "prompts[0]: sampling.n"),
        ([Prompt(token_ids=(1, 2), sampling={"topp": 1})], {}, InputError, "prompts[0]: sampling.topp"),
        (
            [(1, 2), Prompt(token_ids=(1, 2), sampling={"min_p": 0.1})],
            {},
            UnsupportedSamplingError,
            "prompt of group 1: sampling.min_p",
        ),
        ([(1, 2)], {"temprature": 1.0}, ConfigError, "sampling.temprature"),
        ([(1, 2)], {"repetition_penalty": -1.0}, InputError, "sampling"),
        ([(1, 2)], {"top_k": -7}, InputError, "sampling"),
        ([(1, 2)], {"stop": ["x"]}, InputError, "sampling.stop"),
    ],
)
def test_bad_input_is_refused_and_the_engine_goes_on(
    accelerator: Accelerator, prompts: list[object], sampling: dict[str, object], kind: type, field: str
) -> None:
    with pytest.raises(kind) as caught:
        accelerator.generate(prompts, sampling)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert caught.value.fix
    assert len(accelerator.generate([REPEATING_PROMPT], {"n": 1, "max_tokens": 2})) == 1


def test_k_trace_that_the_drafter_cannot_follow_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(InputError, match="0 to 3"):
        accelerator.generate([REPEATING_PROMPT], k_trace=[4])
    for k_trace in (iter([1]), [True], 5):
        with pytest.raises(InputError, match="k_trace"):
            accelerator.generate([REPEATING_PROMPT], k_trace=k_trace)  # type: ignore[arg-type]


def test_integer_group_ids(accelerator: Accelerator) -> None:
    prompt = Prompt(token_ids=(5, 6), group_id=7)  # type: ignore[arg-type]
    assert [rollout.group_id for rollout in accelerator.generate([prompt], {"n": 1, "max_tokens": 2})] == [
        "7"
    ]


def test_seed_with_chunked_prefill_on_a_cpu_is_refused(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("none", enable_chunked_prefill=True, max_num_batched_tokens=64)
    with Accelerator(config) as chunking:
        with pytest.raises(InputError, match="enable_chunked_prefill"):
            chunking.generate([tuple(range(2, 40)) * 3], {"seed": 1})
        assert len(chunking.generate([tuple(range(2, 40)) * 3], {"max_tokens": 2})) == 1


def test_closed_accelerator_says_so(tiny_config: Callable[..., Config]) -> None:
    with Accelerator(tiny_config("none")) as closed:
        assert closed.generate([], {"n": 1}) == []
        stream = closed.stream([REPEATING_PROMPT], {"n": 4})
        next(stream)
    assert list(stream) == []  # closing the accelerator ended it
    closed.close()
    with pytest.raises(EngineError, match="closed"):
        closed.generate([REPEATING_PROMPT])


def test_no_memory_for_the_kv_cache_is_said(tiny_config: Callable[..., Config]) -> None:
    with pytest.raises(EngineError) as caught:
        Accelerator(tiny_config("none", kv_cache_memory_bytes=1024))
    assert caught.value.field == "engine.vllm_args.kv_cache_memory_bytes"
    assert "max_model_len" in caught.value.fix
