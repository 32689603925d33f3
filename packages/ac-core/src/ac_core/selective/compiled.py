"""Selective checkpointing of a block that torch.compile traces.

The compiler plans the recompute itself. It is told which ops to keep in torch's own terms, op by op, instead of call by
call: sites and kept calls (NOTE [ Kept calls ]) do not exist for it.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ac_core.selective.families import MATMUL, kind_of
from ac_core.selective.plan import SaveRule


class CompiledContextFn:
    """A context function for `torch.utils.checkpoint` under torch.compile."""

    def __init__(self, rule: SaveRule) -> None:
        self.rule = rule

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return create_selective_checkpoint_contexts(_Policy(self.rule))


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
