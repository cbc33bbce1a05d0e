"""The command line: exit codes, messages, and what needs no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlspec.cli import EXIT_INTERRUPTED, EXIT_REFUSED, main
from rlspec.config import Config, parse_config
from rlspec.config_files import load_config
from rlspec.rollout_command import RolloutJob


def test_config_show_prints_what_load_config_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "sampling.n=3"]) == 0
    config = parse_config(yaml.safe_load(capsys.readouterr().out))
    assert config == load_config(None, ["sampling.n=3"])


def test_user_errors_exit_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "samplng.n=3"]) == EXIT_REFUSED
    err = capsys.readouterr().err
    assert err.startswith("rlspec: ConfigError: samplng")
    assert "Did you mean 'sampling'?" in err
    assert "Traceback" not in err


def test_missing_prompts_are_refused_before_any_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["rollout", "--prompts", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(job) == EXIT_REFUSED
    assert "No such file" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_empty_prompts_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    job = ["rollout", "--prompts", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(job) == EXIT_REFUSED
    assert "without a line" in capsys.readouterr().err


@pytest.mark.parametrize("out", [".", "rejected.jsonl", "p.jsonl"])
def test_a_run_never_writes_over_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6]}')
    assert main(["rollout", "--prompts", "p.jsonl", "--out", out, "--resume"]) == EXIT_REFUSED
    assert (tmp_path / "p.jsonl").read_text() == '{"prompt_token_ids": [5, 6]}'
    assert "Name another" in capsys.readouterr().err


def test_side_files_of_dotted_names_do_not_meet() -> None:
    jobs = [RolloutJob(Path("p"), Path(name)) for name in ("run.0.5", "run.0.7", "x.prom", "a.jsonl")]
    files = [path for job in jobs for path in (job.out, job.meta, job.report, job.metrics, job.steps)]
    assert len(set(files)) == len(files)


def test_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: Config) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlspec.cli.describe_config", interrupt)
    assert main(["config", "show"]) == EXIT_INTERRUPTED
    assert "--resume" in capsys.readouterr().err


def test_env_prints_what_a_shell_can_eval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert main(["env"]) == 0
    assert f"export LD_PRELOAD='{tmp_path}/lib/libiomp5.so'" in capsys.readouterr().out
