"""Says of a key that is no field where it belongs: in another section, to another variant, or under a similar name."""

from collections.abc import Iterable

from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.reader.schema import fields_of, homes_of
from ac_recipes.reader.suggest import closest
from ac_recipes.reader.synonyms import synonym_of
from ac_recipes.reader.variants import Variant


def unknown_field(name: str, variant: Variant, section: KeyPath, schema: type) -> tuple[str, str | None]:
    """Message and suggestion for the key `name` in `section`, which is read as `variant`, in a recipe of `schema`.

    An exact name elsewhere is better evidence than a similar one here: `lr` beside `layers` belongs in `optimizer`.
    """
    message = f"unknown field for {variant.label}" if variant.label else "unknown field"
    owners = [label for label, cls in variant.siblings.items() if name in fields_of(cls)]
    if owners:
        return f"{message}; {name!r} belongs to {' and '.join(owners)}", None
    own = fields_of(variant.cls)
    key, colon, value = name.partition(":")
    if colon and key in own:
        return f"{message}; YAML has a space after the colon: '{key}: {value}'", None
    if homes := [home for home in homes_of(name, schema) if home != section]:
        return _at_home(name, message, homes, section, own)
    meant = synonym_of(name)
    if meant is not None and meant not in own and (homes := homes_of(meant, schema)):
        return message, ".".join((*homes[0], meant))
    return message, meant if meant in own else closest(name, own)


def _at_home(
    name: str, message: str, homes: list[KeyPath], section: KeyPath, own: Iterable[str]
) -> tuple[str, str | None]:
    """The same for a field of other sections. Where several have one of that name, which is meant is not known."""
    sections = " or ".join(f"in {'.'.join(home)!r}" if home else "at the top level" for home in homes)
    told = f"{message}; {name!r} belongs {sections}"
    if len(homes) == 1:
        return told, ".".join((*homes[0], name))
    shown = ".".join(map(str, section))
    return (f"{told}; {shown!r} has {', '.join(map(repr, own))}" if section else told), None
