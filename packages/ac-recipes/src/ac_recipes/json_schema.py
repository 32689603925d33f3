"""The recipe's dataclasses as JSON Schema (draft 2020-12), for editors: completion, hover texts and red underlines.

It says what the types say. What a section checks beyond its types (a multiple, a range) is told by `ac-recipes check`.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

from ac_recipes.reader import to_plain
from ac_recipes.reader.schema import ListShape, Shape, fields_of, shape_of

DRAFT = "https://json-schema.org/draft/2020-12/schema"

JSON = dict[str, Any]


def json_schema(schema: type) -> JSON:
    """The JSON Schema of the dataclass `schema`; the dataclasses it holds are under `$defs`, by class name."""
    definitions: dict[type, JSON] = {}
    root = _object(schema, definitions)
    named = {cls.__name__: definition for cls, definition in definitions.items()}
    if len(named) < len(definitions):
        raise TypeError(f"two classes of {schema.__name__} have one name: {sorted(map(str, definitions))}")
    return {"$schema": DRAFT, "title": schema.__name__, **root, "$defs": dict(sorted(named.items()))}


def _object(cls: type, definitions: dict[type, JSON]) -> JSON:
    defaults = {field.name: field for field in dataclasses.fields(cls)}
    told = field_docs(cls)
    properties = {}
    for name, field in fields_of(cls).items():
        described = {"description": told[name]} if name in told else {}
        properties[name] = {**described, **_value(field.annotation, definitions), **_default(defaults[name])}
    required = [name for name, field in fields_of(cls).items() if field.required]
    return {
        "description": _summary(cls),
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _value(annotation: Any, definitions: dict[type, JSON]) -> JSON:
    shape = shape_of(annotation)
    if shape.anything:
        return {}
    options = _scalars(shape)
    options += [_list(option, definitions) for option in shape.lists]
    options += [{"type": "object", "additionalProperties": _value(item, definitions)} for item in shape.dicts]
    for cls in shape.classes:
        if cls not in definitions:
            definitions[cls] = _object(cls, definitions)
        options.append({"$ref": f"#/$defs/{cls.__name__}"})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _scalars(shape: Shape) -> list[JSON]:
    numbers = ["number"] if shape.number else ["integer"] * shape.integer
    types = ["boolean"] * shape.boolean + ["null"] * shape.null + numbers + ["string"] * shape.string
    options: list[JSON] = [{"type": types if len(types) > 1 else types[0]}] if types else []
    return options + ([{"enum": list(shape.choices)}] if shape.choices else [])


def _list(option: ListShape, definitions: dict[type, JSON]) -> JSON:
    if option.fixed is None:
        return {"type": "array", "items": _value(option.item, definitions)}
    count = len(option.fixed)
    items = [_value(item, definitions) for item in option.fixed]
    return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}


def _default(field: dataclasses.Field) -> JSON:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return {}
    if dataclasses.is_dataclass(value):
        value = to_plain(value)
    return {"default": list(value) if isinstance(value, tuple) else value}


@cache
def field_docs(cls: type) -> dict[str, str]:
    """What is said of each field: `name: text` in the docstrings of the class and its bases, or a text below it."""
    told: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            told |= _named_in(base.__dict__.get("__doc__") or "", fields_of(cls).keys()) | _below_fields(base)
    return told


def _named_in(doc: str, names: Any) -> dict[str, str]:
    told: dict[str, str] = {}
    word = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    heading = re.compile(rf"(?:^|(?<=[.\n] ))((?:{word})(?:, (?:{word}))*): ") if word else None
    for paragraph in re.split(r"\n\s*(?:\n|\w+:\n)\s*", inspect.cleandoc(doc)) if heading else ():
        # Lines less indented than a text below its name begin something new; the rest of the text is one line.
        text = re.sub(r"\n\s+", " ", re.sub(rf"\n\s*(?=(?:{word})(?:, (?:{word}))*: )", "\n ", paragraph))
        parts = heading.split(text)
        for headed, said in zip(parts[1::2], parts[2::2], strict=True):
            told |= dict.fromkeys(headed.split(", "), " ".join(said.split()))
    return told


def _below_fields(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    except (OSError, SyntaxError):  # made without a source file
        return {}
    told = {}
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                told[name] = " ".join(text.split())
    return told


def _summary(cls: type) -> str:
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
