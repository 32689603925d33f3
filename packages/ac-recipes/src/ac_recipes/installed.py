"""Whether what a recipe needs beside our own requirements is installed: all that is missing, told at once."""

from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec

from ac_recipes.data.config import DatasetConfig, RecordsDatasetConfig
from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra
from ac_recipes.pretrained import PACKAGE, no_such_package
from ac_recipes.recipe import Recipe

_EXTRAS = {"gguf": ("gguf", "accelerate"), "peft": ("peft",)}
"""What an extra of ac-recipes brings, by the names that it is imported under."""


def check_installed(recipe: Recipe) -> None:
    """Refuse a recipe that needs a library or a package with weights or data which is not installed here.

    Raises:
        UsageError: one line for each, with the command that installs it.
    """
    _refuse([*_packages(_references(recipe)), *_libraries(recipe, recipe.pretrained_names())])


def check_installed_for_shapes(recipe: Recipe) -> None:
    """As `check_installed`, for who looks at a step without weights and data: a pretrained tokenizer tells its size,
    and a pretrained model what it is, where the recipe does not."""
    config = recipe.model.config
    is_known = config is not None and "vocab_size" in (config.get("text_config") or config)
    names = [named for named in recipe.pretrained_names() if not (is_known and named[0].startswith("model."))]
    _refuse([*_packages(names), *_libraries(recipe, names)])


def _refuse(missing: list[str]) -> None:
    if missing:
        raise UsageError("\n".join(missing))


def _packages(references: Iterable[tuple[str, str]]) -> Iterator[str]:
    told = set()
    for field, reference in references:
        package = reference.removeprefix(PACKAGE).partition("/")[0]
        if not reference.startswith(PACKAGE) or not package or package in told:
            continue
        told.add(package)
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            yield no_such_package(package, field)


def _references(recipe: Recipe) -> Iterator[tuple[str, str]]:
    yield from recipe.pretrained_names()
    sections: dict[str, DatasetConfig | None] = {
        "dataset": recipe.dataset,
        "validation_dataset": recipe.validation_dataset,
    }
    for section, config in sections.items():
        if isinstance(config, RecordsDatasetConfig):
            yield from ((f"{section}.path_or_dataset_id", source) for source in config.sources)


def _libraries(recipe: Recipe, pretrained: list[tuple[str, str]]) -> Iterator[str]:
    needs = [(field, "a GGUF file", "gguf") for field, name in pretrained if name.endswith(".gguf")]
    if recipe.peft is not None:
        needs.append(("peft", "LoRA", "peft"))
    for field, what, extra in needs:
        if missing := [module for module in _EXTRAS[extra] if find_spec(module) is None]:
            libraries = f"{' and '.join(missing)} {'library' if len(missing) == 1 else 'libraries'}"
            yield f"{field}: {what} needs the {libraries}; {install_extra(extra)}"
