"""What one checkpointed block keeps between its forward and its recompute, and which blocks run now."""

import enum
import itertools
import threading
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

import torch

from ac_moe.cache.stats import recorder
from ac_moe.errors import RecomputeCacheError

# NOTE [ Which kept value belongs to which call ]
#
# 1. A Region is one execution of one checkpointed block: a new one is made each time that a checkpoint runs the block.
#    Microbatches in flight, in whatever order their backwards come, never see each other's values.
# 2. Within a Region the key is (site, kind, call): the layer, what is kept of it, and how many of these it has asked
#    for so far in this phase. There is no queue, so a phase that stops early or starts again cannot shift what belongs
#    to what; and what a layer keeps of one kind does not count as a call of another.
# 3. The count of calls belongs to the Activation, one entering of a context. So contexts can be entered again, which
#    `backward(retain_graph=True)` does.
# 4. A recompute starts as if no checkpoint were active (torch.utils.checkpoint, NOTE [ Nestable Checkpoint ],
#    Rule 3). `claim` walks down the stack to the innermost recompute and no further: a backward inside a forward does
#    not count as calls of that forward.
# 5. A forward inside a recompute (nested checkpoints) keeps what the recompute was served, so that its own recompute,
#    if its graph is the one that runs, finds it.
# 6. A checkpoint makes a Region only if gradients are on where it is called. A part of the block that turns them off is
#    repeated in the recompute with them off. No output is kept of it, since no gradient needs one; but what it decides
#    or counts is: a router's counters are commonly updated under no_grad.
# 7. A reentrant checkpoint runs the forward with gradients off, whatever they were outside, and the recompute with them
#    on. Within its Region grad mode says nothing: every call counts, in both phases. It is made only if gradients were
#    on outside, so they are on for the Regions further out.

# NOTE [ How long a kept value lives ]
#
# 1. Only its Region holds it, and only the two contexts hold the Region. Checkpoint drops the forward context when
#    the block returns. It keeps the recompute context beside the block's saved inputs, in the hooks of the block's
#    graph. So a kept value lives exactly as long as the block's own inputs: until backward has released the graph,
#    even if the loss tensor is held longer; through `retain_graph=True`; not at all if the output is dropped.
#    (Reentrant checkpoints have no such hooks: see `ac_moe.cache.reentrant`.)
# 2. It is not taken out when it is served: with `retain_graph=True` the same block is recomputed again.
# 3. A forward that raises clears its Region, because the exception's traceback may hold the contexts.
# 4. What is kept is detached, and served as a new detached alias. Autograd would otherwise hang the recompute's graph
#    on the kept tensor itself, and keep that graph alive. A value that is no tensor must not refer to a graph either.

COMBINE = "combine"
"""Kind of the outputs of combine. Modes `combine` and `moe_tail` keep them."""
PROJECTION = "down projection"
"""Kind of the marks of down projections. Mode `moe_tail` keeps them."""
_WITH_GRADIENTS = (COMBINE, PROJECTION)
"""Kinds that are not kept of parts that run without gradients."""
Key: TypeAlias = "tuple[Site, str, int]"


class Phase(enum.Enum):
    FORWARD = "forward"
    RECOMPUTE = "recompute"


class Site:
    """The identity of a layer that keeps something; a copy or an unpickled one is another layer."""

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
    """One value of a forward, with what is needed to tell that it still is what its call would produce."""

    __slots__ = ("__weakref__", "fingerprint", "ledger", "value", "version")

    def __init__(self, site: Site, kind: str, value: Any, fingerprint: object) -> None:
        self.fingerprint = fingerprint
        self.value, self.version, nbytes = value, None, 0
        if isinstance(value, torch.Tensor):
            self.value = value.detach()  # shares storage and version counter with what the block goes on with
            self.version = version_of(value)
            nbytes = value.numel() * value.element_size()
        self.ledger = recorder.kept(self, str(site), nbytes, pinned=kind != COMBINE) if kind != PROJECTION else None

    @property
    def edited(self) -> bool:
        """Whether the kept tensor was changed in place since."""
        return self.version is not None and version_of(self.value) != self.version


