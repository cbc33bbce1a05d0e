"""The configuration: defaults, overrides, and refusals that name the key and the nearest known one."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlspec.config import EMBEDDED_VLLM_ARGS, Config, parse_config, with_sampling
from rlspec.config_files import describe_config, load_config
from rlspec.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_are_example_configs() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_committed_config_loads(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_described_config_reads_back() -> None:
    config = load_config(None, ["sampling.n=4", "sampling.stop=[a, b]", "drafter.version='1.0'"])
    assert parse_config(yaml.safe_load(describe_config(config))) == config


def test_every_key_has_a_description() -> None:
    for section in Config.model_fields.values():
        assert section.annotation is not None
        for name, info in section.annotation.model_fields.items():
            assert info.description, name


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().policy.version = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "field", "hint"),
    [
        ("samplng.n=4", "samplng", "'sampling'"),
        ("sampling.temprature=1", "sampling.temprature", "'temperature'"),
        ("engine.vlm_args.max_model_len=1", "engine.vlm_args", "'vllm_args'"),
        ("sampling.n=0", "sampling.n", "greater than or equal to 1"),
        ("sampling.n=many", "sampling.n", "integer"),
        ("speculation.num_draft_tokens=9", "speculation.num_draft_tokens", "0 to 3"),
        (
            "drafter.speculative_config={method: ngram}",
            "drafter.speculative_config",
            "num_speculative_tokens",
        ),
        ("drafter.speculative_config={num_speculative_tokens: x}", "drafter.speculative_config", "integer"),
        ("drafter.speculative_config={}", "drafter.speculative_config", "num_speculative_tokens"),
        ("sampling.n=true", "sampling.n", "integer"),
        ("sampling.temperature=.inf", "sampling.temperature", "finite"),
        ("sampling.temperature=.nan", "sampling.temperature", "finite"),
        ("drift.max_abs=0", "drift.max_abs", "greater than 0"),
        ("drift.min_effective_sample_size=1.5", "drift.min_effective_sample_size", "less than or equal to 1"),
        ("drift.max_mean=1", "drift.max_mean", "'max_mean_abs'"),
        ("policy.model=''", "policy.model", "at least 1 character"),
        ("engine.vllm_args={seed: 1, seed: 2}", "--set engine.vllm_args", "YAML"),
        ("sampling", "--set", "key.path=value"),
        ("sampling.=1", "--set", "key.path=value"),
        ("sampling.n.x=1", "sampling.n", "integer"),
        ("sampling.n={", "--set sampling.n", "YAML"),
    ],
)
def test_bad_override_is_refused_by_name(override: str, field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_a_date_is_a_name_like_any_other() -> None:
    assert load_config(None, ["drafter.version=2026-12-01"]).drafter.version == "2026-12-01"


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [", "\x00", "sampling: {n: 1}\nsampling: {n: 2}"])
def test_file_that_is_no_mapping_with_each_key_once_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_yaml_that_people_write(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("speculation: {policy: off}\nsampling: {<<: {n: 2, top_p: 0.9}, n: 3}\n")
    config = load_config(path)
    assert (config.speculation.policy, config.sampling.n, config.sampling.top_p) == ("off", 3, 0.9)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_overrides_change_a_file_and_keep_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("sampling: {n: 2, top_p: 0.9}\n")
    sampling = load_config(path, ["sampling.n=8"]).sampling
    assert (sampling.n, sampling.top_p) == (8, 0.9)


def test_override_inside_the_default_drafter_keeps_its_other_keys() -> None:
    config = load_config(None, ["drafter.speculative_config.num_speculative_tokens=5"])
    assert config.drafter.speculative_config is not None
    assert config.drafter.speculative_config["method"] == "ngram"
    assert config.drafter.max_draft_tokens == config.num_draft_tokens == 5


def test_embedded_policy_brings_engine_arguments_and_others_do_not() -> None:
    own = load_config(None, ["engine.vllm_args.max_model_len=64"]).vllm_args
    assert own == {**EMBEDDED_VLLM_ARGS, "max_model_len": 64}
    assert load_config(None, ["policy.model=/some/model"]).vllm_args == {}


def test_no_drafter_means_no_draft_tokens() -> None:
    config = load_config(None, ["drafter.speculative_config=null"])
    assert config.drafter.max_draft_tokens == config.num_draft_tokens == 0


def test_sampling_of_a_call_changes_the_configured_one() -> None:
    config = load_config(None, ["sampling.top_p=0.9"])
    assert with_sampling(config, {"n": 3}).model_dump(exclude_unset=True) == {"n": 3, "top_p": 0.9}
    with pytest.raises(ConfigError, match="temperature"):
        with_sampling(config, {"temprature": 1.0})


@given(st.integers(0, 64), st.integers(1, 64))
def test_k_is_bounded_by_the_drafter(k: int, largest: int) -> None:
    tree = {
        "drafter": {"speculative_config": {"method": "ngram", "num_speculative_tokens": largest}},
        "speculation": {"num_draft_tokens": k},
    }
    if k <= largest:
        assert parse_config(tree).num_draft_tokens == k
    else:
        with pytest.raises(ConfigError):
            parse_config(tree)
