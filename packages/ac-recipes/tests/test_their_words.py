"""An error of another library, in a sentence."""

import pytest

from ac_recipes.their_words import said


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("gellu"), "it looked for 'gellu' and found nothing of that name"),
        (ZeroDivisionError("division by zero"), "it stopped with ZeroDivisionError: division by zero"),
        (TypeError("a\n  b"), "it stopped with TypeError: a b"),
        (ValueError("there is no such model"), "there is no such model"),
        (ValueError(), "it stopped with ValueError: no text"),
    ],
)
def test_a_bare_error_of_python_is_said_in_words(error, sentence):
    assert said(error) == sentence
