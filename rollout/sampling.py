"""Owns the way from our sampling parameters to vLLM's, and what speculation cannot honour."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm import SamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rlspec.config_sampling import SamplingConfig
from rlspec.errors import InputError, UnsupportedSamplingError, nearest

PLAIN_KEY = "rlspec_plain"
"""Marks a request that is drawn without drafts, in `SamplingParams.extra_args`: vLLM carries those to our
scheduler unchanged. Its value holds the parameters of `HIDDEN_WHILE_PLAIN`."""

HIDDEN_WHILE_PLAIN: Mapping[str, Any] = {"min_p": 0.0, "logit_bias": None}
"""Parameters that vLLM 0.32 refuses in any request to an engine with a drafter, and what asks for nothing."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A parameter that vLLM 0.32 cannot honour for draft tokens: whether a value asks for it, and why not."""

    asks: Callable[[Any], bool]
    why: str


IGNORED_WHILE_SPECULATING: Mapping[str, Unsupported] = {
    "min_p": Unsupported(lambda value: value > 0.0, "vLLM does not apply it to draft tokens"),
    "logit_bias": Unsupported(bool, "vLLM does not apply it to draft tokens"),
    "min_tokens": Unsupported(
        bool,
        "vLLM forbids stop tokens too long when accepted drafts reach min_tokens: the token after them is "
        "masked by the length before them (v1/sample/logits_processor/builtin.py)",
    ),
}

MIN_TEMPERATURE = 0.01
"""vLLM 0.32 raises smaller temperatures to this (sampling_params.py), and calls below 1e-5 greedy."""

NEED_TOKENIZER: Mapping[str, str] = {
    "stop": "vLLM would ignore it",
    "bad_words": "vLLM would ignore it",
    "structured_outputs": "a grammar is about text",
}
"""Parameters in text, and why they are refused without a tokenizer."""


