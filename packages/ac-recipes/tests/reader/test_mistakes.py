import pickle

import pytest

from ac_recipes.reader import Mistake, RecipeError
from ac_recipes.reader.mistakes import MistakeLog, Place, cut, short, show_path

MISTAKE = Mistake(
    file="recipes/broken.yaml",
    line=2,
    column=3,
    path="activation_checkpointing.mdoe",
    message="unknown field",
    suggestion="mode",
)


def test_a_mistake_prints_as_one_line():
    assert str(MISTAKE) == (
        "recipes/broken.yaml:2:3: activation_checkpointing.mdoe: unknown field; did you mean 'mode'?"
    )


def test_path_and_suggestion_may_be_absent():
    mistake = Mistake(file="r.yaml", line=1, column=1, path="", message="expected a mapping")
    assert str(mistake) == "r.yaml:1:1: expected a mapping"


def test_the_error_is_a_value_error_and_survives_pickling():
    error = RecipeError([MISTAKE])
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert again.mistakes == (MISTAKE,)
    assert str(again) == str(MISTAKE)


def test_mistakes_are_told_in_reading_order_the_command_line_last():
    log = MistakeLog()
    log.add(Place("command line", 1, 1), ("c",), "third")
    log.add(Place("r.yaml", 10, 1), ("b",), "second")
    log.add(Place("r.yaml", 9, 5), ("a",), "first")
    with pytest.raises(RecipeError) as caught:
        log.raise_mistakes()
    assert [mistake.message for mistake in caught.value.mistakes] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ((), ""),
        (("optimizer", "betas", 1), "optimizer.betas[1]"),
        ((0, "a"), "[0].a"),
        (("a", "with space", "weight-decay"), "a['with space'].weight-decay"),
        (("two\nlines",), "['two\\nlines']"),
    ],
)
def test_paths(path, shown):
    assert show_path(path) == shown


def test_long_values_are_cut():
    assert short("a" * 30) == "'" + "a" * 30 + "'"
    assert len(short("a" * 1000)) == 60
    assert cut("0123456789" * 10, 20) == "0123456789...3456789"
