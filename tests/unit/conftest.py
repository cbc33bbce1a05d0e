"""What every unit test leaves as it found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restore_logger() -> Iterator[None]:
    """`configure_logs`, which the command line calls, changes rlspec's logger for the whole process."""
    logger = logging.getLogger("rlspec")
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before
