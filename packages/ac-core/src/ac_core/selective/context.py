"""Selective checkpointing of one block, in the shape of a context function."""

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ac_core.errors import ActivationCheckpointingError
from ac_core.selective.kept import Region, entered
from ac_core.selective.observe import Observer, innermost_hooks, is_early_stop
from ac_core.selective.plan import BlockPlan, ModelPlan
from ac_core.selective.sites import attach_sites, detach_sites, functions_of


class KeptCalls:
    """A context function, `() -> (forward, recompute)`, for one block.

    Where somebody else's saved-tensor hooks are active (an outer checkpoint, offloading to the host), nothing is kept:
    what is kept would be out of their reach, and hold the memory that they are there to free.
    """

    def __init__(self, model: ModelPlan, plan: BlockPlan, block: nn.Module) -> None:
        self.model = model
        self.plan = plan
        self.block = block

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if innermost_hooks() is not None:
            return _Aside(), _Aside()
        self.model.decide(self.plan)
        region = Region(self.plan, self.plan.decision, None if self.plan.learnt else Observer(self.plan))
        return _Pass(region, self.block, recomputing=False), _Pass(region, self.block, recomputing=True)


class _Pass:
    """The context of one pass over a region: its forward, or a recompute.

    May be entered again, and inside of itself: a block that asks for a gradient in its forward is recomputed in the
    middle of that.
    """

    def __init__(self, region: Region, block: nn.Module, *, recomputing: bool) -> None:
        self._region = region
        self._block = block
        self._recomputing = recomputing
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        if any(map(_is_selective, _get_current_dispatch_mode_stack())):
            raise ActivationCheckpointingError(
                "policy 'selective' cannot run inside a dispatch mode of torch's selective checkpointing (context_fn=),"
                " which counts ops which the recompute does not run; use one of the two"
            )
        region, stack = self._region, ExitStack()
        stack.callback(_restore, region, region.counts, region.recomputing, region.mode, region.hooks)
        region.counts, region.recomputing, region.mode = {}, self._recomputing, None
        region.hooks = innermost_hooks()
        if not region.plan.attached:  # checkpointing was taken off while this graph was alive
            attach_sites(self._block, region.plan)
            stack.callback(detach_sites, self._block)
        stack.enter_context(entered(region))
        stack.enter_context(functions_of(region, ""))
        self._entered.append(stack)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        region = self._region
        if region.observer is not None:
            region.observer.end(region, kind)
        elif self._recomputing and (kind is None or is_early_stop(kind)):
            region.plan.served(region.kept)
        self._entered.pop().close()


def _restore(region: Region, counts: Any, recomputing: bool, mode: Any, hooks: Any) -> None:
    region.counts, region.recomputing, region.mode, region.hooks = counts, recomputing, mode, hooks


def _is_selective(mode: object) -> bool:
    return type(mode).__module__ == "torch.utils.checkpoint"


class _Aside:
    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(entered(None))
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(None, None, None)
