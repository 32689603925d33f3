"""transformers' configuration classes read as text: which there are, and what the source of one says.

Importing transformers takes seconds and brings torch, so `check` parses the source of the few classes that a recipe
names.
"""

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ac_recipes.errors import UsageError

_MAPPING = re.compile(r'^\s*\(?"([\w.-]+)"[,:] "(\w+)"\)?,$', re.MULTILINE)

_NOT_A_PAIR = {"gpt-sw3": "GPT2Config"}
_OTHER_FOLDER = {"gpt-sw3": "gpt2"}


class Part(NamedTuple):
    """A configuration inside of another.

    kind: its class; None: the one of its `model_type`. model_type: where it gives none itself; None: it has to.
    settings: fields that the whole gives it, whether or not its class has them: the model of the whole may read them.
    """

    kind: str | None
    model_type: str | None
    settings: frozenset[str] = frozenset()


@dataclass
class ConfigSource:
    """What the source of a configuration class says.

    kind: its name. module: the folder that it is in.
    fields: the annotation of each field, as written.
    numbers: the defaults that are written as plain integers.
    aliases: other names of fields.
    parts: the fields that hold a configuration of their own.
    multiples: pairs of fields of which its validator wants the first to be a multiple of the second.
    words: every name and string in the class and in its bases. A name that is none of them is read by nobody.
    """

    kind: str
    module: str
    fields: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    multiples: list[tuple[str, str]] = field(default_factory=list)
    words: set[str] = field(default_factory=set)


@cache
def architectures() -> dict[str, str]:
    """The configuration class of each `model_type` that transformers knows."""
    # "mlcd": "MLCDVisionConfig", and ("llama", "LlamaConfig"), alike
    found = {name: kind for name, kind in _names_in_the_mappings() if kind.endswith("Config")}
    found |= _NOT_A_PAIR
    return dict(sorted(found.items()))


def source_of(model_type: str) -> ConfigSource:
    """What the source of the configuration class of an architecture says."""
    return config_source(architectures()[model_type], _module_of(model_type))


def source_of_part(whole: ConfigSource, kind: str) -> ConfigSource | None:
    """What the source of `kind` says, a class that `whole` names as that of a part; None: it cannot be found."""
    if kind in _classes(whole.module):
        return config_source(kind, whole.module)
    elsewhere = [model_type for model_type, name in architectures().items() if name == kind]
    return source_of(elsewhere[0]) if elsewhere else None


@cache
def config_source(kind: str, module: str) -> ConfigSource:
    """What the source of the class `kind` in `models/{module}` and of its bases says."""
    classes = _classes(module)
    source = ConfigSource(kind, module, words=set().union(_generation_words(), *map(_words, _trees(module))))
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
        source.parts = source.parts or _parts(node)
        ahead += [name.id for name in node.bases if isinstance(name, ast.Name)]
    return source


@cache
def activation_functions() -> tuple[str, ...]:
    """The names that transformers has for activation functions, the keys of its `ACT2CLS`."""
    for node in _parse("activations.py").body:
        match node:
            case ast.Assign(targets=[ast.Name(id="ACT2CLS")], value=ast.Dict(keys=keys)):
                return tuple(key.value for key in keys if isinstance(key, ast.Constant))
    raise LookupError("transformers.activations has no dictionary ACT2CLS")


def _classes(module: str) -> dict[str, ast.ClassDef]:
    trees = [_parse("configuration_utils.py"), *_trees(module)]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _trees(module: str) -> list[ast.Module]:
    folder = f"models/{module}"
    return [_parse(f"{folder}/{path.name}") for path in sorted(_path(folder).glob("configuration_*.py"))]


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


def _parts(node: ast.ClassDef) -> dict[str, Part]:
    """`sub_configs_defaults`, or `sub_configs` (all classes of 5.17, some of 5.24): by name a class, or a
    `SubConfigSpec(config_class=AutoConfig, model_type="llama")`."""
    found = {}
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id="sub_configs_defaults" | "sub_configs")], value=ast.Dict() as parts):
                for name, value in zip(parts.keys, parts.values, strict=True):
                    if isinstance(name, ast.Constant):
                        found[str(name.value)] = _part(value)
    return found


def _part(node: ast.expr) -> Part:
    given = {}
    if isinstance(node, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        node = given["config_class"] if "config_class" in given else node.args[0]
    kind, model_type = ast.unparse(node), given.get("model_type")
    default = model_type.value if isinstance(model_type, ast.Constant) else None
    settings = _words(given["init_kwargs"]) if "init_kwargs" in given else set()
    return Part(None if kind == "AutoConfig" else kind, default, frozenset(settings))


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


@cache
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
