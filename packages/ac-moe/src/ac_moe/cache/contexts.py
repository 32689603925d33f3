"""The context pair that `torch.utils.checkpoint` takes, for the recompute cache."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, TypeAlias, get_args

from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from ac_moe._choices import choice_mistake
from ac_moe.cache.modes import dynamo_is_tracing
from ac_moe.cache.region import Activation, Phase, Region

ContextPair: TypeAlias = tuple[AbstractContextManager[object], AbstractContextManager[object]]
ContextFn: TypeAlias = Callable[[], ContextPair]
Mode: TypeAlias = Literal["none", "combine", "moe_tail"]


def context_fn(mode: Mode, inner: ContextFn | None = None, *, pin_routing: bool = False) -> ContextFn:
    """Makes the `context_fn` of a `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    In the forward of the block, each combine of an ac-moe dispatcher that runs with gradients enabled also leaves its
    output, `[tokens, hidden]`, with the block. In the recompute the combine returns that tensor and communicates
    nothing. It is the same autograd node in both, so gradients are those without the cache, bit for bit. Blocks may be
    nested, hold several layers, have several microbatches in flight, and be run backward twice (`retain_graph=True`).

    Args:
        mode: `combine`; `moe_tail`, which in the recompute also runs no GEMM for an `ac_moe.experts.down_projection`
            whose output went to a combine (`ac_moe.cache.conditions` has what it asks of the layer); or `none`, which
            keeps no output.
        inner: another `context_fn` for the same block, such as a selective policy
            (`functools.partial(create_selective_checkpoint_contexts, policy)`). It is entered first.
        pin_routing: with `none`, keep what `ac_moe.routing` pins, and only that. The other modes always do.

    Returns:
        A callable that makes a new `(forward_context, recompute_context)` for each execution of the block. It can be
        pickled and deep-copied if `inner` can. With `none` and nothing pinned it is `inner`, or PyTorch's own
        `noop_context_fn`.

    Raises:
        ValueError: `mode` is none of the modes of this version.
        TypeError: `inner` is not callable.
    """
    check_mode(mode)
    if inner is not None and not callable(inner):
        raise TypeError(f"inner: {inner!r} is not callable; give a context_fn, () -> (forward, recompute) contexts")
    if mode == "none" and not pin_routing:
        # Not a pair of empty contexts: checkpoint(debug=True) and torch.compile accept these two and nothing else.
        return noop_context_fn if inner is None else inner
    return functools.partial(_contexts, mode, inner)


def check_mode(mode: object) -> None:
    """Raises ValueError unless `mode` is a `Mode`."""
    mistake = choice_mistake("mode", mode, get_args(Mode))
    if mistake is not None:
        raise ValueError(mistake)


# NOTE [ A checkpoint that torch.compile looks at ]
#
# 1. Dynamo takes functions and `functools.partial`s of them as `context_fn` and fails, without falling back to Python,
#    on other callables. So `context_fn` returns a partial, not an object of a class with a name of its own.
# 2. A block with an MoE layer breaks the graph, for whatever asks for a region is under `torch.compiler.disable`. Then
#    Python runs the checkpoint, and what is in the block is compiled piece by piece.
# 3. A block that becomes one graph holds no MoE layer. Of it torch wants two TorchDispatchModes, those of a selective
#    policy; one that saves nothing does what a checkpoint does.
_save_nothing = functools.partial(create_selective_checkpoint_contexts, [])


def _contexts(mode: str, inner: ContextFn | None) -> ContextPair:
    if dynamo_is_tracing():
        return (inner or _save_nothing)()
    forward, recompute = (None, None) if inner is None else inner()
    region = Region(mode)
    return RegionContext(region, Phase.FORWARD, forward), RegionContext(region, Phase.RECOMPUTE, recompute)


class RegionContext:
    """Makes a region the innermost one of this thread, inside another context if there is one.

    A class and not a generator: a generator context can be entered once, and `retain_graph=True` enters it again.
    """

    def __init__(self, region: Region, phase: Phase, inner: AbstractContextManager[object] | None = None) -> None:
        self._region = region
        self._phase = phase
        self._inner = inner
        self._open: list[Activation] = []

    def __enter__(self) -> Region:
        if self._inner is not None:
            self._inner.__enter__()
        if self._phase is Phase.FORWARD:
            self._region.begin_forward()
        activation = Activation(self._region, self._phase)
        activation.push()
        self._open.append(activation)
        return self._region

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # The newest of this thread; else the newest, see Activation.pop.
        here = [activation for activation in self._open if activation.on_this_thread] or self._open
        activation = here[-1]
        self._open.remove(activation)
        activation.pop()
        if self._phase is Phase.FORWARD:
            self._region.end_forward(failed=kind is not None)
        return None if self._inner is None else self._inner.__exit__(kind, error, trace)
