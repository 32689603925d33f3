"""Attributes and buffers under checkpointing: the recompute finds them as its forward did, and changes nothing.

A counter that a forward counts up, a mask that it caches (`None` before, a tensor after), a list that it appends to,
`training` itself: the recompute gets each as it stood when its forward began, and afterwards the modules are as they
were before the recompute. So everything is counted once, and a loss that a block leaves in an attribute stays the
forward's, with the forward's graph.
"""

from typing import Any, NamedTuple

from ac_core.region.found import Found, Undo
from ac_core.region.generators import set_state, state_of
from ac_core.region.layout import Layout
from ac_core.region.tensors import HeldTensor, TensorLearner


class _Noted(NamedTuple):
    found: Found
    held: dict[int, HeldTensor]
    generators: list[tuple[Any, Any]]


class _Taken(NamedTuple):
    undo: Undo
    generators: list[tuple[Any, Any]]


class KeptAttributes:
    """The part of a block's state that its modules hold. A `Part`, see `region/state.py`.

    Almost every block changes nothing. So what one forward found is used again by the next as long as the very same
    objects are found, which one comparison tells. It costs more where a block has buffers or changes.

    A block that does change attributes must not run in two threads at once, in a forward here and a recompute there;
    the backward may run in any thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._layout: Layout | None = None
        self._learner = TensorLearner()
        self._last: Found | None = None

    def note(self, layout: Layout) -> _Noted:
        if layout is not self._layout:
            self._layout, self._learner, self._last = layout, TensorLearner(), None
        found = self._last
        if found is None or not found.still():
            found = Found(layout, self.name)
        return _Noted(
            found,
            self._learner.hold(found.tensors) if found.tensors else {},
            [(generator, state_of(generator)) for generator in found.generators],
        )

    def settle(self, noted: _Noted, failed: bool) -> None:
        found, held, _ = noted
        if found is not self._last or found.tensors:
            # Not where something has changed: the next forward would find it new, and until then an old tensor was
            # kept alive.
            self._last = found if found.lasting and found.still() else None
        if held:
            self._learner.settle(held, found.say, failed=failed)

    def restore(self, noted: _Noted) -> _Taken:
        found, held, generators = noted
        substitutes = {key: tensor.as_found(found.say) for key, tensor in held.items()}
        undo = found.put_in(lambda tensor: substitutes.get(id(tensor), tensor))
        taken = _Taken(undo, [(generator, state_of(generator)) for generator, _ in generators])
        for generator, state in generators:
            set_state(generator, state)
        return taken

    def release(self, noted: _Noted, taken: _Taken) -> None:
        noted.found.take_out(taken.undo)
        for generator, state in taken.generators:
            set_state(generator, state)
