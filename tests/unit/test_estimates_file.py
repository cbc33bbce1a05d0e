"""Estimates on disk: atomic, for one key only, and never the end of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlspec.speculation.estimates_file import EstimatesKey, load_estimates, save_estimates

KEY = EstimatesKey("machine", "policy", "drafter", "engine")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_saved_is_loaded_for_the_same_key_only() -> None:
    assert load_estimates(KEY) is None
    path = save_estimates(KEY, {"cost": [1, 2.5]})
    assert path == KEY.path()
    assert load_estimates(KEY) == {"cost": [1, 2.5]}
    assert load_estimates(EstimatesKey("machine", "policy", "drafter", "other")) is None
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 99}', '{"format": 1, "key": {}}'])
def test_a_broken_file_warns_and_is_left_out(text: str, caplog: pytest.LogCaptureFixture) -> None:
    KEY.path().parent.mkdir(parents=True)
    KEY.path().write_text(text)
    assert load_estimates(KEY) is None
    assert "is left out, costs are measured anew" in caplog.text
    assert save_estimates(KEY, {"cost": 1}) is not None
    assert load_estimates(KEY) == {"cost": 1}


def test_a_full_disk_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    save_estimates(KEY, {"cost": 1})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert save_estimates(KEY, {"cost": 2}) is None
    assert "No space left on device" in caplog.text
    assert load_estimates(KEY) == {"cost": 1}
    assert len(list(KEY.path().parent.iterdir())) == 1


def test_a_folder_that_cannot_be_made_warns(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file")
    assert save_estimates(KEY, {}) is None
    assert "is not kept" in caplog.text
