"""Buffers under checkpointing: the recompute finds them as the forward did, and changes none of them again.

Without this a BatchNorm in a block would update its running statistics twice a step, and a block that reads a buffer
that it also writes would be recomputed as another function.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from torch import Tensor, nn

from ac_core.errors import ActivationCheckpointingError

_Place = tuple[nn.Module, str]
"""A module inside the block and the name of one of its buffers."""

_SMALL = 65536
"""Elements up to which a vector is always copied: BatchNorm's kernel writes its running statistics without
counting up their version, so no check would notice."""


class KeptBuffers:
    """A context function, `() -> (forward, recompute)`, for one block.

    Small vectors are always kept. Of the others, the first forward looks at every one; from then on only those that it
    saw change in place are copied, so that a block with large constant buffers (a mask, quantised weights) pays
    nothing for them.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        self.changing: set[tuple[str, str]] | None = None

    def __call__(self) -> tuple["_Forward", "_Recompute"]:
        forward = _Forward(self)
        return forward, _Recompute(forward)

    def buffers(self) -> Iterator[tuple[tuple[str, str], _Place, Tensor | None]]:
        for path, module in self.block.named_modules():
            for buffer, value in list(module._buffers.items()):
                yield (path, buffer), (module, buffer), value


@dataclass
class _Seen:
    place: _Place
    value: Tensor | None
    version: int
    copy: Tensor | None
    always: bool


class _Forward:
    """Remembers the buffers that the forward changes as they were before it."""

    def __init__(self, kept: KeptBuffers) -> None:
        self._kept = kept
        self._seen: dict[tuple[str, str], _Seen] = {}
        self.before: list[tuple[_Place, Tensor | None]] = []

    def __enter__(self) -> None:
        copies: dict[int, Tensor] = {}  # one buffer under two names stays one
        for key, place, value in self._kept.buffers():
            always = value is not None and _is_small_vector(value)
            copy = None
            if value is not None and (always or self._kept.changing is None or key in self._kept.changing):
                copy = copies.setdefault(id(value), value.detach().clone())
            self._seen[key] = _Seen(place, value, 0 if value is None else value._version, copy, always)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kept, seen, self._seen = self._kept, self._seen, {}
        changing = set()
        for key, was in seen.items():
            module, buffer = was.place
            in_place = was.value is not None and was.value._version != was.version
            if was.always or (in_place and was.copy is not None):
                self.before.append((was.place, was.copy))
            elif in_place:
                kept.changing = (kept.changing or set()) | {key}
                if kind is None:
                    raise ActivationCheckpointingError(
                        f"block '{kept.name}' changed its buffer '{'.'.join(filter(None, key))}' in this forward and "
                        "not in its first, so its value before is not known and a recompute could differ; run the step "
                        "again, or leave the block out"
                    )
            elif module._buffers.get(buffer) is not was.value:
                self.before.append((was.place, was.value))  # replaced: the tensor itself is as it was
            if in_place:
                changing.add(key)
        if kept.changing is None and kind is None:
            kept.changing = changing


def _is_small_vector(value: Tensor) -> bool:
    return value.dim() <= 1 and value.numel() <= _SMALL


class _Recompute:
    """Puts copies of the remembered values in for the time of a recompute, so that the live buffers stay untouched.

    Whole tensors are exchanged rather than values copied: an in-place write would count as a change of what the graph
    has saved. May be entered again, for a second backward over the same graph.
    """

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._live: list[list[tuple[_Place, Tensor | None]]] = []

    def __enter__(self) -> None:
        live, copies = [], {}
        for (module, buffer), before in self._forward.before:
            live.append(((module, buffer), module._buffers[buffer]))
            value = None if before is None else copies.setdefault(id(before), before.detach().clone())
            module._buffers[buffer] = value
        self._live.append(live)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for (module, buffer), value in self._live.pop():
            module._buffers[buffer] = value
