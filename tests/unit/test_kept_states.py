"""The pool of states against a slow one that keeps lists."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from rollout.kept_states import KeptStates  # noqa: E402

NAMES = ["a", "b", "c"]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.sets(st.sampled_from(NAMES), min_size=1).map(sorted)),
        st.tuples(st.just("drop"), st.sets(st.sampled_from(NAMES)).map(sorted)),
        st.tuples(st.just("clear"), st.just([])),
    ),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=150, deadline=None)
def test_rows_are_the_newest_of_each_request(actions: list[tuple[str, list[str]]]) -> None:
    window = 4
    pool = KeptStates(window, len(NAMES), 2, torch.float32, torch.device("cpu"))
    expected: defaultdict[str, list[int]] = defaultdict(list)
    token = 0
    for action, names in actions:
        if action == "keep":
            ids = list(range(token, token + len(names)))
            token += len(names)
            states = torch.tensor([[value, -value] for value in ids], dtype=torch.float32)
            pool.keep(names, torch.tensor(ids), torch.tensor(ids) + 7, states)
            for name, value in zip(names, ids, strict=True):
                expected[name] = [*expected[name], value][-window:]
        elif action == "drop":
            pool.drop(names)
            for name in names:
                expected.pop(name, None)
        else:
            pool.clear()
            expected.clear()
        for name in NAMES:
            ids, positions, states = pool.read(list(pool.rows_of(name)))
            assert ids.tolist() == expected.get(name, [])
            assert positions.tolist() == [value + 7 for value in expected.get(name, [])]
            assert states[:, 0].tolist() == expected.get(name, [])
    assert bool(pool) == any(expected.values())


def test_the_oldest_of_all_give_way_when_the_pool_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.kept_states.MAX_BYTES", 4 * (2 * 4 + 12))
    pool = KeptStates(100, 2, 2, torch.float32, torch.device("cpu"))
    for token in range(6):
        name = "a" if token < 3 else "b"
        pool.keep([name], torch.tensor([token]), torch.tensor([token]), torch.zeros(1, 2))
    assert pool.read(list(pool.rows_of("a")))[0].tolist() == [2]
    assert pool.read(list(pool.rows_of("b")))[0].tolist() == [3, 4, 5]
    assert pool.num_evicted == 2
