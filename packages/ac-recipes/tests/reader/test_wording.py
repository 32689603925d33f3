from typing import Literal

import pytest

from ac_recipes.reader.schema import shape_of
from ac_recipes.reader.wording import expected


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (int | float, "a number"),
        (int | None, "null or an integer"),
        (float | str | None, "null, a number, or a string"),
        (list[str] | str, "a string or a list"),
        (dict[str, int], "a mapping"),
        (Literal[True, 1, "a"], "one of true, 1, 'a'"),
        (bool | Literal["a", "b"] | None, "true, false, null, or one of 'a', 'b'"),
    ],
)
def test_unions_in_words(annotation, words):
    assert expected(shape_of(annotation)) == words


def test_a_union_of_everything_is_told_whole(mistakes):
    wanted = "expected true, false, null, one of 'none', 'full', 'selective', 'budget', or a mapping; got "
    place = "r.yaml:2:41: distributed.activation_checkpointing: "
    for written, got in [
        ("selctive", "'selctive'; did you mean 'selective'?"),
        ("'true'", "'true'; remove the quotes"),
        ("3", "the number 3"),
        ("[full]", "a list"),
        ("offf", "'offf'"),
    ]:
        text = f"model: a\ndistributed: {{activation_checkpointing: {written}}}"
        assert mistakes(text) == [place + wanted + got]
