"""Owns the vocabulary: the frozen facts and verdicts that travel between the parts.

Facts say what happened (`StepFacts`, `Rollout`), verdicts say what to do (`Decision`).
Times are seconds, token counts are plain integers, K is `num_draft_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why a response ended; vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class Reason(StrEnum):
    """Why a decision about K was taken."""

    OFF = "off"
    FIXED = "fixed"
    TABLE = "table"
    REPLAYED = "replayed"
    REPLAY_EXHAUSTED = "replay_exhausted"
    PAYS = "pays"
    PLAIN_IS_FASTER = "plain_is_faster"
    HELD = "held"
    EXPLORING = "exploring"
    COOLING_DOWN = "cooling_down"
    DRAFTER_UNHEALTHY = "drafter_unhealthy"
    CONTROLLER_FAILED = "controller_failed"
    NO_ROOM = "no_room"


class EventKind(StrEnum):
    """What a person should hear of at once."""

    FLOOR_BROKEN = "floor_broken"
    DRAFTER_COLLAPSED = "drafter_collapsed"
    DRAFTER_RECOVERED = "drafter_recovered"
    CONTROLLER_FAILED = "controller_failed"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in the scheduler and that is logged, counted and kept.

    Attributes:
        kind: What happened.
        step_index: In which step of the run.
        text: The numbers behind it, and what was done.
    """

    kind: EventKind
    step_index: int
    text: str

    def as_row(self) -> list[object]:
        """The fields in order as plain values, for a message between processes."""
        return [self.kind.value, self.step_index, self.text]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Event:
        """The event behind `as_row`."""
        kind, step_index, text = row
        return cls(EventKind(kind), step_index, text)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, given in exactly one of three forms.

    Attributes:
        text: Plain text, tokenised as it stands.
        messages: Chat messages, put through the policy's chat template.
        token_ids: Token ids, used as they are.
        group_id: Names the group of samples drawn from this prompt; unique in a run.
        data: The caller's own fields, carried to each rollout unchanged.
        sampling: Sampling parameters of this prompt under vLLM's names, laid over the call's; not `n`.
    """

    text: str | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    group_id: str | None = None
    data: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler knows when K is chosen for a step. The columns have one entry a request.

    Attributes:
        step_index: Counts the engine steps of this run, from 0.
        num_waiting: Requests that wait for a place in the batch.
        num_scheduled_tokens: Tokens the target model computes in this step (prompt chunks, drafts included).
        request_ids: The engine's request ids.
        context_lengths: Tokens of prompt and response before this step's output.
        num_room: Draft tokens that the request can use in its next step at most, so that neither its
            `max_tokens` nor the model's length is passed; 0 in an unfinished prefill and for a request
            that is drawn plain.
    """

    step_index: int
    num_waiting: int
    num_scheduled_tokens: int
    request_ids: tuple[str, ...]
    context_lengths: tuple[int, ...]
    num_room: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Requests in this step."""
        return len(self.request_ids)

    @property
    def num_drafting(self) -> int:
        """Requests that have room for draft tokens."""
        return self.batch_size - self.num_room.count(0)


@dataclass(frozen=True, slots=True)
class Decision:
    """K for one step: how many tokens the drafter proposes for each request, and why.

    Attributes:
        num_draft_tokens: K.
        reason: Why.
        caps: The most draft tokens that each request of the `Load` gets verified; None is K for all.
        expected_tokens: Tokens a request and step that K is expected to give in the steady state; 0: unknown.
        expected_seconds: Step seconds expected of it, verification and drafting; 0: unknown.
        plain_seconds: Step seconds expected of K = 0; 0: unknown.
        predicted_seconds: Seconds expected of this very step, whose drafts were chosen before; 0: unknown.
    """

    num_draft_tokens: int
    reason: Reason
    caps: tuple[int, ...] | None = None
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    plain_seconds: float = 0.0
    predicted_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One engine step, as the scheduler saw it. The per-request columns have one entry a request.

    Attributes:
        step_index: Counts the engine steps of this run, from 0.
        started_seconds: Monotonic clock of the scheduler's process when the step was scheduled.
        step_seconds: From scheduling to the update with the step's output.
        num_scheduled_tokens: Tokens the target model computed (prompt chunks and drafts included).
        num_waiting: Requests waiting when the step was scheduled.
        num_draft_tokens: K decided in this step. The tokens it lets the drafter propose are
            verified in the next step of the request.
        reason: Why K was chosen.
        expected_tokens, expected_seconds, plain_seconds, predicted_seconds: Of the `Decision`.
        request_ids: The engine's request ids.
        num_offered: Draft tokens that the request's step before let it have: K or its cap; 0 for a new one.
        num_drafted: Draft tokens verified in this step, by request.
        num_accepted: How many of them were accepted; always the first ones.
        num_emitted: Tokens the response got in this step: accepted + 1, fewer where a stop or the length
            limit cut the step short, 0 in a prefill chunk.
        context_lengths: Tokens of prompt and response before this step's output.
        num_preempted: Requests that lost their KV cache to others when the step was scheduled, and will
            compute their tokens again.
    """

    step_index: int
    started_seconds: float
    step_seconds: float
    num_scheduled_tokens: int
    num_waiting: int
    num_draft_tokens: int
    reason: Reason
    expected_tokens: float
    expected_seconds: float
    plain_seconds: float
    predicted_seconds: float
    request_ids: tuple[str, ...]
    num_offered: tuple[int, ...]
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]
    num_emitted: tuple[int, ...]
    context_lengths: tuple[int, ...]
    num_preempted: int = 0

    @property
    def batch_size(self) -> int:
        """Requests in this step."""
        return len(self.request_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether no prompt was computed: one token a request, and the drafts."""
        return self.num_scheduled_tokens == self.batch_size + sum(self.num_drafted)

    @property
    def is_speculating(self) -> bool:
        """Whether the drafter was asked for drafts, or drafts were verified."""
        return self.num_draft_tokens > 0 or any(self.num_drafted)

    def as_row(self) -> list[object]:
        """The fields in order as plain values, for a message between processes."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> StepFacts:
        """The facts behind `as_row`."""
        values = dict(zip(cls.__slots__, row, strict=True))
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list | tuple)}
        return cls(**{**values, "reason": Reason(values["reason"])})


