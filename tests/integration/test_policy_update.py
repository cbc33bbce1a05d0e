"""Policy updates on real engines: every token is exactly its version's, whatever was cached or in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlspec import Accelerator, Config, Prompt
from rlspec.config import InFlightMode, parse_config
from rlspec.errors import EngineError, InputError, ModelError
from rlspec.types import PolicySpan, Rollout
from rollout.reference import ReferenceModel
from rollout.tiny_models import write_tiny_draft_model, write_tiny_target
from tests.integration.conftest import REPEATING_PROMPT, TINY_VLLM_ARGS

MAX_LOGPROB_ERROR = 1e-4
"""fp32 kernels in another order differ by 1e-6 to 1e-5 here; the other policy's logprobs by more than 0.1."""

MAX_MODEL_LEN = TINY_VLLM_ARGS["max_model_len"]
BATCH = 4
"""Requests in a batch; the engine holds two batches."""
CACHED_PROMPT = tuple(2 + (7 * i + i // 11) % 40 for i in range(140))
"""Longer than one block of the KV cache, which is 128 tokens on a CPU."""
NEARLY_FULL_PROMPT = tuple(2 + (5 * i + i // 7) % 40 for i in range(MAX_MODEL_LEN - 6))
"""Ends after 6 tokens for want of context, while its batch goes on."""

NUM_PROMPTS = 12
"""One that ends soon, three beside it, four that wait in vLLM, four that wait here."""
LONG_RUN = {"num_prompts": 24, "max_tokens": 100}
"""Keeps a core that steps on its own busy for about a second, however late an update comes."""

References = Mapping[int, ReferenceModel]
"""By policy version."""


class Policies:
    """Two policies of one shape, and what to start an engine with the first one."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self.paths = [
            write_tiny_target(folder / str(seed), seed=seed, tie_word_embeddings=tied) for seed in range(2)
        ]
        self.references = [ReferenceModel(path) for path in self.paths]
        draft_model = write_tiny_draft_model(folder / "draft", self.paths[0])
        ngram = {"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        self.drafters: dict[str, dict[str, Any] | None] = {
            "none": None,
            "ngram": {"method": "ngram", **ngram},
            "draft_model": {
                "method": "draft_model",
                "model": str(draft_model),
                "num_speculative_tokens": 3,
            },
        }

    def config(self, drafter: str, **policy: Any) -> Config:
        return parse_config(
            {
                "policy": {"model": str(self.paths[0]), **policy},
                "drafter": {"speculative_config": self.drafters[drafter]},
                "speculation": {"policy": "fixed", "remember": False},
                "engine": {"vllm_args": {**TINY_VLLM_ARGS, "max_num_seqs": BATCH}},
                "sampling": {"max_tokens": 48, "ignore_eos": True, "seed": 3},
                "observability": {"vllm_log_level": "error"},
            }
        )

    def of_versions(self, last: int) -> References:
        """Even versions are the first policy, odd ones the second."""
        return {version: self.references[version % 2] for version in range(last + 1)}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policies]:
    return {name: Policies(tmp_path_factory.mktemp(name), tied=name == "tied") for name in ("tied", "untied")}


def check_logprobs(rollouts: Sequence[Rollout], references: References) -> None:
    """Each token has the logprob that its version gives it at its prefix."""
    for rollout in rollouts:
        spans = rollout.policy_spans
        assert sum(span.num_tokens for span in spans) == len(rollout.completion_token_ids)
        assert rollout.policy_version == spans[0].policy_version
        start = 0
        for span in spans:
            own = slice(start, start + span.num_tokens)
            expected = references[span.policy_version].logprobs(
                rollout.prompt_token_ids, rollout.completion_token_ids
            )
            errors = np.abs(np.subtract(rollout.logprobs[own], expected[own]))
            assert errors.max() < MAX_LOGPROB_ERROR, (rollout.group_id, span, errors)
            start += span.num_tokens


def prompts(num_prompts: int = NUM_PROMPTS) -> list[Prompt]:
    """The first ends soon; then three that run beside it, four that wait in vLLM, and the others."""
    others = [(*CACHED_PROMPT[: 130 - i], 2 + i) for i in range(1, num_prompts)]
    return [Prompt(token_ids=ids, group_id=str(i)) for i, ids in enumerate([NEARLY_FULL_PROMPT, *others])]


def update_in_flight(
    accelerator: Accelerator,
    path: Path,
    version: int,
    mode: InFlightMode,
    num_prompts: int = NUM_PROMPTS,
    max_tokens: int = 48,
) -> list[Rollout]:
    """All rollouts of a run whose policy is updated after the first."""
    stream = accelerator.stream(prompts(num_prompts), {"max_tokens": max_tokens})
    first = next(stream)
    accelerator.update_policy(path, version=version, in_flight=mode)
    rollouts = [first, *stream]
    assert sorted(int(rollout.group_id) for rollout in rollouts) == list(range(num_prompts))
    return rollouts


def versions(rollouts: Sequence[Rollout]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(span.policy_version for span in rollout.policy_spans) for rollout in rollouts)


def metric(accelerator: Accelerator, name: str) -> float:
    (line,) = [line for line in accelerator.metrics.text().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_every_token_is_its_versions(policies: dict[str, Policies], head: str, drafter: str) -> None:
    old_new, references = policies[head].paths, policies[head].of_versions(4)
    with Accelerator(policies[head].config(drafter)) as accelerator:
        warm = [accelerator.generate([CACHED_PROMPT])[0] for _ in range(2)]
        assert accelerator.steps[0].num_scheduled_tokens < len(CACHED_PROMPT), "the cache was not used"
        check_logprobs(warm, references)

        accelerator.update_policy(old_new[1], version=1)
        fresh = accelerator.generate([CACHED_PROMPT])
        assert accelerator.steps[0].num_scheduled_tokens == len(CACHED_PROMPT)
        assert fresh[0].policy_spans == (PolicySpan(1, 48),)
        check_logprobs(fresh, references)

        drained = update_in_flight(accelerator, old_new[0], 2, "drain")
        assert versions(drained) == {(1,): 4, (2,): 8}  # the batch; what waited in vLLM starts anew
        aborted = update_in_flight(accelerator, old_new[1], 3, "abort")
        assert versions(aborted) == {(2,): 4, (3,): 8}
        cut = [rollout for rollout in aborted if rollout.finish_reason == "abort"]
        assert len(cut) == 3
        assert all(0 < len(rollout.completion_token_ids) < 48 for rollout in cut)
        kept = update_in_flight(accelerator, old_new[0], 4, "keep")
        assert versions(kept) == {(3,): 1, (3, 4): 3, (4,): 8}
        for rollouts in (drained, aborted, kept):
            check_logprobs(rollouts, references)
            assert (sum(rollout.num_drafted for rollout in rollouts) > 0) == (drafter != "none")
            names = {rollout.drafter_version for rollout in rollouts}
            assert names == {fresh[0].drafter_version}
        assert metric(accelerator, "rlspec_policy_version") == 4
        assert metric(accelerator, 'rlspec_policy_updates_total{in_flight="keep"}') == 1
        assert metric(accelerator, 'rlspec_skipped_total{what="responses_cut_by_policy_update"}') == 3
        assert metric(accelerator, 'rlspec_rollouts_total{finish_reason="abort"}') == 3


def test_an_update_to_the_same_weights_changes_no_token(
    policies: dict[str, Policies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept goes on as if nothing had been; a run can still be closed, and fail, after an update."""
    untied = policies["untied"]
    with Accelerator(untied.config("none", in_flight="keep")) as accelerator:
        expected = accelerator.generate(prompts())
        stream = accelerator.stream(prompts())
        rollouts = [next(stream)]
        accelerator.update_policy(str(untied.paths[0]), version=7)
        rollouts += stream
        by_group = {rollout.group_id: rollout for rollout in rollouts}
        assert versions(rollouts) == {(0,): 1, (0, 7): 3, (7,): 8}
        for rollout in expected:
            assert by_group[rollout.group_id].completion_token_ids == rollout.completion_token_ids
        assert (accelerator.policy_version, accelerator.policy_path) == (7, str(untied.paths[0]))

        stream = accelerator.stream(prompts())
        accelerator.update_policy(untied.paths[1], version=8)  # before the first step
        next(stream)
        accelerator.update_policy(untied.paths[0], version=9)
        stream.close()
        assert accelerator.generate([CACHED_PROMPT])[0].policy_version == 9

        stream = accelerator.stream(prompts())
        next(stream)
        monkeypatch.setattr("rollout.run._require_finite", refuse_response)
        accelerator.update_policy(untied.paths[1], version=10, in_flight="drain")
        monkeypatch.undo()
        with pytest.raises(EngineError, match="nan"):  # where the response would have been yielded
            next(stream)
        assert accelerator.generate([CACHED_PROMPT])[0].policy_version == 10


class Meddling(list):  # type: ignore[type-arg]
    """Prompts that update the policy when the engine takes them, which is the second look at them."""

    accelerator: Accelerator
    path: Path
    num_looks = 0

    def __iter__(self) -> Any:
        self.num_looks += 1
        if self.num_looks > 1:
            self.accelerator.update_policy(self.path, version=1)
        yield from super().__iter__()


def test_refused_updates_leave_the_policy_and_a_failed_one_ends_the_engine(
    policies: dict[str, Policies], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = policies["untied"].paths[1]
    larger = write_tiny_target(tmp_path / "larger", hidden_size=128)
    diverged = write_tiny_target(tmp_path / "diverged")
    tensors = load_file(diverged / "model.safetensors")
    tensors["model.norm.weight"][3] = np.inf
    save_file(tensors, diverged / "model.safetensors")
    truncated = write_tiny_target(tmp_path / "truncated")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[:-100])
    refused: list[tuple[Any, Any, Any, type[Exception]]] = [
        (tmp_path / "nothing", 1, None, ModelError),
        ("org/name", 1, None, ModelError),
        (larger, 1, None, ModelError),
        (policies["tied"].paths[1], 1, None, ModelError),
        (diverged, 1, None, ModelError),
        (truncated, 1, None, ModelError),
        (new, 0, None, InputError),
        (new, -1, None, InputError),
        (new, True, None, InputError),
        (new, "1", None, InputError),
        (new, 1.0, None, InputError),
        (new, 1, "wait", InputError),
        (new, 1, "", InputError),
    ]
    greedy = {"temperature": 0.0}
    with Accelerator(policies["untied"].config("ngram")) as accelerator:
        (before,) = accelerator.generate([REPEATING_PROMPT], greedy)
        stream = accelerator.stream(prompts())
        next(stream)
        for path, version, mode, kind in refused:
            with pytest.raises(kind):
                accelerator.update_policy(path, version=version, in_flight=mode)
        assert versions(list(stream)) == {(0,): 11}
        meddling = Meddling(accelerator.encode([Prompt(token_ids=(1, 2), group_id="g")])[0])
        meddling.accelerator, meddling.path = accelerator, new
        with pytest.raises(EngineError, match="inside an engine step"):
            list(accelerator.stream_encoded(meddling))
        (after,) = accelerator.generate([REPEATING_PROMPT], greedy)
        assert after.completion_token_ids == before.completion_token_ids
        assert np.allclose(after.logprobs, before.logprobs, rtol=0, atol=MAX_LOGPROB_ERROR)
        assert after.policy_spans == (PolicySpan(0, 48),)

        stream = accelerator.stream(prompts())
        next(stream)
        monkeypatch.setattr(
            "vllm.model_executor.model_loader.reload.inplace.finalize_layerwise_reload", fail_to_load
        )
        with pytest.raises(EngineError, match="half-way: RuntimeError: out of luck"):
            accelerator.update_policy(new, version=1, in_flight="abort")
        assert next(stream).finish_reason == "abort"  # drawn before, and still good
        for use in (
            lambda: list(stream),
            lambda: accelerator.generate([REPEATING_PROMPT]),
            lambda: accelerator.update_policy(new, version=2),
        ):
            with pytest.raises(EngineError, match="Make a new Accelerator"):
                use()
    with pytest.raises(EngineError, match="closed"):
        accelerator.update_policy(new, version=2)


def refuse_response(*args: object) -> None:
    raise EngineError("logprobs", given="nan", allowed="finite numbers", fix="None.")


def fail_to_load(*args: object) -> None:
    raise RuntimeError("out of luck")


def check_updates_of_a_running_core(accelerator: Accelerator, paths: Sequence[Path]) -> None:
    """As above with a core in a process of its own, which goes on while nobody asks for its outputs.

    So how far each request has come is chance; the run is long enough for some to be under way.
    """
    references = {version: ReferenceModel(paths[version % 2]) for version in range(4)}
    for version, mode in enumerate(get_args(InFlightMode), start=1):
        rollouts = update_in_flight(accelerator, paths[version % 2], version, mode, **LONG_RUN)
        check_logprobs(rollouts, references)
        found = versions(rollouts)
        assert found.keys() <= {(version - 1,), (version,), (version - 1, version)}
        assert found[version - 1, version] > 0 if mode == "keep" else not found[version - 1, version]
        cut = [rollout for rollout in rollouts if rollout.finish_reason == "abort"]
        assert bool(cut) == (mode == "abort")
        assert {rollout.policy_version for rollout in cut} <= {version - 1}
