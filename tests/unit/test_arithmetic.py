"""The built-in task: reproducible prompts, right answers, a reward that cannot be had for nothing."""

import pytest

from rlspec.arithmetic import arithmetic_prompts, arithmetic_reward


def test_same_seed_same_prompts() -> None:
    assert arithmetic_prompts(20, seed=3) == arithmetic_prompts(20, seed=3)
    assert arithmetic_prompts(20, seed=3) != arithmetic_prompts(20, seed=4)
    assert len({prompt.group_id for prompt in arithmetic_prompts(50)}) == 50


def test_answers_are_right() -> None:
    seen = set()
    for prompt in arithmetic_prompts(200):
        question, answer = str(prompt.data["question"]), prompt.data["answer"]
        a, b = (
            int(word.strip("?."))
            for word in question.replace(". ", " ").split()
            if word.strip("?.").isdigit()
        )
        kind = "-" if "-" in question or "gives away" in question else "+"
        seen.add(kind)
        assert answer == (a + b if kind == "+" else a - b)
    assert seen == {"+", "-"}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("12 + 3 = 15", 1.0),
        ("The answer is 15.", 1.0),
        ("15, or 16", 0.0),
        ("", 0.0),
        ("none", 0.0),
        ("-15", 0.0),
    ],
)
def test_reward_looks_at_the_last_number(text: str, reward: float) -> None:
    assert arithmetic_reward(text, 15) == reward


def test_thousands_are_read() -> None:
    assert arithmetic_reward("so 1,234", 1234) == 1.0
