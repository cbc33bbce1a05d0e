"""Result files hold what the house style asks for."""

import json
from pathlib import Path

from rlspec.provenance import hardware, versions, write_result

RESULTS = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.json"))
KEYS = {"summary", "command", "versions", "hardware", "date", "raw"}


def test_result_has_all_keys(tmp_path: Path) -> None:
    write_result(
        tmp_path / "deep" / "x.json", summary={"a_seconds_ratio": 1.0}, raw=[1], command_line="make x"
    )
    result = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert set(result) == KEYS
    assert result["summary"] == {"a_seconds_ratio": 1.0}


def test_committed_results_have_all_keys_and_flat_numbers() -> None:
    for path in RESULTS:
        result = json.loads(path.read_text())
        assert set(result) == KEYS, path
        assert all(isinstance(value, int | float) for value in result["summary"].values()), path


def test_environment_is_described() -> None:
    assert "rlspec" in versions()
    assert "cores" in hardware()
