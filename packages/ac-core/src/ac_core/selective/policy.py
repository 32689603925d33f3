"""The policy as `apply` uses it: what to keep in a set of blocks, checked before anything is changed."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import get_args

from torch import nn

from ac_core.config import FamilyName
from ac_core.discovery.blocks import Block
from ac_core.errors import ActivationCheckpointingError
from ac_core.selective.compiled import CompiledContextFn
from ac_core.selective.context import KeptCalls
from ac_core.selective.ops import check_op_name
from ac_core.selective.plan import ModelPlan, SaveRule
from ac_core.selective.sites import attach_sites


class SelectiveCalls:
    """Selective checkpointing of the blocks of one model."""

    def __init__(self, blocks: Sequence[Block], rule: SaveRule) -> None:
        self._plan = ModelPlan(rule)
        self._plans = [self._plan.add(block.name, block.module) for block in blocks]
        self.compiled = CompiledContextFn(rule)

    def attach(self, index: int, block: nn.Module) -> KeptCalls:
        """Prepare the modules inside the block; the context function to checkpoint it with."""
        attach_sites(block, self._plans[index])
        return KeptCalls(self._plan, self._plans[index])


def select_calls(blocks: Sequence[Block], save: Sequence[str] | None) -> SelectiveCalls:
    """The policy for `blocks` under the `save` setting.

    Raises:
        ActivationCheckpointingError: a name in `save` that fits nothing in these blocks; a block, or a module in one,
            that is compiled already.
    """
    for name in save or ():
        if "::" in name:
            problem = check_op_name(name, imported=True)
        elif name in get_args(FamilyName):
            problem = None
        else:
            problem = _no_module(name, blocks)
        if problem:
            raise ActivationCheckpointingError(f"save: {problem}")
    for block in blocks:
        for path, module in block.module.named_modules():
            if _is_compiled(module):
                name = f"{block.name}.{path}" if path else block.name
                raise ActivationCheckpointingError(
                    f"'{name}' is compiled already, so that its calls cannot be kept one by one and 'selective' would "
                    "silently become 'full'; apply checkpointing first and compile afterwards: the compiler then keeps "
                    "what the policy says"
                )
    return SelectiveCalls(blocks, SaveRule.of(save))


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return hasattr(forward, "_torchdynamo_orig_callable") or module._compiled_call_impl is not None


def _no_module(glob: str, blocks: Sequence[Block]) -> str | None:
    paths = {path for block in blocks for path, _ in block.module.named_modules() if path}
    rule = SaveRule.of((glob,))
    if any(rule.keeps_module(block.name, path) for block in blocks for path, _ in block.module.named_modules() if path):
        return None
    close = get_close_matches(glob, (*get_args(FamilyName), *sorted(paths)), n=3)
    hint = f"; near matches: {', '.join(map(repr, close))}" if close else ""
    return f"{glob!r} is no family and matches no module in the checkpointed blocks{hint}"
