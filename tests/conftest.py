"""Starts the test process with the OpenMP runtime that CPU engines need."""

import pytest

from rlspec.openmp import restart_with_openmp


def pytest_configure(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(in_=True)  # else the restarted process prints into this one's capture
    restart_with_openmp()
    capture.resume_global_capture()