SEED = Unsupported(
    lambda value: value is not None,
    "vLLM samples drafts without the request's seed (v1/spec_decode/llm_base_proposer.py), and which drafts "
    "are verified decides which random numbers a token gets",
)
"""With `draft_sample_method: probabilistic` a seed repeats nothing."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine can do with sampling parameters.

    Attributes:
        speculating: Whether a drafter is loaded.
        samples_drafts: Whether that drafter samples its drafts instead of taking the likeliest.
        on_unsupported: What becomes of parameters that it cannot honour.
        has_tokenizer: False with `skip_tokenizer_init`.
        can_rewind: False where a chunked prompt cannot give back the random numbers of its discarded
            tokens: torch's CPU generators have no offset.
        vocab_size: Token ids are below it.
    """

    speculating: bool
    samples_drafts: bool
    on_unsupported: Literal["error", "plain"]
    has_tokenizer: bool
    can_rewind: bool
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Checked sampling parameters of requests, ours and vLLM's.

    Attributes:
        config: Ours.
        params: vLLM's for one sample, without its seed; shared, so never changed.
        plain_because: The parameters for which these requests get no drafts.
    """

    config: SamplingConfig
    params: SamplingParams
    plain_because: tuple[str, ...] = ()


def prepare_sampling(sampling: SamplingConfig, engine: EngineTraits, where: str) -> RequestSampling:
    """Check parameters and translate them; `where` is what errors call them.

    Raises:
        UnsupportedSamplingError: A parameter that speculation cannot honour, with a drafter loaded.
        InputError: What this engine or vLLM does not accept.
    """
    check_sampling(sampling, engine, where)
    unsupported = unsupported_while_speculating(sampling, engine)
    if unsupported and engine.on_unsupported == "error":
        name = next(iter(unsupported))
        raise UnsupportedSamplingError(
            f"{where}.{name}",
            given=getattr(sampling, name),
            allowed=f"not set while speculating: {unsupported[name].why}",
            fix="Remove it, or set speculation.on_unsupported=plain to draw such requests without drafts, or "
            "drafter.speculative_config to null for plain decoding.",
        )
    params = vllm_sampling_params(sampling, where)
    return RequestSampling(sampling, mark_plain(params) if unsupported else params, tuple(unsupported))


def unsupported_while_speculating(
    sampling: SamplingConfig, engine: EngineTraits
) -> Mapping[str, Unsupported]:
    """The parameters set that this engine cannot honour for draft tokens."""
    if not engine.speculating:
        return {}
    known = dict(IGNORED_WHILE_SPECULATING)
    if engine.samples_drafts and sampling.temperature > 0.0:
        known["seed"] = SEED
    given = {name: getattr(sampling, name) for name in known}
    return {
        name: known[name] for name, value in given.items() if value is not None and known[name].asks(value)
    }


def check_sampling(sampling: SamplingConfig, engine: EngineTraits, where: str) -> None:
    """Refuse what would not be honoured, with or without speculation.

    Raises:
        InputError: Several samples of a greedy response, which would all be the same; a parameter in text
            without a tokenizer; a token id that the policy does not have; and the like.
    """
    if sampling.n > 1 and sampling.temperature == 0.0:
        fix = f"Raise {where}.temperature, or set sampling.n to 1."
        raise InputError(f"{where}.n", given=sampling.n, allowed="1 at temperature 0 (greedy)", fix=fix)
    if 0.0 < sampling.temperature < MIN_TEMPERATURE:
        allowed = f"0 (greedy), or {MIN_TEMPERATURE} and more: vLLM raises smaller ones to it"
        fix = f"Set {where}.temperature to 0."
        raise InputError(f"{where}.temperature", given=sampling.temperature, allowed=allowed, fix=fix)
    if sampling.seed is not None and not engine.can_rewind:
        raise InputError(
            f"{where}.seed",
            given=sampling.seed,
            allowed="null with chunked prefill on a CPU: vLLM 0.32 stops at the first prompt that it chunks",
            fix="Set engine.vllm_args.enable_chunked_prefill to false.",
        )
    for name, why in () if engine.has_tokenizer else NEED_TOKENIZER.items():
        if getattr(sampling, name):
            fix = "Remove it, or remove engine.vllm_args.skip_tokenizer_init."
            allowed = f"not set without a tokenizer: {why}"
            raise InputError(f"{where}.{name}", given=getattr(sampling, name), allowed=allowed, fix=fix)
    _check_token_ids(sampling, engine.vocab_size, where)
    if sampling.structured_outputs is not None and sampling.ignore_eos:
        allowed = "not together with structured_outputs: after the grammar's end anything would follow"
        fix = "Leave ignore_eos out."
        raise InputError(f"{where}.ignore_eos", given=True, allowed=allowed, fix=fix)


def _check_token_ids(sampling: SamplingConfig, vocab_size: int, where: str) -> None:
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        bad = [token for token in getattr(sampling, name) or () if not 0 <= token < vocab_size]
        if bad:
            allowed = f"token ids from 0 to {vocab_size - 1}, the policy's vocabulary"
            raise InputError(f"{where}.{name}", given=bad, allowed=allowed, fix="Remove the other ids.")
    if sampling.allowed_token_ids == []:
        fix = "Leave allowed_token_ids out to allow each token."
        raise InputError(f"{where}.allowed_token_ids", given=[], allowed="at least one token id", fix=fix)


def vllm_sampling_params(sampling: SamplingConfig, where: str = "sampling") -> SamplingParams:
    """vLLM's parameters of one sample (n is ours: each sample is a request of its own).

    Raises:
        InputError: vLLM does not accept a value.
    """
    given = sampling.model_dump(exclude={"n", "seed", "structured_outputs"}, exclude_none=True)
    constraint = _structured_outputs(sampling.structured_outputs, f"{where}.structured_outputs")
    fixed = {"n": 1, "logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}
    try:
        return SamplingParams(**given, **fixed, structured_outputs=constraint)
    except (ValueError, TypeError, VLLMError) as error:
        fix = "`rlspec config show` lists the parameters."
        raise InputError(where, given=given, allowed=str(error), fix=fix) from error


def _structured_outputs(given: Mapping[str, Any] | None, where: str) -> StructuredOutputsParams | None:
    if given is None:
        return None
    known = [field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init]
    for name in given:
        if name not in known:
            fix = f"Remove it or correct its name. {nearest(name, known)}"
            raise InputError(f"{where}.{name}", given=given[name], allowed="a constraint of vLLM", fix=fix)
    try:
        return StructuredOutputsParams(**given)
    except (ValueError, TypeError, VLLMError) as error:
        fix = "Give one of json, regex, choice, grammar, json_object, structural_tag."
        raise InputError(where, given=dict(given), allowed=str(error), fix=fix) from error


def verify_params(prepared: RequestSampling, vllm_config: Any, tokenizer: Any, where: str) -> None:
    """Let vLLM check the parameters against its engine, as it does when a request is added.

    Raises:
        InputError: vLLM does not accept them: a grammar that it cannot read, bad words without tokens, ...
    """
    params = prepared.params.clone()  # vLLM notes in it what it finds
    try:
        params.verify(
            vllm_config.model_config,
            vllm_config.speculative_config,
            vllm_config.structured_outputs_config,
            tokenizer,
        )
        if tokenizer is not None:
            params.update_from_tokenizer(tokenizer)
    except (ValueError, VLLMError) as error:
        given = prepared.config.model_dump(exclude_unset=True)
        fix = "Correct the sampling parameters."
        raise InputError(where, given=given, allowed=str(error), fix=fix) from error


def mark_plain(params: SamplingParams) -> SamplingParams:
    """The same parameters for a request without drafts, in the form that vLLM's front accepts."""
    marked = params.clone()
    marked.extra_args = {PLAIN_KEY: {name: getattr(params, name) for name in HIDDEN_WHILE_PLAIN}}
    for name, nothing in HIDDEN_WHILE_PLAIN.items():
        setattr(marked, name, nothing)
    return marked


def unmark_plain(params: SamplingParams) -> bool:
    """Put the parameters that `mark_plain` hid back into place; whether there was a mark."""
    hidden = (params.extra_args or {}).get(PLAIN_KEY)
    if hidden is None:
        return False
    for name, value in hidden.items():
        setattr(params, name, value)
    return True


def sample_seed(base_seed: int | None, group_id: str, sample_index: int) -> int | None:
    """The seed of one sample: 63 bits of a sha256 over base seed, group and index.

    It depends on nothing else, so a resumed or reordered run gives each sample the same seed.
    """
    if base_seed is None:
        return None
    digest = hashlib.sha256(f"{base_seed}/{sample_index}/{group_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
