"""A section of an AutoModel recipe, as the tables describe it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ac_recipes.automodel.rules import Rule


@dataclass(frozen=True)
class Target:
    """What a `_target_` stands for: fields, and rules for the keys beside it; or why it is not supported."""

    fields: Mapping[str, object] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True)
class Section:
    """A mapping of an AutoModel recipe.

    rules: for the keys whose meaning differs from that of our field of the same name.
    targets: the `_target_` names it may have.
    switch: the key whose `false` turns the section off, where leaving the section out does the same.
    refused: why it is not supported at all, unless it is turned off.
    remedy: what to write in place of a `_target_` that is not known.
    pattern: for `_target_` names that follow a rule: gives a `Target`, or None.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=dict)
    switch: str | None = None
    refused: str | None = None
    remedy: str | None = None
    pattern: Callable[[str], Target | None] = lambda _name: None

    def target(self, name: str) -> Target | None:
        """What `name` stands for here; None if it is not known."""
        return self.targets.get(name) or self.pattern(name)

    def with_rules(self, rules: Mapping[str, Rule]) -> "Section":
        """This section with further rules."""
        return replace(self, rules={**self.rules, **rules})


def named(*names: str, target: Target) -> dict[str, Target]:
    """One target under several names: classes move between releases."""
    return dict.fromkeys(names, target)
