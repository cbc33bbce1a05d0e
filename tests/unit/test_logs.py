"""Logs: one line of text or one JSON object a line."""

import json
import logging

import pytest

from rlspec.logs import configure_logs


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("rlspec.test").warning("took %d s", 3, exc_info=True)
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "rlspec.test", "took 3 s")
    assert "ValueError: bad" in entry["error"]


def test_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning", "text")
    logging.getLogger("rlspec.test").info("quiet")
    logging.getLogger("rlspec.test").error("loud")
    err = capsys.readouterr().err
    assert "quiet" not in err
    assert "ERROR rlspec.test: loud" in err
