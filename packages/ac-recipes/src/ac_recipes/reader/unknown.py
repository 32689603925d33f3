"""Says of a key that is no field where it belongs: in another section, to another variant, or under a similar name."""

from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.reader.schema import fields_of, homes_of
from ac_recipes.reader.suggest import closest
from ac_recipes.reader.variants import Variant


def unknown_field(name: str, variant: Variant, section: KeyPath, schema: type) -> tuple[str, str | None]:
    """Message and suggestion for the key `name` in `section`, which is read as `variant`, in a recipe of `schema`.

    An exact name elsewhere is better evidence than a similar one here: `lr` beside `layers` belongs in `optimizer`.
    """
    message = f"unknown field for {variant.label}" if variant.label else "unknown field"
    owners = [label for label, cls in variant.siblings.items() if name in fields_of(cls)]
    if owners:
        return f"{message}; {name!r} belongs to {' and '.join(owners)}", None
    homes = [home for home in homes_of(name, schema) if home != section]
    if homes:
        sections = " or ".join(f"in {'.'.join(home)!r}" if home else "at the top level" for home in homes)
        return f"{message}; {name!r} belongs {sections}", ".".join((*homes[0], name))
    return message, closest(name, fields_of(variant.cls))
