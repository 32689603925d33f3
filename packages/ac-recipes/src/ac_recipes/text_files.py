"""The text files of a recipe: read here, refused here."""

from collections.abc import Iterator
from pathlib import Path

from ac_recipes.errors import UsageError
from ac_recipes.reader import Problem
from ac_recipes.recipe import DatasetConfig, Recipe


def check_text_files(recipe: Recipe) -> Iterator[Problem]:
    """What stands against each file of `dataset.text`, where the recipe names it."""
    if not isinstance(recipe.dataset, DatasetConfig):
        return
    names = () if isinstance(recipe.dataset.text, str) else recipe.dataset.text
    for place, name in enumerate(names):
        try:
            read_text(name)
        except UsageError as error:
            yield Problem(path=("dataset", "text", place), message=str(error))


def read_text(name: str) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise UsageError(f"{name!r} is no name of a file: {error}") from error
