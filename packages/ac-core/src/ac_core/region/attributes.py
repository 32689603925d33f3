"""Attributes and buffers under checkpointing: the recompute finds them as its forward did, and changes nothing.

A counter that a forward counts up, a mask that it caches (`None` before, a tensor after), a list that it appends to,
`training` itself: the recompute gets each as it stood when its forward began, and afterwards the modules are as they
were before the recompute. So everything is counted once, and a loss that a block leaves in an attribute stays the
forward's, with the forward's graph.
"""

from types import TracebackType
from typing import Any

from torch import nn

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.found import Found
from ac_core.region.generators import set_state, state_of
from ac_core.region.holders import Contents, Holder, same
from ac_core.region.tensors import TensorLearner
from ac_core.region.walk import modules_of


class KeptAttributes:
    """A context function, `() -> (forward, recompute)`, for one block.

    Almost every block changes nothing. So what one forward found is used again by the next as long as the very same
    objects are found: one comparison a forward. What is kept costs more where a block has buffers or changes.

    A block that does change attributes must not run in two threads at once, in a forward here and a recompute there;
    the backward may run in any thread.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        self.learner = TensorLearner()
        self.last: Found | None = None

    def __getstate__(self) -> dict[str, Any]:  # what was learnt is of this block and not of its copies
        return {"block": self.block, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __call__(self) -> tuple["_Forward", "_Recompute"]:
        forward = _Forward(self)
        return forward, _Recompute(forward)


class _Forward:
    """Finds the state of the block before the forward."""

    def __init__(self, kept: KeptAttributes) -> None:
        self.kept = kept
        self.found: Found

    def __enter__(self) -> None:
        kept, modules = self.kept, modules_of(self.kept.block)
        last = kept.last
        if last is not None and last.modules == modules and last.still(last.look()):
            self.found = last
        else:
            self.found = Found(modules, kept.name, kept.learner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        found, kept = self.found, self.kept
        if found is kept.last:
            return
        kept.learner.settle(found.tensors, found.say, failed=kind is not None)
        # Not where something has changed: the next forward would find it new, and until then old values were held.
        kept.last = found if found.constant and found.still(found.look()) else None


class _Recompute:
    """Puts what the forward found in for the time of a recompute. May be entered again, for a second backward."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._live: list[tuple[list[tuple[Holder, Contents]], list[tuple[Any, Any]]]] = []

    def __enter__(self) -> None:
        found = self._forward.found
        if found.modules != modules_of(self._forward.kept.block):
            raise ActivationCheckpointingError(
                f"block '{self._forward.kept.name}' has other modules than in its forward, so the recompute would give "
                "gradients of another function; add and replace modules before the forward"
            )
        if found.constant and found.still(found.look()):
            self._live.append((found.holders, []))
            return
        before = found.contents()
        live = [(holder, holder.read()) for holder, _ in found.holders]
        generators = [(generator, state_of(generator)) for generator, _ in found.generators]
        self._live.append((live, generators))
        _put(before)
        for generator, state in found.generators:
            set_state(generator, state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        found = self._forward.found
        live, generators = self._live.pop()
        if live is found.holders and found.still(found.look()):
            return
        _put(live)
        for generator, state in generators:
            set_state(generator, state)


def _put(contents: list[tuple[Holder, Contents]]) -> None:
    for holder, content in contents:
        if not same(holder.read(), content):
            holder.write(content)
