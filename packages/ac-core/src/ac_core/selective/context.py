"""Selective checkpointing of one block, in the shape of a context function."""

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from ac_core.selective.kept import Region, entered
from ac_core.selective.observe import Observer, is_early_stop, outer_hooks_active
from ac_core.selective.plan import BlockPlan, ModelPlan
from ac_core.selective.sites import functions_of


class KeptCalls:
    """A context function, `() -> (forward, recompute)`, for one block.

    Where somebody else's saved-tensor hooks are active (an outer checkpoint, offloading to the host), nothing is kept:
    what is kept would be out of their reach, and hold the memory that they are there to free.
    """

    def __init__(self, model: ModelPlan, plan: BlockPlan) -> None:
        self.model = model
        self.plan = plan

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if outer_hooks_active():
            return _Aside(), _Aside()
        self.model.decide()
        region = Region(self.plan.decision, None if self.plan.learnt else Observer(self.plan))
        return _Pass(region, self.plan, recomputing=False), _Pass(region, self.plan, recomputing=True)


class _Pass:
    """The context of one pass over a region: its forward, or a recompute. May be entered again."""

    def __init__(self, region: Region, plan: BlockPlan, *, recomputing: bool) -> None:
        self._region = region
        self._plan = plan
        self._recomputing = recomputing
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        self._region.counts = {}
        self._region.recomputing = self._recomputing
        stack = ExitStack()
        stack.enter_context(entered(self._region))
        stack.enter_context(functions_of(self._region, ""))
        self._entered.append(stack)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().close()
        region = self._region
        if region.observer is not None:
            region.observer.end(region, kind)
        elif self._recomputing and (kind is None or is_early_stop(kind)):
            self._plan.not_asked_for([key for key, kept in region.kept.items() if kept.outputs is not None])


class _Aside:
    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(entered(None))
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(None, None, None)
