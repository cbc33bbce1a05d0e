"""Owns the built-in task: short arithmetic questions with an answer that can be checked, made from a seed.

It stands in for a data set, so that a first run and the tests need no download.
"""

from __future__ import annotations

import random
import re

from rlspec.types import Prompt

TEMPLATES = (
    "What is {a} + {b}? Think step by step, then give the number.",
    "What is {a} - {b}? Think step by step, then give the number.",
    "{name} has {a} apples and buys {b} more. How many apples does {name} have now?",
    "{name} has {a} apples and gives away {b}. How many apples are left?",
)
ADDS = (True, False, True, False)
NAMES = ("Ada", "Ben", "Chloe", "Dan", "Emma", "Finn")

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*")


def arithmetic_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` chat prompts, the same for the same seed; `data["answer"]` holds the right integer."""
    generator = random.Random(seed)
    prompts = []
    for index in range(count):
        kind = generator.randrange(len(TEMPLATES))
        a, b = generator.randint(10, 99), generator.randint(2, 9)
        question = TEMPLATES[kind].format(a=a, b=b, name=generator.choice(NAMES))
        answer = a + b if ADDS[kind] else a - b
        message = {"role": "user", "content": question}
        data = {"question": question, "answer": answer}
        prompts.append(Prompt(messages=(message,), group_id=f"arithmetic-{seed}-{index}", data=data))
    return prompts


def arithmetic_reward(text: str, answer: int) -> float:
    """1.0 when the last number of the response is the answer, else 0.0."""
    numbers = _NUMBER.findall(text)
    return float(bool(numbers) and int(numbers[-1].replace(",", "")) == answer)
