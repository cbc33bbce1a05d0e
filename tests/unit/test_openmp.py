"""The OpenMP environment: added once, the user's values win, nothing without the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec.openmp import DEFAULTS, openmp_environment


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    path = tmp_path / "lib" / "libiomp5.so"
    path.touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    return path


def test_added_before_what_is_preloaded_and_only_once(library: Path) -> None:
    added = openmp_environment({"LD_PRELOAD": "/lib/other.so"})
    assert added == {**DEFAULTS, "LD_PRELOAD": f"{library} /lib/other.so"}
    assert openmp_environment(added) == {}


def test_users_own_settings_win(library: Path) -> None:
    assert "KMP_BLOCKTIME" not in openmp_environment({"KMP_BLOCKTIME": "200"})


def test_nothing_to_do_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert openmp_environment({}) == {}
