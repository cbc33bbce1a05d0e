"""Owns the way from our sampling parameters to vLLM's, and what speculation cannot honour."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind

from rlspec.config import SamplingConfig
from rlspec.errors import InputError, UnsupportedSamplingError

IGNORED_WHILE_SPECULATING: Mapping[str, Callable[[Any], bool]] = {
    "min_p": lambda value: value > 0.0,
    "logit_bias": bool,
}
"""Parameters that vLLM 0.32 cannot honour for draft tokens, and whether a value asks for them."""


MIN_TEMPERATURE = 0.01
"""vLLM 0.32 raises smaller temperatures to this (sampling_params.py), and calls below 1e-5 greedy."""

NEED_TOKENIZER = ("stop", "bad_words")
"""Parameters in text, which vLLM 0.32 silently ignores without a tokenizer."""


def check_sampling(
    sampling: SamplingConfig, *, speculating: bool, has_tokenizer: bool, can_rewind: bool
) -> None:
    """Refuse what would not be honoured.

    Args:
        sampling: The parameters.
        speculating: Whether a drafter is loaded.
        has_tokenizer: False with `skip_tokenizer_init`.
        can_rewind: False where a chunked prompt cannot give back the random numbers of its discarded
            tokens: torch's CPU generators have no offset.

    Raises:
        UnsupportedSamplingError: A parameter that speculation cannot honour, with a drafter loaded.
        InputError: Several samples of a greedy response, which would all be the same; a parameter in text
            without a tokenizer.
    """
    if sampling.n > 1 and sampling.temperature == 0.0:
        fix = "Set sampling.n to 1 or raise sampling.temperature."
        raise InputError("sampling.n", given=sampling.n, allowed="1 at temperature 0 (greedy)", fix=fix)
    if 0.0 < sampling.temperature < MIN_TEMPERATURE:
        allowed = f"0 (greedy), or {MIN_TEMPERATURE} and more: vLLM raises smaller ones to it"
        fix = "Set sampling.temperature to 0."
        raise InputError("sampling.temperature", given=sampling.temperature, allowed=allowed, fix=fix)
    if sampling.seed is not None and not can_rewind:
        raise InputError(
            "sampling.seed",
            given=sampling.seed,
            allowed="null with chunked prefill on a CPU: vLLM 0.32 stops at the first prompt that it chunks",
            fix="Set engine.vllm_args.enable_chunked_prefill to false.",
        )
    for name in () if has_tokenizer else NEED_TOKENIZER:
        if getattr(sampling, name):
            fix = "Use stop_token_ids, or remove engine.vllm_args.skip_tokenizer_init."
            allowed = "not set without a tokenizer: vLLM would ignore it"
            raise InputError(f"sampling.{name}", given=getattr(sampling, name), allowed=allowed, fix=fix)
    for name, asks in IGNORED_WHILE_SPECULATING.items() if speculating else ():
        value = getattr(sampling, name)
        if value is not None and asks(value):
            raise UnsupportedSamplingError(
                f"sampling.{name}",
                given=value,
                allowed="not set while speculating: vLLM cannot apply it to draft tokens",
                fix="Remove it, or set drafter.speculative_config to null for plain decoding.",
            )


def vllm_sampling_params(sampling: SamplingConfig) -> SamplingParams:
    """vLLM's parameters of one sample (n is ours: each sample is a request of its own).

    Raises:
        InputError: vLLM does not accept a value.
    """
    given = sampling.model_dump(exclude={"n", "seed"}, exclude_none=True)
    try:
        return SamplingParams(**given, n=1, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    except (ValueError, TypeError, VLLMError) as error:
        fix = "`rlspec config show` lists the parameters."
        raise InputError("sampling", given=given, allowed=str(error), fix=fix) from error


def sample_seed(base_seed: int | None, group_id: str, sample_index: int) -> int | None:
    """The seed of one sample: 63 bits of a sha256 over base seed, group and index.

    It depends on nothing else, so a resumed or reordered run gives each sample the same seed.
    """
    if base_seed is None:
        return None
    digest = hashlib.sha256(f"{base_seed}/{sample_index}/{group_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
