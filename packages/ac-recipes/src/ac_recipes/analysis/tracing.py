"""Which ops of a recipe's blocks are saved and which are run again."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ac_core import Trace, TracedOp, trace_decisions
from ac_core.proof.trace import unique_decision
from ac_recipes.analysis.applying import applied
from ac_recipes.analysis.planning import with_plan
from ac_recipes.analysis.policies import asked_policy
from ac_recipes.analysis.subject import real_subject, refused_as_usage
from ac_recipes.recipe import Recipe


@dataclass(frozen=True)
class OpRow:
    """Calls of one op, of one output shape, by one layer in blocks next to one another.

    decision: as `unique_decision` of ac-core sums them up. nbytes, flops: of all.
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
    """One row for each op and layer over all blocks, in the order of the first; calls that are neither saved nor
    recomputed have a row of their own, so that the rows of a decision add up."""
    groups: dict[tuple[object, ...], list[TracedOp]] = {}
    for traced in ops:
        key = (_indexless(traced.block), traced.layer, traced.op, traced.shape, traced.decision == "NEITHER")
        groups.setdefault(key, []).append(traced)
    return [_row(several) for several in groups.values()]


def _row(several: list[TracedOp]) -> OpRow:
    first = several[0]
    names = list(dict.fromkeys(traced.block for traced in several))
    last_index = names[-1].rpartition(".")[2]
    return OpRow(
        blocks=first.block if len(names) == 1 else f"{first.block}-{last_index} ({len(names)})",
        layer=first.layer,
        op=first.op,
        shape=first.shape,
        decision=unique_decision(several),
        calls=len(several),
        nbytes=sum(traced.nbytes for traced in several),
        flops=sum(traced.flops for traced in several),
        reason=first.reason,
    )


def _indexless(name: str) -> str:
    return re.sub(r"\d+$", "", name)