@dataclass(frozen=True, slots=True)
class PolicySpan:
    """Consecutive tokens of a response that one version of the policy sampled.

    Attributes:
        policy_version: The version.
        num_tokens: How many tokens, at least 1.
    """

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished response, with what an RL trainer needs.

    Attributes:
        group_id: The group (prompt) this sample belongs to.
        sample_index: Position in the group, from 0.
        prompt_token_ids: Token ids of the prompt.
        completion_token_ids: Sampled token ids; the end-of-sequence token included when sampled.
        logprobs: Natural log-probability of each sampled token under the target model.
        logprobs_mode: `processed_logprobs` (after temperature, top_k and top_p, as trainers need)
            or `raw_logprobs` (of the unscaled logits).
        finish_reason: Why the response ended.
        stop_reason: The stop string or token id that ended it, if one did.
        text: The detokenised response, or None without a tokenizer.
        seed: The request's own seed, or None if the engine's generator was used.
        policy_version: Version of the policy that sampled the first token: the oldest one.
        policy_spans: Which version sampled which tokens, in order; the counts add up to the response. More
            than one span where the policy was updated in the middle with `keep`.
        drafter_version: Version of the drafter that proposed; `none` in plain decoding.
        num_drafted: Draft tokens verified for this response.
        num_accepted: How many of them were accepted.
        num_drafted_by_position: Entry i counts the steps that verified at least i + 1 draft tokens.
        num_accepted_by_position: Entry i counts the steps that accepted at least i + 1 of them.
        num_steps: Engine steps in which the response got tokens.
        started_seconds: When the prompt was handed to the engine, from the start of the call.
        seconds: From then until the response was finished, waiting included.
        data: The prompt's own fields.
    """

    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_mode: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    text: str | None
    seed: int | None
    policy_version: int
    policy_spans: tuple[PolicySpan, ...]
    drafter_version: str
    num_drafted: int
    num_accepted: int
    num_drafted_by_position: tuple[int, ...]
    num_accepted_by_position: tuple[int, ...]
    num_steps: int
    started_seconds: float
    seconds: float
    data: Mapping[str, object] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification of drafts: 1 + accepted / verifications; 1.0 without drafts."""
        num_verifications = self.num_drafted_by_position[0] if self.num_drafted_by_position else 0
        return 1.0 + self.num_accepted / num_verifications if num_verifications else 1.0
