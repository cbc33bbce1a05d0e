"""Rollouts on disk: lines read back, groups are whole, a torn end is cut off, nothing is overwritten."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlspec.errors import InputError
from rlspec.rollout_files import (
    RolloutWriter,
    check_resumable,
    read_rollouts,
    rollout_from_line,
    rollout_to_line,
    write_text,
)
from rlspec.types import FinishReason, PolicySpan, Rollout

ROLLOUT = Rollout(
    group_id="g0",
    sample_index=0,
    prompt_token_ids=(1, 2),
    completion_token_ids=(3, 4, 5),
    logprobs=(-0.5, -1.25, -0.001),
    logprobs_mode="processed_logprobs",
    finish_reason=FinishReason.STOP,
    stop_reason=None,
    text="a\nb 漢",
    seed=7,
    policy_version=3,
    policy_spans=(PolicySpan(3, 1), PolicySpan(4, 2)),
    drafter_version="ngram",
    num_drafted=4,
    num_accepted=1,
    num_drafted_by_position=(2, 2),
    num_accepted_by_position=(1, 0),
    num_steps=2,
    started_seconds=0.5,
    seconds=1.5,
    data={"answer": 4, "reward": 1.0},
)


def group(name: str, num_samples: int = 2) -> list[Rollout]:
    return [replace(ROLLOUT, group_id=name, sample_index=index) for index in range(num_samples)]


def open_writer(path: Path | str, resume: bool = False) -> RolloutWriter:
    return RolloutWriter(path, group_size=2, resume=resume)


def test_line_reads_back() -> None:
    assert rollout_from_line(rollout_to_line(ROLLOUT)) == ROLLOUT
    assert "\n" not in rollout_to_line(ROLLOUT)


def test_acceptance_length_counts_verifications() -> None:
    assert ROLLOUT.acceptance_length == 1.5
    assert replace(ROLLOUT, num_accepted=0, num_drafted_by_position=()).acceptance_length == 1.0


def test_what_was_written_is_there_before_close(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "deep" / "out.jsonl")
    writer.write_group(group("a"))
    assert read_rollouts(tmp_path / "deep" / "out.jsonl") == group("a")
    writer.close()


def test_existing_rollouts_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_writer(path) as writer:
        writer.write_group(group("a"))
    before = path.read_bytes()
    with pytest.raises(InputError, match="--resume"):
        open_writer(path)
    assert path.read_bytes() == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(cut=st.integers(min_value=0))
def test_resume_keeps_whole_groups_wherever_the_file_was_cut(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    with open_writer(path) as writer:
        for name in "abc":
            writer.write_group(group(name))
    whole = path.read_bytes()
    size = len(whole) // 3
    num_bytes = cut % (len(whole) + 1)
    if num_bytes == size // 2:  # one whole sample and no more: a run with n = 1 writes the same
        num_bytes += 1
    path.write_bytes(whole[:num_bytes])
    with open_writer(path, resume=True) as writer:
        kept = "".join(writer.finished)
        assert kept == "abc"[: num_bytes // size]
        for name in "abc"[len(kept) :]:
            writer.write_group(group(name))
    assert path.read_bytes() == whole


def test_other_group_size_is_refused_and_the_file_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_writer(path) as writer:
        writer.write_group(group("a"))
        writer.write_group(group("b"))
    before = path.read_bytes()
    for group_size in (1, 4):
        with pytest.raises(InputError, match=rf"sampling\.n = {group_size}"):
            RolloutWriter(path, group_size=group_size, resume=True)
    assert path.read_bytes() == before


def test_other_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="groups of the prompts file"):
        check_resumable({"a": group("a")}, {"b": (1, 2)})
    with pytest.raises(InputError, match="same prompt tokens"):
        check_resumable({"a": group("a")}, {"a": (9,)})
    check_resumable({"a": group("a")}, {"a": (1, 2), "b": (3,)})


@pytest.mark.parametrize("text", ["not json\n", '{"group_id": "a"}\n', "[]\n", '{"prompt": "x"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"line 1|ends in something else"):
        open_writer(path, resume=True)
    assert path.read_text() == text


def test_a_lone_group_of_another_size_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_writer(path) as writer:
        writer.write_group(group("a"))
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"sampling\.n = 4"):
        RolloutWriter(path, group_size=4, resume=True)
    assert path.read_bytes() == before


def test_a_file_that_another_run_writes_is_not_cut(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out.jsonl") as writer:
        writer.write_group(group("a"))
        writer._file.write(b'{"group_id": "b"')
        writer._file.flush()
        before = (tmp_path / "out.jsonl").read_bytes()
        with pytest.raises(InputError, match="another run"):
            open_writer(tmp_path / "out.jsonl", resume=True)
        assert (tmp_path / "out.jsonl").read_bytes() == before


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    with (
        open_writer(tmp_path / "out.jsonl"),
        pytest.raises(InputError, match="another run"),
    ):
        open_writer(tmp_path / "out.jsonl")
    open_writer(tmp_path / "out.jsonl").close()


def test_whole_files_are_replaced_or_left_alone(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "x.json", "one")
    with pytest.raises(InputError, match="output"):
        write_text(tmp_path / "deep" / "x.json" / "y.json", "two")
    assert (tmp_path / "deep" / "x.json").read_text() == "one"


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="--out"):
        open_writer(tmp_path / "file" / "out.jsonl")


def test_full_disk_keeps_what_was_written() -> None:
    writer = open_writer("/dev/full")
    with pytest.raises(InputError, match="No space left"):
        writer.write_group(group("a"))
    writer.close()
