"""Buffers under checkpointing: the recompute finds them as the forward did, and changes none of them again.

Without this a BatchNorm in a block would update its running statistics twice a step, and a block that reads a buffer
that it also writes would be recomputed as another function.
"""

from types import TracebackType

import torch
from torch import Tensor, nn

from ac_core.errors import ActivationCheckpointingError

_RUNNING_STATISTICS = nn.modules.batchnorm._NormBase  # BatchNorm and InstanceNorm, in training mode or not yet

_Place = tuple[nn.Module, str]
"""A module inside the block and the name of one of its buffers."""


class KeptBuffers:
    """A context function, `() -> (forward, recompute)`, for one block.

    The first forward looks at every buffer; from then on only those that it saw change are copied, so that a block with
    large constant buffers (a mask, quantised weights) pays nothing for them.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        self.changing: list[tuple[str, str]] | None = None

    def __call__(self) -> tuple["_Forward", "_Recompute"]:
        forward = _Forward(self)
        return forward, _Recompute(forward)

    def places(self) -> dict[tuple[str, str], _Place]:
        return {
            (path, buffer): (module, buffer)
            for path, module in self.block.named_modules()
            for buffer in module._buffers
        }


class _Forward:
    """Remembers the buffers that the forward changes as they were before it."""

    def __init__(self, kept: KeptBuffers) -> None:
        self._kept = kept
        self.before: list[tuple[_Place, Tensor | None]] = []

    def __enter__(self) -> None:
        kept = self._kept
        self._seen = {}
        for key, (module, buffer) in kept.places().items():
            value = module._buffers[buffer]
            known = kept.changing is None or key in kept.changing or isinstance(module, _RUNNING_STATISTICS)
            copy = value.detach().clone() if known and value is not None else None
            self._seen[key] = ((module, buffer), value, None if value is None else value._version, known, copy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kept, changed = self._kept, []
        for key, ((module, buffer), value, version, known, copy) in self._seen.items():
            found_before = kept.changing is not None and known  # no second look: comparing waits for the device
            if not found_before and not _has_changed(module._buffers.get(buffer), value, version, copy):
                continue
            if not known and kind is None:
                raise ActivationCheckpointingError(
                    f"block '{kept.name}' changed its buffer '{'.'.join(filter(None, key))}' in this forward and not "
                    "in its first, so its earlier value is not known and a recompute could differ; leave the block out"
                )
            changed.append(key)
            self.before.append(((module, buffer), copy))
        self._seen = {}
        if kept.changing is None and kind is None:
            kept.changing = changed


def _has_changed(now: Tensor | None, was: Tensor | None, version: int | None, copy: Tensor | None) -> bool:
    if now is not was:
        return True
    if now is None or was is None:
        return False
    # BatchNorm's kernel writes its running statistics without counting up their version: compare values as well.
    return now._version != version or (copy is not None and not torch.equal(now, copy))


class _Recompute:
    """Puts copies of the remembered values in for the time of a recompute, so that the live buffers stay untouched.

    Whole tensors are exchanged rather than values copied: an in-place write would count as a change of what the graph
    has saved. May be entered again, for a second backward over the same graph.
    """

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._live: list[list[tuple[_Place, Tensor | None]]] = []

    def __enter__(self) -> None:
        live = []
        for (module, buffer), before in self._forward.before:
            live.append(((module, buffer), module._buffers[buffer]))
            module._buffers[buffer] = None if before is None else before.clone()
        self._live.append(live)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for (module, buffer), value in self._live.pop():
            module._buffers[buffer] = value