class Region:
    """One execution of one checkpointed block; see NOTE [ Which kept value belongs to which call ].

    Args:
        mode: which kinds are kept: `none` no outputs of layers, but every other kind (pinned routing).
        reentrant: whether it is executed by a reentrant checkpoint.
    """

    def __init__(self, mode: str = "combine", *, reentrant: bool = False) -> None:
        self.mode = mode
        self.reentrant = reentrant
        self.kept: dict[Key, Kept] = {}
        self.combined: set[int] = set()
        """Numbers of the down projections whose output went into a combine that this region keeps."""
        self.forward_ended = False

    def keeps(self, kind: str) -> bool:
        if kind == PROJECTION:
            return self.mode == "moe_tail"
        return kind != COMBINE or self.mode != "none"

    def begin_forward(self) -> None:
        self.clear()
        self.forward_ended = False

    def end_forward(self, *, failed: bool) -> None:
        self.forward_ended = True
        if failed:
            self.clear()

    def clear(self) -> None:
        self.kept.clear()
        self.combined.clear()


class Activation:
    """One entering of a region's context on one thread."""

    def __init__(self, region: Region, phase: Phase) -> None:
        self.region = region
        self.phase = phase
        self._calls = Counter[tuple[Site, str]]()
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

    def next_key(self, site: Site, kind: str) -> Key:
        call = self._calls[site, kind]
        self._calls[site, kind] += 1
        return site, kind, call


class Claim(NamedTuple):
    """What one call at a site shall do: use `kept` if there is one, and leave its value to `keepers`."""

    site: Site
    kind: str
    kept: Kept | None
    source: Region | None
    """Whose `kept` is: the region that is recomputed."""
    keepers: list[tuple[Region, Key]]

    def keep(self, value: Any, fingerprint: object = None) -> None:
        """Leaves `value` to the keepers, if there are any. A tensor is kept detached and without a copy."""
        if self.keepers:
            self._leave(Kept(self.site, self.kind, value, fingerprint))

    def pass_on(self) -> None:
        """Leaves to the keepers what was kept: point 5 of NOTE [ Which kept value belongs to which call ]."""
        assert self.kept is not None
        self._leave(self.kept)

    def _leave(self, entry: Kept) -> None:
        for region, key in self.keepers:
            region.kept[key] = entry


def claim(site: Site, kind: str = COMBINE) -> Claim:
    """Counts one call of `kind` at `site` in the active regions of this thread.

    In the forward of a region the claim has keepers, and what `Claim.keep` is given is kept. In a recompute it has what
    the forward kept (`kept`), of regions that keep this kind; `kept.fingerprint` and `kept.edited` tell whether it may
    be used. Outside of regions it has neither, nor has it without gradients for outputs and down projections.

    Raises:
        RecomputeCacheError: the recompute of a block calls `kind` at `site` more often than its forward did.
    """
    keepers: list[tuple[Region, Key]] = []
    grad = torch.is_grad_enabled() or kind not in _WITH_GRADIENTS
    for activation in reversed(_threads.stack):
        region = activation.region
        grad = grad or region.reentrant
        counts = grad and region.keeps(kind)
        key = activation.next_key(site, kind) if counts else None
        if activation.phase is Phase.RECOMPUTE:
            return Claim(site, kind, _served(region, key) if key else None, region, keepers)
        if key:
            keepers.append((region, key))
    return Claim(site, kind, None, None, keepers)


def _served(region: Region, key: Key) -> Kept | None:
    kept = region.kept.get(key)
    if kept is None and region.forward_ended:  # a backward inside the forward may recompute beyond it
        site, kind, call = key
        raise RecomputeCacheError(
            f"{site}: the recompute of a checkpointed block calls {kind} {call + 1} times here, its forward "
            f"kept {sum(at is site and what == kind for at, what, _ in region.kept)}. The block must do the same in "
            "both: look for a condition that changed in between (a step counter, a cache, train/eval, grad mode)."
        )
    return kept


def version_of(tensor: torch.Tensor) -> int | None:
    """Goes up with each change in place. None for tensors of `torch.inference_mode`, which have no such count."""
    return None if tensor.is_inference() else tensor._version


def active(phase: Phase, mode: str) -> bool:
    """Whether a region of `mode` is in `phase` on this thread, down to the innermost recompute."""
    for activation in reversed(_threads.stack):
        if activation.phase is phase and activation.region.mode == mode:
            return True
        if activation.phase is Phase.RECOMPUTE:
            return False
    return False


def in_region() -> bool:
    """Whether a region is active on this thread, in either phase."""
    return bool(_threads.stack)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.stack: list[Activation] = []


# A thread of its own runs the backward on accelerators. It needs no hand-over: the recompute context is entered there.
_threads = _Threads()
