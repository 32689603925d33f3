"""Whether checkpointing as the recipe asks for it changes a bit, and what it saves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ac_core
from ac_core import Usage, Verification
from ac_recipes.analysis.applying import applied
from ac_recipes.analysis.planning import with_plan
from ac_recipes.analysis.policies import asked_policy
from ac_recipes.analysis.subject import Subject, real_subject, refused_as_usage
from ac_recipes.recipe import Recipe


@dataclass(frozen=True)
class VerifiedRecipe:
    """verification: bit for bit. without, with_checkpointing: what a forward and backward takes."""

    subject: Subject
    verification: Verification
    without: Usage
    with_checkpointing: Usage

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        saved = {"without": self.without.saved_bytes, "with": self.with_checkpointing.saved_bytes}
        return self.verification.to_dict() | {"saved_bytes": saved}


def verify_recipe(recipe: Recipe, *, say: Callable[[str], None] = lambda _: None) -> VerifiedRecipe:
    """The recipe's first local batch, with its checkpointing against without.

    say: is told of the steps before they begin.

    Raises:
        UsageError: checkpointing is off in the recipe, or cannot be applied; its model or data cannot be had.
    """
    asked = asked_policy(recipe)
    subject = real_subject(recipe)
    config = with_plan(recipe, asked, device=subject.device.type)
    say("six steps of the model, four of them compared")
    with refused_as_usage():
        verification = ac_core.verify(subject.model, subject.batch, config)
        without = ac_core.measure(subject.model, subject.batch)
        with applied(subject.model, config):
            usage = ac_core.measure(subject.model, subject.batch)
    return VerifiedRecipe(subject, verification, without, usage)
