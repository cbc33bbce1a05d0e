"""Owns the exception tree: every error rlspec raises for its user.

    RlspecError
    ├── ConfigError        a key or value of the configuration
    ├── InputError         prompts, rollouts files or sampling parameters of a call
    │   └── UnsupportedSamplingError   a sampling parameter that speculation cannot honour
    ├── SetupError         this machine: a missing extra, an unsupported vLLM, a patch that did not take
    ├── ModelError         a policy or drafter checkpoint that cannot be used
    └── EngineError        the engine could not start or died

Each one says what was given, what is allowed and what to do, and carries the three as attributes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlspecError(Exception):
    """Base of all errors for users.

    Args:
        field: What is wrong, by the name the user knows it by (config key, file and line, parameter).
        given: The value that was given, as the user wrote it.
        allowed: What would have been accepted.
        fix: What to do, as an instruction.
    """

    def __init__(self, field: str, *, given: object, allowed: str, fix: str) -> None:
        self.field = field
        self.given = given
        self.allowed = allowed
        self.fix = fix
        super().__init__(f"{field}: got {_shorten(given)}; allowed: {allowed}. {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the four attributes when an error crosses a process boundary."""
        return _rebuild, (type(self), self.field, self.given, self.allowed, self.fix)


class ConfigError(RlspecError):
    """A configuration key or value is not accepted."""


class InputError(RlspecError):
    """A prompt, a line of a file or a sampling parameter is not accepted."""


class UnsupportedSamplingError(InputError):
    """A sampling parameter cannot be honoured while speculating."""


class SetupError(RlspecError):
    """This environment cannot run what was asked: a missing extra, version or patch."""


class ModelError(RlspecError):
    """A policy or drafter checkpoint is missing or does not fit."""


class EngineError(RlspecError):
    """The engine could not be started, or died while running."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` for a misspelt name, or the sorted list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."


def missing_extra(package: str, extra: str, feature: str) -> SetupError:
    """The error for an optional package that `feature` needs and that is not installed."""
    return SetupError(
        package,
        given="not installed",
        allowed=f"an environment with {package} for {feature}",
        fix=f"Install it with: pip install 'rlspec[{extra}]'",
    )


def missing_engine(error: ImportError) -> SetupError:
    """The error for an environment in which vLLM cannot be imported."""
    return SetupError(
        "vllm",
        given=f"import failed: {error}",
        allowed="an environment with vLLM",
        fix="Install it with: pip install 'rlspec[cpu]' (no GPU) or 'rlspec[gpu]'",
    )


def _shorten(value: object, limit: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if text else "''"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _rebuild(kind: type[RlspecError], field: str, given: object, allowed: str, fix: str) -> RlspecError:
    return kind(field, given=given, allowed=allowed, fix=fix)
