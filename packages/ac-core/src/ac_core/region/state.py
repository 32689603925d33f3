"""State that a recompute must see as its forward did, put together for one block."""

from types import TracebackType
from typing import Any, Protocol

from torch import nn

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.ambient import AmbientSwitches
from ac_core.region.attributes import KeptAttributes
from ac_core.region.contexts import ContextFn
from ac_core.region.layout import Layout, modules_of
from ac_core.region.parameters import SameParameters
from ac_core.region.randomness import ReplayedRandomness


def state_contexts(block: nn.Module, name: str) -> list[ContextFn]:
    """The context functions that a checkpointed block needs, outermost first.

    What torch's checkpoint restores by itself is not repeated: the default random number generators of the CPU and of
    the devices of the region's inputs, autocast of the CPU and of one device type, `with torch.device(...)`, grad mode.

    They belong outside all other contexts, so that no mode sees what they do, and to eager mode alone:
    `torch.compile` cannot trace them, and what it compiles has no recompute in Python to restore anything for.
    """
    return [BlockState(block, name)]


class Part(Protocol):
    """One kind of state.

    `note` runs before the forward and returns what the other methods get as `noted`; `settle` runs after it. `restore`
    runs before each recompute and returns what `release` gets as `taken` after it; it changes nothing where it raises.
    """

    def note(self, layout: Layout) -> Any: ...

    def settle(self, noted: Any, failed: bool) -> None: ...

    def restore(self, noted: Any) -> Any: ...

    def release(self, noted: Any, taken: Any) -> None: ...


class BlockState:
    """A context function, `() -> (forward, recompute)`, for one block. Pickles and copies; what it has learnt about the
    block does not go along."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        self.parts: tuple[Part, ...] = (
            AmbientSwitches(),
            SameParameters(name),
            ReplayedRandomness(),
            KeptAttributes(name),
        )
        self._layout: Layout | None = None

    def __getstate__(self) -> tuple[nn.Module, str]:
        return self.block, self.name

    def __setstate__(self, state: tuple[nn.Module, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self) -> tuple["_Forward", "_Recompute"]:
        forward = _Forward(self)
        return forward, _Recompute(forward)

    def layout(self) -> Layout:
        modules = modules_of(self.block)
        layout = self._layout
        if layout is None or not layout.serves(modules):
            layout = self._layout = Layout(modules)
        return layout


class _Forward:
    def __init__(self, state: BlockState) -> None:
        self.state = state
        self.layout: Layout
        self.noted: list[Any] = []

    def __enter__(self) -> None:
        layout = self.layout = self.state.layout()
        self.noted = [part.note(layout) for part in self.state.parts]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for part, noted in zip(self.state.parts, self.noted, strict=True):
            part.settle(noted, kind is not None)


class _Recompute:
    """May be entered again, for a second backward over a retained graph."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._taken: list[list[tuple[Part, Any, Any]]] = []

    def __enter__(self) -> None:
        state = self._forward.state
        if modules_of(state.block) != self._forward.layout.modules:
            raise ActivationCheckpointingError(
                f"block '{state.name}' has other modules than in its forward, so the recompute would give gradients of "
                "another function; add and replace modules before the forward"
            )
        taken: list[tuple[Part, Any, Any]] = []
        self._taken.append(taken)
        try:
            for part, noted in zip(state.parts, self._forward.noted, strict=True):
                taken.append((part, noted, part.restore(noted)))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for part, noted, taken in reversed(self._taken.pop()):
            part.release(noted, taken)
