"""What is refused on the way from the configuration to vLLM's arguments."""

from __future__ import annotations

import pytest

from rlspec.config import parse_config
from rlspec.errors import ConfigError
from rollout.vllm_args import engine_arguments

pytest.importorskip("vllm")


@pytest.mark.parametrize("method", ["suffix", "extract_hidden_states"])
@pytest.mark.parametrize("policy", ["goodput", "off", "static_table"])
def test_methods_of_one_k_are_refused_a_policy_that_changes_it(method: str, policy: str) -> None:
    drafter = {"speculative_config": {"method": method, "num_speculative_tokens": 1}}
    with pytest.raises(ConfigError, match=rf"speculation\.policy.*{policy}.*fixed.*{method}"):
        engine_arguments(parse_config({"drafter": drafter, "speculation": {"policy": policy}}), "policy")
    fixed = parse_config({"drafter": drafter, "speculation": {"policy": "fixed"}})
    assert engine_arguments(fixed, "policy")["speculative_config"]["method"] == method
