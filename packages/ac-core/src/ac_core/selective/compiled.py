"""Selective checkpointing of a block that torch.compile traces.

The compiler plans the recompute itself. It is told which ops to keep in torch's own terms, op by op, instead of call by
call: sites and kept calls (NOTE [ Kept calls ]) do not exist for it.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.contexts import ContextFn
from ac_core.selective.families import MATMUL, kind_of
from ac_core.selective.rule import SaveRule


def compiled_contexts(rule: SaveRule) -> ContextFn:
    """A context function for `torch.utils.checkpoint` under torch.compile."""
    # Dynamo takes a plain function, or a `partial` of one with constants: nothing else.
    return partial(_contexts, tuple(sorted(rule.families)), tuple(sorted(rule.ops)), rule.globs, rule.part_of_matmuls)


def _contexts(
    families: tuple[str, ...], ops: tuple[str, ...], globs: tuple[str, ...], part: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if globs:
        raise ActivationCheckpointingError(
            f"save or plan: {', '.join(map(repr, globs))} names modules, which torch.compile does not see; name "
            "families or ops such as 'aten::mm', or do not compile"
        )
    return create_selective_checkpoint_contexts(_Policy(SaveRule(frozenset(families), frozenset(ops), (), part)))


class _Policy:
    """Keeps what the rule keeps; of the matmuls every second, where it keeps part of them."""

    def __init__(self, rule: SaveRule) -> None:
        self._rule = rule
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: torch._ops.OpOverload, *_: Any, **__: Any) -> CheckpointPolicy:
        kind = kind_of(op)
        keep = self._rule.keeps(kind)
        if not keep and self._rule.part_of_matmuls and kind.family == MATMUL:
            keep = self._matmuls[context.is_recompute] % 2 == 0
            self._matmuls[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
