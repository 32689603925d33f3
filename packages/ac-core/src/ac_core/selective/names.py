"""Names in `save` and `plan` against the blocks that they are for: what fits nothing is told, or is an error.

Modules are there when a policy is applied. Which calls a block makes is known once a step has shown them.

NOTE [ Which steps judge ]
A block shows its calls in the backward of its first step. It is judged when the next step begins, together with all
that have shown theirs by then. The others are not waited for: a block that no gradient reaches, or that no forward
uses, shows none at all, and neither counts as one that has what is asked, nor as one that lacks it. One that comes
later is judged when the step after that begins. So the first step decides whether a name in `save` fits anything; with
`strict=False` a call that only later steps make is kept from then on.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ac_core.errors import ActivationCheckpointingError
from ac_core.report import names_text
from ac_core.selective.families import ATTENTION, COLLECTIVE

if TYPE_CHECKING:
    from ac_core.selective.plan import BlockPlan


@dataclass
class NamedCalls:
    """The families and ops that the rules of a model name.

    setting: that they come from. A name in `save` has to fit something in any block; what a `plan` says of a block, in
    that block. strict: raise where it does not, rather than warn. plans: of each block by name, several where it is
    checkpointed in pieces.
    """

    setting: str = "save"
    strict: bool = True
    plans: dict[str, list["BlockPlan"]] = field(default_factory=dict)

    def check(self, new: Sequence["BlockPlan"]) -> None:
        """Tell of names that fit no call, now that a step has shown those of `new`; see NOTE [ Which steps judge ].

        Raises:
            ActivationCheckpointingError: a name fits nothing. But for collectives: whether there are any is up to how
                ranks share a block, and not to the model. Warns of those, with `strict=False`, and of the blocks that
                lack what others have.
        """
        now = {id(plan) for plan in new}
        shown = {block: [plan for plan in plans if plan.shown] for block, plans in self.plans.items()}
        for name in sorted({name for plan in new for name in plan.rule.named}):
            asked = {block: plans for block, plans in shown.items() if plans and name in plans[0].rule.named}
            lacking = {block: plans for block, plans in asked.items() if _lack(plans, name)}
            nowhere = len(lacking) == len(asked)
            told = [block for block, plans in lacking.items() if any(id(plan) in now for plan in plans)]
            if not told:
                continue
            where = names_text(lacking if nowhere else told)
            text = (
                f"{self.setting}: {name!r} matches no call of {where} that could be kept"
                + "; attention written out as matmuls and softmax is none" * (name == ATTENTION)
            )
            if self.strict and name != COLLECTIVE and (nowhere or self.setting == "plan"):
                raise ActivationCheckpointingError(
                    f"{text}; leave it out, or turn 'strict' off, to do without until a later step makes such a call"
                )
            warnings.warn(text, stacklevel=2)


def _lack(plans: list["BlockPlan"], name: str) -> bool:
    """Whether a block was seen to make no such call. Around its attention it is checkpointed in pieces: that runs once,
    as if it were kept."""
    if name == ATTENTION and any(plan.piece for plan in plans):
        return False
    kinds = [site.kind for plan in plans for site in plan.sites.values()]
    return not any(name in kind.ops or name == kind.family for kind in kinds)
