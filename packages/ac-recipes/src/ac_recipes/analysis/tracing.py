"""Which ops of a recipe's blocks are saved and which are run again."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ac_core import Trace, TracedOp, trace_decisions
from ac_recipes.analysis.applying import applied
from ac_recipes.analysis.planning import with_plan
from ac_recipes.analysis.policies import asked_policy
from ac_recipes.analysis.subject import real_subject, refused_as_usage
from ac_recipes.recipe import Recipe


@dataclass(frozen=True)
class OpRow:
    """Calls of one op, of one output shape, by one layer in blocks next to one another.

    decision: `SAVE`, `RECOMPUTE`, or `ALTERNATE` where some calls are saved and some are not. nbytes, flops: of all.
    reason: of the first.
    """

    blocks: str
    layer: str
    op: str
    shape: tuple[int, ...]
    decision: str
    calls: int
    nbytes: int
    flops: int
    reason: str


def trace_recipe(recipe: Recipe) -> Trace:
    """The ops of a step on the recipe's first local batch: one that comes after what `selective` learns from.

    Raises:
        UsageError: checkpointing is off in the recipe, or cannot be applied; its model or data cannot be had.
    """
    asked = asked_policy(recipe)
    subject = real_subject(recipe)
    config = with_plan(recipe, asked, device=subject.device.type)
    with refused_as_usage(), applied(subject.model, config):
        subject.model(**subject.batch).backward()
        subject.model.zero_grad(set_to_none=True)
        with trace_decisions() as trace:
            subject.model(**subject.batch).backward()
    return trace


def summary(ops: Iterable[TracedOp]) -> list[OpRow]:
    """One row for each op and layer over all blocks, in the order of the first."""
    groups: dict[tuple[object, ...], list[TracedOp]] = {}
    for traced in ops:
        groups.setdefault((_indexless(traced.block), traced.layer, traced.op, traced.shape), []).append(traced)
    return [_row(several) for several in groups.values()]


def _row(several: list[TracedOp]) -> OpRow:
    first = several[0]
    names = list(dict.fromkeys(traced.block for traced in several))
    last_index = names[-1].rpartition(".")[2]
    decisions = {traced.decision for traced in several}
    return OpRow(
        blocks=first.block if len(names) == 1 else f"{first.block}-{last_index} ({len(names)})",
        layer=first.layer,
        op=first.op,
        shape=first.shape,
        decision=decisions.pop() if len(decisions) == 1 else "ALTERNATE",
        calls=len(several),
        nbytes=sum(traced.nbytes for traced in several),
        flops=sum(traced.flops for traced in several),
        reason=first.reason,
    )


def _indexless(name: str) -> str:
    return re.sub(r"\d+$", "", name)
