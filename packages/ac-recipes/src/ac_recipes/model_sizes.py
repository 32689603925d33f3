"""Values of a model's configuration that no model can have: sizes below 1, names of no activation function.

transformers takes most of them, and the model fails when it is built, or in its first step.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ac_recipes.config_source import ConfigSource, activation_functions
from ac_recipes.reader import Problem
from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.reader.suggest import closest

_SIZE = re.compile(r"(num|n)_\w+|\w+_(sizes?|dim|heads?|layers?|channels|experts)|max_position_embeddings|depth")
_MAY_BE_0 = re.compile(r"shared|mtp|nextn|window|adapter|chunk|type_vocab|residual|register|proj|labels|group|expert")
"""In the names of sizes and counts that are of a part which may be missing."""
_NOT_NEGATIVE = re.compile(r"\w*(_eps|_epsilon|epsilon)|initializer_range")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the experts of a layer."""
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
"""And how many of them a token goes to."""


def value_problems(source: ConfigSource, given: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    """What is wrong with single values of `given`, the fields of a configuration with `source` at `path`."""
    for name, value in given.items():
        known = source.aliases.get(name, name)
        if isinstance(value, bool) or not source.fields.keys() & {known, name}:
            continue
        least = _least(known, name, source)
        if isinstance(value, int) and least is not None and value < least:
            message = f"{value} is not a whole number of at least {least}"
            yield Problem(path=(*path, name), message=message)
        elif isinstance(value, int | float) and _NOT_NEGATIVE.fullmatch(name) and value < 0:
            yield Problem(path=(*path, name), message=f"{value!r} is negative; give 0 or more, such as 1.0e-5")
        elif name in _ACTIVATIONS and isinstance(value, str) and value not in (names := activation_functions()):
            message = f"transformers has no activation function {value!r}; it has {', '.join(names)}"
            near = closest(value, names)
            said = f"transformers has no activation function {value!r}" if near else message
            yield Problem(path=(*path, name), message=said, suggestion=near)


def _least(known: str, name: str, source: ConfigSource) -> int | None:
    """The least that the size or count `known`, written as `name`, may be; None: it is neither, or it is not known."""
    if not (_SIZE.fullmatch(known) or _SIZE.fullmatch(name)):
        return None
    default = source.numbers.get(known, source.numbers.get(name, 1))
    if default < 1:
        return None if default < 0 else 0
    return 0 if _MAY_BE_0.search(name) and name not in _CHOSEN else 1


def pair_problems(
    source: ConfigSource, given: dict[str, Any], path: KeyPath, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> Iterator[Problem]:
    """What is wrong between two values of `given`, or of `defaults` where it has none: fields that are to be multiples,
    and experts."""
    written = {source.aliases.get(name, name): name for name in given}
    values = {source.aliases.get(name, name): value for name, value in [*defaults.items(), *given.items()]}
    heads = [("num_attention_heads", "num_key_value_heads")]
    for whole, part in dict.fromkeys([*source.multiples, *heads]):
        left, right = values.get(whole), values.get(part)
        if _is_count(left) and _is_count(right) and left % right:
            message = f"{written.get(whole, whole)} {left} is not a multiple of {written.get(part, part)} {right}"
            yield Problem(path=path, message=message)
    for chosen in _CHOSEN:
        experts = next((name for name in EXPERTS if _is_count(values.get(name))), None)
        if experts and _is_count(values.get(chosen)) and values[chosen] > values[experts]:
            message = f"{chosen} {values[chosen]} is more than {written.get(experts, experts)} {values[experts]}"
            yield Problem(path=path, message=message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
