"""Owns how prompts become token ids: the policy's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from rlspec.errors import InputError
from rlspec.prompts import Rejected, check_token_ids
from rlspec.types import Prompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that is ready to be sampled from."""

    group_id: str
    token_ids: tuple[int, ...]
    data: dict[str, object] = field(default_factory=dict)
    sampling: dict[str, object] = field(default_factory=dict)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, *, max_model_len: int, vocab_size: int
) -> tuple[list[EncodedPrompt], list[Rejected]]:
    """Encode each prompt; those that do not fit the policy are returned with the reason.

    Args:
        prompts: With group ids.
        tokenizer: The policy's (transformers), or None when it was not loaded.
        max_model_len: Tokens of prompt and response together.
        vocab_size: The policy's.
    """
    encoded: list[EncodedPrompt] = []
    rejected: list[Rejected] = []
    for prompt in prompts:
        where = f"prompt of group {prompt.group_id}"
        try:
            token_ids = _token_ids(prompt, tokenizer, where)
            check_token_ids(token_ids, where, max_model_len=max_model_len, vocab_size=vocab_size)
        except InputError as error:
            given = prompt.text or prompt.messages or prompt.token_ids
            rejected.append(Rejected(where, given, error))
        else:
            data, sampling = dict(prompt.data), dict(prompt.sampling)
            encoded.append(EncodedPrompt(str(prompt.group_id), token_ids, data, sampling))
    return encoded, rejected


def _token_ids(prompt: Prompt, tokenizer: Any, where: str) -> tuple[int, ...]:
    if prompt.token_ids is not None:
        return tuple(map(int, prompt.token_ids))
    if tokenizer is None:
        fix = "Give prompt_token_ids, or remove engine.vllm_args.skip_tokenizer_init."
        raise InputError(where, given="text", allowed="token ids: no tokenizer is loaded", fix=fix)
    try:
        if prompt.text is not None:
            return tuple(tokenizer(prompt.text)["input_ids"])
        return tuple(
            tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages or ()],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )["input_ids"]
        )
    except (ValueError, TypeError, KeyError, jinja2.TemplateError) as error:
        fix = "Correct it, or give prompt_token_ids."
        allowed = f"what the policy's tokenizer and chat template take ({error})"
        raise InputError(where, given=prompt.text or prompt.messages, allowed=allowed, fix=fix) from error
