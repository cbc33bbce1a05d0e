"""Owns what a comparison of engine and trainer logprobs found, and what it says to a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

RAW_LOGPROBS = "raw_logprobs"


class DriftStatistic(StrEnum):
    """A figure with a threshold, by its name in `DriftReport`."""

    MEAN_ABS = "mean_abs"
    MAX_ABS = "max_abs"
    EFFECTIVE_SAMPLE_SIZE = "effective_sample_size"
    K3_KL = "k3_kl"


ADVICE: Mapping[DriftStatistic, str] = {
    DriftStatistic.MEAN_ABS: "Most tokens are off. Likely the trainer does not divide its logits by the "
    "sampling temperature, or does not apply the engine's top_k and top_p; or lm_head was not updated with "
    "the embeddings it is tied to; or the engine serves weights of another version. Compare one rollout at "
    "temperature 1 without top_k and top_p: if it fits, it was the sampling; if not, compare the weights.",
    DriftStatistic.MAX_ABS: "Single tokens are off. Likely a prefix cache that outlived an update of the "
    "weights, a rollout of an older version, or tokens shifted by one against their logprobs. Look at the "
    "worst token's rollout: is all of it off, was its prompt seen before the update? Reset the prefix cache "
    "with every update.",
    DriftStatistic.EFFECTIVE_SAMPLE_SIZE: "Few tokens carry most of the importance weight, so the gradient "
    "is noisier than the batch is large. Likely rollouts that are too many updates old, or another "
    "temperature in the trainer. Draw fresher rollouts; truncate weights only once the cause is known.",
    DriftStatistic.K3_KL: "The engine samples from another distribution than the trainer computes. Likely a "
    "temperature or logprobs_mode mismatch, a version that is off by one, a tied lm_head, or bf16 kernels "
    "(lm_head most of all). Check versions first, then temperature, then run both sides in fp32.",
}
"""Likely causes and what to do, by the figure that crossed its threshold."""


@dataclass(frozen=True, slots=True)
class WorstToken:
    """The token whose two logprobs differ most.

    Attributes:
        group_id: The group of its rollout.
        sample_index: The rollout's position in the group.
        position: Index in the completion, from 0.
        policy_version: Version of the policy that sampled it.
        engine_logprob: Of the rollout.
        trainer_logprob: Of the trainer.
    """

    group_id: str
    sample_index: int
    position: int
    policy_version: int
    engine_logprob: float
    trainer_logprob: float

    def __str__(self) -> str:
        return (
            f"group {self.group_id!r}, sample {self.sample_index}, token {self.position}, version "
            f"{self.policy_version}: engine {self.engine_logprob:.6g}, trainer {self.trainer_logprob:.6g}"
        )


@dataclass(frozen=True, slots=True)
class Crossing:
    """One figure beyond its threshold.

    Attributes:
        statistic: The figure.
        value: What it is.
        threshold: What the configuration allows.
        is_new: False while it stays crossed, from one call to the next.
    """

    statistic: DriftStatistic
    value: float
    threshold: float
    is_new: bool

    @property
    def advice(self) -> str:
        """Likely causes and what to do."""
        return ADVICE[self.statistic]

    def __str__(self) -> str:
        word = "below" if self.statistic is DriftStatistic.EFFECTIVE_SAMPLE_SIZE else "above"
        return f"{self.statistic} {self.value:.4g} is {word} {self.threshold:g}. {self.advice}"


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """Which thresholds were crossed, and what is known about all of them together.

    Attributes:
        crossings: The figures beyond their thresholds.
        only_other_versions: The crossings vanish without the tokens whose version differs from the
            trainer's (or no other tokens are there).
        notes: Sentences on versions and logprobs_mode; may be there without a crossing.
    """

    crossings: tuple[Crossing, ...]
    only_other_versions: bool
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every figure is within its threshold."""
        return not self.crossings

    @property
    def new_crossings(self) -> tuple[Crossing, ...]:
        """Those that the report before did not have."""
        return tuple(crossing for crossing in self.crossings if crossing.is_new)

    def __str__(self) -> str:
        if self.passed:
            return "\n  ".join(("logprob drift within its thresholds.", *self.notes))
        return "\n  ".join(("LOGPROB DRIFT", *map(str, self.crossings), *self.notes))


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The trainer's logprobs beside the engine's, over the window. Differences are trainer - engine, in nats.

    Attributes:
        num_rollouts, num_tokens: Compared in the window.
        num_last_tokens, last_mean_abs: Tokens of the last call and their mean |difference|. The last call is
            judged on its own, too, when it has enough tokens; where only it crosses a threshold, the figure
            below is its.
        mean_abs: Mean |difference|.
        max_abs: Largest |difference|.
        mean_signed: Mean difference. Near -KL(engine || trainer): 0 or a little below.
        effective_sample_size: Fraction of the tokens, 1 is best; see `effective_sample_size`.
        k3_kl: Estimate of KL(engine || trainer), nats a token; see `k3_kl`.
        tokens_by_version: Tokens by the version of the policy that sampled them.
        num_other_version_tokens: Tokens whose version differs from the trainer's at the call that brought
            them; None when no call in the window named the trainer's version.
        logprobs_modes: The engine's modes in the window.
        worst: The token with the largest |difference|.
        verdict: What of it crosses a threshold.
    """

    num_rollouts: int
    num_tokens: int
    num_last_tokens: int
    last_mean_abs: float
    mean_abs: float
    max_abs: float
    mean_signed: float
    effective_sample_size: float
    k3_kl: float
    tokens_by_version: Mapping[int, int]
    num_other_version_tokens: int | None
    logprobs_modes: tuple[str, ...]
    worst: WorstToken
    verdict: DriftVerdict

    def __str__(self) -> str:
        served = ", ".join(f"{version} ({count})" for version, count in self.tokens_by_version.items())
        other = self.num_other_version_tokens
        differing = "trainer's not given" if other is None else f"{other} differ from the trainer's"
        return "\n".join(
            (
                f"{self.num_tokens} tokens of {self.num_rollouts} rollouts, trainer - engine in nats:",
                f"  mean absolute {self.mean_abs:.4g}, maximum {self.max_abs:.4g}, "
                f"mean signed {self.mean_signed:.4g}",
                f"  last call: {self.num_last_tokens} tokens, mean absolute {self.last_mean_abs:.4g}",
                f"  effective sample size {self.effective_sample_size:.4f}, KL (k3) {self.k3_kl:.4g}",
                f"  versions (tokens): {served}; {differing}",
                f"  worst: {self.worst}",
                f"  {self.verdict}",
            )
        )
