"""Owns how rlspec's own logs are printed: one line of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One object a line: time (ISO 8601), level, logger, message, and the error when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logs(level: str, log_format: str) -> None:
    """Print rlspec's logs on standard error; for programs (the CLI), not for libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logger = logging.getLogger("rlspec")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
