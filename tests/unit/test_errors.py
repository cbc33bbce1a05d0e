"""The exception tree: every error says what was given, what is allowed and what to do."""

import pickle

import pytest

from rlspec import errors

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RlspecError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_message_holds_all_four_parts_and_survives_pickling(kind: type[errors.RlspecError]) -> None:
    error = kind("sampling.n", given=0, allowed="1 or more", fix="Raise it.")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "sampling.n: got 0; allowed: 1 or more. Raise it."
    assert type(again) is kind
    assert (again.field, again.given, again.allowed, again.fix) == ("sampling.n", 0, "1 or more", "Raise it.")


def test_long_values_are_shortened() -> None:
    assert len(str(errors.InputError("x", given="y" * 10_000, allowed="z", fix="f"))) < 300


def test_empty_values_are_visible() -> None:
    assert "got ''" in str(errors.InputError("prompt", given="", allowed="text", fix="f"))


def test_nearest_names_one_or_lists_all() -> None:
    assert errors.nearest("temprature", ["temperature", "top_p"]) == "Did you mean 'temperature'?"
    assert errors.nearest("zzz", ["b", "a"]) == "Known: a, b."
