"""What one checkpointed block keeps between its forward and its recompute, and which blocks run now."""

import enum
import itertools
import threading
from collections import defaultdict
from typing import NamedTuple

import torch

from ac_moe.cache.stats import recorder
from ac_moe.errors import RecomputeCacheError

# NOTE [ Which kept output belongs to which combine ]
#
# 1. A Region is one execution of one checkpointed block: `context_fn` makes a new one each time that checkpoint runs
#    the block. Microbatches in flight, in whatever order their backwards come, never see each other's outputs.
# 2. Within a Region the key is (site, call): the layer, and how many combines it has run so far in this phase. There
#    is no queue, so a phase that stops early or starts again cannot shift what belongs to what.
# 3. The count of calls belongs to the Activation, one entering of a context. So contexts can be entered again, which
#    `backward(retain_graph=True)` does.
# 4. A recompute starts as if no checkpoint were active (torch.utils.checkpoint, NOTE [ Nestable Checkpoint ],
#    Rule 3). `claim` walks down the stack to the innermost recompute and no further: a backward inside a forward does
#    not count as calls of that forward.
# 5. A forward inside a recompute (nested checkpoints) keeps what the recompute was served, so that its own recompute,
#    if its graph is the one that runs, finds it.

# NOTE [ How long a kept output lives ]
#
# 1. Only its Region holds it, and only the two contexts hold the Region. Checkpoint drops the forward context when
#    the block returns. It keeps the recompute context beside the block's saved inputs, in the hooks of the block's
#    graph. So a kept output lives exactly as long as the block's own inputs: until backward has released the graph,
#    even if the loss tensor is held longer; through `retain_graph=True`; not at all if the output is dropped.
# 2. It is not taken out when it is served: with `retain_graph=True` the same block is recomputed again.
# 3. A forward that raises clears its Region, because the exception's traceback may hold the contexts.
# 4. What is kept is detached, and served as a new detached alias. Autograd would otherwise hang the recompute's graph
#    on the kept tensor itself, and keep that graph alive.


class Phase(enum.Enum):
    FORWARD = "forward"
    RECOMPUTE = "recompute"


class Site:
    """The identity of a layer that combines; a copy or an unpickled one is another layer."""

    _numbers = itertools.count()

    def __init__(self, kind: str, name: str | None = None) -> None:
        self._kind = kind
        self._name = name
        self._number = next(Site._numbers)

    def __str__(self) -> str:
        return self._name or f"{self._kind} #{self._number}"

    def __reduce__(self) -> tuple[type["Site"], tuple[str, str | None]]:
        return Site, (self._kind, self._name)


class Kept:
    """One combine output, with what is needed to tell that it still is what the combine would produce."""

    __slots__ = ("__weakref__", "fingerprint", "tensor", "version")

    def __init__(self, output: torch.Tensor, fingerprint: object) -> None:
        self.tensor = output.detach()  # shares storage and version counter with what the block goes on with
        self.version = output._version
        self.fingerprint = fingerprint
        recorder.kept(self, output.numel() * output.element_size())

    @property
    def edited(self) -> bool:
        return self.tensor._version != self.version


class Region:
    """One execution of one checkpointed block; see NOTE [ Which kept output belongs to which combine ]."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Site, int], Kept] = {}
        self.forward_ended = False

    def begin_forward(self) -> None:
        self.kept.clear()
        self.forward_ended = False

    def end_forward(self, *, failed: bool) -> None:
        self.forward_ended = True
        if failed:
            self.kept.clear()


class Activation:
    """One entering of a region's context on one thread."""

    def __init__(self, region: Region, phase: Phase) -> None:
        self.region = region
        self.phase = phase
        self._calls: dict[Site, int] = defaultdict(int)
        self._stack: list[Activation] = []

    def push(self) -> None:
        self._stack = _threads.stack
        self._stack.append(self)

    def pop(self) -> None:
        # By identity, on the stack it was pushed to: before torch 2.13 a checkpoint that fails leaves its context when
        # its generator is collected, which may be after newer contexts were entered, and on another thread.
        self._stack.remove(self)

    @property
    def on_this_thread(self) -> bool:
        return self._stack is _threads.stack

    def next_key(self, site: Site) -> tuple[Site, int]:
        key = (site, self._calls[site])
        self._calls[site] += 1
        return key


class Claim(NamedTuple):
    """What one call of combine shall do: use `kept` if there is one, and leave its output to `keepers`."""

    kept: Kept | None
    keepers: list[tuple[Region, tuple[Site, int]]]

    def keep(self, entry: Kept) -> None:
        for region, key in self.keepers:
            region.kept[key] = entry


def claim(site: Site) -> Claim:
    """Counts one call of combine at `site` in the active regions of this thread.

    Raises:
        RecomputeCacheError: the recompute of a block calls combine at `site` more often than its forward did.
    """
    keepers: list[tuple[Region, tuple[Site, int]]] = []
    if not torch.is_grad_enabled():  # the recompute of a part under no_grad runs under no_grad as well
        return Claim(None, keepers)
    for activation in reversed(_threads.stack):
        region, key = activation.region, activation.next_key(site)
        if activation.phase is Phase.FORWARD:
            keepers.append((region, key))
            continue
        kept = region.kept.get(key)
        if kept is None and region.forward_ended:  # a backward inside the forward may recompute beyond it
            raise RecomputeCacheError(
                f"{site}: the recompute of a checkpointed block calls combine {key[1] + 1} times here, its forward "
                f"kept {sum(kept_site is site for kept_site, _ in region.kept)}. The block must do the same in both: "
                "look for a condition that changed in between (a step counter, a cache, train/eval, grad mode)."
            )
        return Claim(kept, keepers)
    return Claim(None, keepers)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.stack: list[Activation] = []


# A thread of its own runs the backward on accelerators. It needs no hand-over: the recompute context is entered there.
_threads = _Threads()
