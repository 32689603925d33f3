"""The model section against transformers' configuration classes, read as text.

Importing transformers takes seconds and brings torch, so `check` parses the source of the one class instead: which
architectures there are, which fields a class declares, and of which types. `model_config` asks the class itself, where
transformers is loaded anyway; it also finds what only the class's own validators know.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ac_recipes.errors import UsageError
from ac_recipes.reader import Problem
from ac_recipes.reader.mistakes import short
from ac_recipes.recipe import Recipe

SET_ELSEWHERE = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attn_implementation",
    "_attn_implementation": "model.attn_implementation",
}
"""Fields that transformers would take and the model section decides."""

_MAPPING = re.compile(r'^\s*\(?"([\w.-]+)"[,:] "(\w+)"\)?,$', re.MULTILINE)
_PLAIN = {"int": int, "float": (float, int), "str": str, "bool": bool, "list": list, "tuple": list, "dict": dict}

_NOT_A_PAIR = {"gpt-sw3": "GPT2Config"}
_OTHER_FOLDER = {"gpt-sw3": "gpt2"}


@dataclass
class ConfigSource:
    """What the source of a configuration class says.

    fields: the annotation of each field, as written.
    numbers: the defaults that are written as plain integers.
    aliases: other names of fields.
    multiples: pairs of fields of which its validator wants the first to be a multiple of the second.
    words: every name and string in the class and in its bases. A name that is none of them is read by nobody.
    """

    fields: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    multiples: list[tuple[str, str]] = field(default_factory=list)
    words: set[str] = field(default_factory=set)


def field_problems(fields: dict[str, Any]) -> Iterator[Problem]:
    """What can be told of `model.config` without importing transformers.

    Raises:
        UsageError: transformers is not installed.
    """
    known, model_type = architectures(), fields.get("model_type")
    if not isinstance(model_type, str):  # which the section itself refuses
        return
    if model_type not in known:
        near = get_close_matches(model_type, known, n=1)
        yield Problem(
            path=("model", "config", "model_type"),
            message=f"transformers has no architecture {model_type!r}",
            suggestion=near[0] if near else None,
        )
        return
    for name in sorted(SET_ELSEWHERE.keys() & fields.keys()):
        yield Problem(path=("model", "config", name), message=f"set {SET_ELSEWHERE[name]} instead", at_key=True)
    kind = known[model_type]
    source = config_source(kind, _module_of(model_type))
    for name, other in source.aliases.items():
        if name in fields and other in fields:
            message = f"{name!r} is another name of {other!r}, which is given too; give one"
            yield Problem(path=("model", "config", name), message=message, at_key=True)
    for name, value in fields.items():
        annotation = source.fields.get(source.aliases.get(name, name))
        if annotation is not None and not _may_be(annotation, value):
            message = f"expected {annotation}, got {type(value).__name__} (value: {short(value)})"
            yield Problem(path=("model", "config", name), message=message)
        elif annotation is None and name != "model_type" and name not in SET_ELSEWHERE and name not in source.words:
            near = get_close_matches(name, sorted(source.fields.keys() | source.aliases.keys()), n=1)
            yield Problem(
                path=("model", "config", name),
                message=f"unknown field of {kind}",
                suggestion=near[0] if near else None,
                at_key=True,
            )
    yield from _not_multiples(source, fields)


def check_declared_length(recipe: Recipe) -> Iterator[Problem]:
    """`check_length` for the positions that `model.config` gives."""
    most = (recipe.model.config or {}).get("max_position_embeddings")
    if isinstance(most, int):
        yield from check_length(recipe, most)


def _not_multiples(source: ConfigSource, given: dict[str, object]) -> Iterator[Problem]:
    values = source.numbers | {source.aliases.get(name, name): value for name, value in given.items()}
    for whole, part in source.multiples:
        left, right = values.get(whole), values.get(part)
        if isinstance(left, int) and isinstance(right, int) and right and left % right:
            yield Problem(path=("model", "config"), message=f"{whole} {left} is not a multiple of {part} {right}")


def check_length(recipe: Recipe, most: int) -> Iterator[Problem]:
    """Whether the sequences have more tokens than the model has positions."""
    remedy = "shorten the sequences"
    if recipe.model.pretrained_model_name_or_path is None:
        remedy += ", or raise model.config.max_position_embeddings"
    for section in ("dataset", "validation_dataset"):
        data = getattr(recipe, section)
        if data is not None and data.sequence_length > most > 0:
            message = f"{data.sequence_length} tokens are more than the {most} positions of the model; {remedy}"
            yield Problem(path=(section, "sequence_length"), message=message)


@cache
def architectures() -> dict[str, str]:
    """The configuration class of each `model_type` that transformers knows."""
    # "mlcd": "MLCDVisionConfig", and ("llama", "LlamaConfig"), alike
    found = {name: kind for name, kind in _names_in_the_mappings() if kind.endswith("Config")}
    found |= _NOT_A_PAIR
    return dict(sorted(found.items()))


@cache
def config_source(kind: str, module: str) -> ConfigSource:
    """What the source of the class `kind` in `models/{module}` and of its bases says."""
    own = [_parse(f"models/{module}/{path.name}") for path in _path(f"models/{module}").glob("configuration_*.py")]
    trees = [_parse("configuration_utils.py"), *own]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    source = ConfigSource(words=set().union(_generation_words(), *map(_words, own)))
    ahead = [kind]
    while ahead:
        node = classes.get(ahead.pop())
        if node is None:  # a mixin of another module: it has methods and no fields
            continue
        source.words |= _words(node)
        source.fields = _annotations(node) | source.fields
        source.numbers = _integers(node) | source.numbers
        source.multiples += _multiples(node)
        source.aliases = _attribute_map(node) | source.aliases
        ahead += [name.id for name in node.bases if isinstance(name, ast.Name)]
    return source


def _module_of(model_type: str) -> str:
    named = [name for key, name in _names_in_the_mappings() if key == model_type and _path(f"models/{name}").is_dir()]
    return named[-1] if named else _OTHER_FOLDER.get(model_type, model_type.replace("-", "_"))


@cache
def _names_in_the_mappings() -> tuple[tuple[str, str], ...]:
    texts = (_read("models/auto/auto_mappings.py"), _read("models/auto/configuration_auto.py"))
    return tuple(found for text in texts for found in _MAPPING.findall(text))


def _generation_words() -> set[str]:
    """Rotary settings and what only generation reads: the base class takes these from other modules' lists."""
    return _words(_parse("modeling_rope_utils.py")) | set(
        re.findall(r"self\.(\w+)\b", _read("generation/configuration_utils.py"))
    )


