"""Owns the configuration as text: read from YAML and `--set key=value`, written with explanations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlspec.config import Config, DrafterConfig, parse_config
from rlspec.errors import ConfigError


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Make a `Config` from a YAML file (or the defaults) and `key.path=value` overrides.

    Args:
        path: The YAML file; None starts from the defaults.
        overrides: Each `key.path=value` with a YAML value, applied in order: `sampling.n=4`.

    Raises:
        ConfigError: The file cannot be read, a key is unknown or a value is not accepted.
    """
    tree = _read_yaml(Path(path)) if path is not None else {}
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree)


def describe_config(config: Config) -> str:
    """The whole tree as YAML, each key under its description; `load_config` reads it back."""
    lines: list[str] = []
    for name in type(config).model_fields:
        section = getattr(config, name)
        lines.append(f"# {(type(section).__doc__ or '').strip()}")
        lines.append(f"{name}:")
        values = section.model_dump(mode="json")
        for key, info in type(section).model_fields.items():
            lines.append(f"  # {info.description}")
            text = yaml.safe_dump({key: values[key]}, sort_keys=False, width=1000)
            lines += [f"  {line}" for line in text.rstrip().split("\n")]
        lines.append("")
    return "\n".join(lines)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, where YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in yaml, after a look at the keys."""
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


# No key is a date, and versions are often named by one. A dict of our own: others change SafeLoader's.
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read_yaml(path: Path) -> dict[str, Any]:
    allowed = "a readable YAML file holding a mapping"
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError("config", given=str(path), allowed=allowed, fix=f"{error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates, integers, UTF-8, nesting
        fix = "Correct the file: " + " ".join(str(error).split())
        raise ConfigError("config", given=str(path), allowed=allowed, fix=fix) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        fix = "Write `section:` keys at the top level; `rlspec config show` prints an example."
        raise ConfigError("config", given=str(path), allowed=allowed, fix=fix)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(
            "--set", given=override, allowed="key.path=value", fix="Write for example: --set sampling.n=4"
        )
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        fix = "Quote the value for YAML."
        raise ConfigError(f"--set {key}", given=text, allowed="a YAML value", fix=fix) from error
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = _default_mapping(parts, part)
        if not isinstance(child, dict):
            fix = f"{part!r} holds a value, not a section."
            raise ConfigError(f"--set {key}", given=override, allowed="a key inside a section", fix=fix)
        node = child
    node[parts[-1]] = value


def _default_mapping(parts: Sequence[str], part: str) -> dict[str, Any]:
    """What an override below `part` starts from: the default pass-through mapping, else nothing."""
    if part == "speculative_config" and parts[0] == "drafter":
        return dict(DrafterConfig().speculative_config or {})
    return {}
