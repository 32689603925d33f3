"""What can be said against the data of a recipe from its files alone. Loads neither torch nor transformers."""

from collections.abc import Iterator

from ac_recipes.data.config import RecordsDatasetConfig, TextDatasetConfig
from ac_recipes.data.files import read_text
from ac_recipes.data.records import DataError, is_local, read_records
from ac_recipes.errors import UsageError
from ac_recipes.pretrained import PACKAGE, find_pretrained
from ac_recipes.reader import Problem
from ac_recipes.recipe import Recipe


def check_data(recipe: Recipe) -> Iterator[Problem]:
    """What stands against each file that the recipe names, where it names it, and against each record in it.

    Datasets of the hub and files of packages are left to the start of a run: they may be elsewhere.
    """
    for section, config in (("dataset", recipe.dataset), ("validation_dataset", recipe.validation_dataset)):
        if isinstance(config, TextDatasetConfig):
            yield from _check_text(section, config)
        elif isinstance(config, RecordsDatasetConfig) and all(map(is_local, config.sources)):
            yield from _check_records(section, config)
    for field, name in recipe.pretrained_names():
        if not name.startswith(PACKAGE):
            try:
                find_pretrained(name, field)
            except UsageError as error:
                yield Problem(path=tuple(field.split(".")), message=str(error).removeprefix(f"{field}: "))
    if recipe.tokenizer.chat_template is not None:
        try:
            read_text(recipe.tokenizer.chat_template)
        except UsageError as error:
            yield Problem(path=("tokenizer", "chat_template"), message=str(error))


def _check_text(section: str, config: TextDatasetConfig) -> Iterator[Problem]:
    for place, name in enumerate(() if isinstance(config.text, str) else config.text):
        try:
            read_text(name)
        except UsageError as error:
            yield Problem(path=(section, "text", place), message=str(error))


def _check_records(section: str, config: RecordsDatasetConfig) -> Iterator[Problem]:
    for field, value, default in (("split", config.split, "train"), ("name", config.name, None)):
        if value != default:
            yield Problem(
                path=(section, field),
                message=f"{value!r} is of a dataset on the hub or in a folder, and {config.sources[0]} is a file, "
                "which is taken whole; leave it out",
            )
    path = (section, "path_or_dataset_id")
    try:
        read_records(config, section)
    except DataError as error:
        for line in str(error).splitlines():
            yield Problem(path=path, message=line)
    except UsageError as error:
        yield Problem(path=path, message=str(error))