def _annotations(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            written = ast.unparse(item.annotation)
            if not written.startswith("ClassVar"):
                found[item.target.id] = written
    return found


def _integers(node: ast.ClassDef) -> dict[str, int]:
    found = {}
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=int(number))):
                found[name] = number
    return found


def _multiples(node: ast.ClassDef) -> list[tuple[str, str]]:
    """`if self.hidden_size % self.num_attention_heads != 0: raise ...`, which is most of what the validators ask."""
    found = []
    for test in (item.test for item in ast.walk(node) if isinstance(item, ast.If) and _raises(item)):
        written = re.fullmatch(r"self\.(\w+) % self\.(\w+)( != 0)?", ast.unparse(test))
        found += [(written[1], written[2])] if written else []
    return found


def _raises(branch: ast.If) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in branch.body)


def _attribute_map(node: ast.ClassDef) -> dict[str, str]:
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as value):
                return ast.literal_eval(value)
    return {}


def _words(tree: ast.AST) -> set[str]:
    """Strings, parameters and attributes, as `kwargs.pop("rope_theta")` and `self.rope_theta` have them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text.isidentifier():
                found.add(text)
            case ast.arg(arg=name) | ast.Attribute(attr=name):
                found.add(name)
    return found


def _may_be(annotation: str, value: object) -> bool:
    """Whether `value` could be right. What transformers makes of numbers and of its own types is left to it."""
    outer, nested = annotation, True
    while nested:
        outer, nested = re.subn(r"\[[^\[\]]*\]", "", outer)
    members = [member.strip() for member in outer.split("|")]
    if any(member not in _PLAIN and member != "None" for member in members):
        return True
    if value is None:
        return "None" in members
    return any(isinstance(value, _PLAIN[member]) for member in members if member != "None")


def _parse(path: str) -> ast.Module:
    return ast.parse(_read(path))


@cache
def _read(path: str) -> str:
    return _path(path).read_text(encoding="utf-8")


def _path(path: str) -> Path:
    spec = find_spec("transformers")  # looks for it and does not load it
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("transformers is not installed; ac-recipes doctor tells the command")
    return Path(spec.submodule_search_locations[0]) / path
