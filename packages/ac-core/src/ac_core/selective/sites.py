"""The places in a block where calls are intercepted: its leaf matmuls, and the modules that call functions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.tracing import is_traced, never_compiled, never_compiled_alone
from ac_core.selective.effects import Effects, Watched
from ac_core.selective.families import COLLECTIVE, MATMUL, CallKind, is_unsavable, kind_of, matmul_leaf
from ac_core.selective.kept import Key, Region, current_region, entered, keep, tensors_in
from ac_core.selective.observe import innermost_hooks
from ac_core.selective.plan import FORWARD, LEAF, BlockPlan, is_list

# NOTE [ Sites ]
# A function mode around a whole block would see every call, and cost a microsecond for each, `.shape` included. So
# modules are given a forward of their own on the instance, as blocks are (NOTE [ Attachment ]): a leaf matmul decides
# for itself, without any mode; a module that calls functions pushes a mode for its own forward, and only if the first
# step has shown that one of them is kept.


class _Site:
    """The base of what stands in for the forward of a module inside a block.

    The module gets its `__call__` as a bound method, and not the object: torch.compile would check for that very
    object, and so compile each block anew, up to its limit of eight. Of a method it checks the code.
    """

    def __init__(self, module: nn.Module, path: str, plan: BlockPlan) -> None:
        self.module = module
        self.path = path
        self.plan = plan
        self.replaced = module.__dict__.get("forward")

    @property
    def _original(self) -> Callable[..., Any]:
        return self.replaced or type(self.module).forward.__get__(self.module)


class LeafSite(_Site):
    """A module whose forward is one matmul."""

    @never_compiled_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = None if is_traced() else current_region()
        if region is None:
            return self._original(*args, **kwargs)
        key = region.key(self.path, FORWARD)
        if region.observer is None and not region.recomputing and key not in region.plan.sites:
            region.plan.met(self.path)
        if _is_kept(region, key, LEAF):
            draws = type(self.module).forward is not nn.Linear.forward
            result = keep(region, key, self._original, args, kwargs, draws=draws)
        else:
            with nullcontext() if region.mode is None else entered(None):  # the mode would see the same call again
                result = self._original(*args, **kwargs)
            if region.recomputing:
                region.plan.ran_again(key)
        if region.observer is not None:
            region.observer.called(region, key, LEAF, (*args, self.module.weight), result)
        return result


class OwnerSite(_Site):
    """A module that may call functions worth keeping, or be kept as a whole."""

    watched: Watched | None = None

    @never_compiled_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = None if is_traced() else current_region()
        if region is None:
            return self._original(*args, **kwargs)
        key = region.key(self.path, FORWARD)
        if _is_kept_module(region, key):
            return self._keep(region, key, args, kwargs)
        if region.observer is None:
            if not region.recomputing and self.path not in region.plan.owners:
                region.plan.met(self.path)
            with functions_of(region, self.path):
                return self._original(*args, **kwargs)
        if region.recomputing:
            with functions_of(region, self.path):
                result = self._original(*args, **kwargs)
            region.observer.reached(self.path)
            return result
        if innermost_hooks() is not region.hooks:
            return self._original(*args, **kwargs)  # in a checkpoint inside of the block: nothing can be kept
        unit = region.observer.enter(self.path, list(tensors_in((*args, *kwargs.values()))), self.module)
        effects = Effects(self.module, args, kwargs)
        with functions_of(region, self.path), unit.hooks(region):
            result = self._original(*args, **kwargs)
        region.observer.left(self.path, unit, result, pure=effects.changed() is None)
        return result

    @never_compiled_alone
    def _keep(self, region: Region, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if region.recomputing:
            return keep(region, key, self._original, args, kwargs, draws=True)
        effects = Effects(self.module, args, kwargs, self.watched)
        self.watched = effects.watched
        result = keep(region, key, self._original, args, kwargs, draws=True, effects=effects)
        if region.observer is not None and self.path in region.plan.named and (changed := effects.changed()):
            raise ActivationCheckpointingError(
                f"save: '{self.path}' changes {changed} in its forward, and a recompute that jumps over it would not; "
                "name modules inside of it, or families such as 'matmul'"
            )
        return result


def functions_of(region: Region, path: str) -> AbstractContextManager[Any]:
    """Intercepts the functions that the module at `path` calls in its own forward, where the region wants that."""
    if region.mode is not None:
        return _At(region.mode, path)
    return _Functions(region, path) if region.decision.intercepts(path) else nullcontext()


class _Functions(TorchFunctionMode):
    """The function mode of a region; there is one at a time."""

    def __init__(self, region: Region, path: str) -> None:
        super().__init__()
        self._region = region
        self.path = path

    def __enter__(self) -> "_Functions":
        self._region.mode = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._region.mode = None
        super().__exit__(*exception)

    @never_compiled_alone
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        region = self._region
        of_interest = kind.family or region.decision.rule.keeps(kind)
        if not of_interest or current_region() is not region or is_unsavable(kind, kwargs):
            return func(*args, **kwargs)
        key = region.key(self.path, kind.name)
        if _is_kept(region, key, kind):
            call = partial(_waited, func) if kind.family == COLLECTIVE else func
            result = keep(region, key, call, args, kwargs, draws=kind.family not in (MATMUL, COLLECTIVE))
        else:
            result = func(*args, **kwargs)
        if region.observer is not None:
            region.observer.called(region, key, kind, args, result)
        return result


def _waited(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes the call and, on the CPU, waits for its output.

    gloo writes it in a thread of its own, and its version goes up when that is done. So a kept output would seem to
    have been changed by the block, now and then and not on all ranks, and those would make the call again alone. The
    other backends leave the version as it is, and their collectives run on beside what comes next.
    """
    result = collective(*args, **kwargs)
    for output in tensors_in((result,)):
        if output.device.type == "cpu":
            torch.ops._c10d_functional.wait_tensor(output)
    return result


class _At:
    """The mode that is on already sees calls of a module further in."""

    def __init__(self, mode: _Functions, path: str) -> None:
        self._mode, self._path = mode, path

    def __enter__(self) -> None:
        self._outer, self._mode.path = self._mode.path, self._path

    def __exit__(self, *_: object) -> None:
        self._mode.path = self._outer


@never_compiled
def _is_kept(region: Region, key: Key, kind: CallKind) -> bool:
    if region.recomputing:
        return key in region.kept
    return region.decision.keeps(key, kind) and innermost_hooks() is region.hooks


@never_compiled
def _is_kept_module(region: Region, key: Key) -> bool:
    if region.recomputing:
        return key in region.kept
    return key[0] in region.decision.modules and innermost_hooks() is region.hooks


def attach_sites(block: nn.Module, plan: BlockPlan) -> None:
    """Give the modules inside `block` their sites. A module under two names gets the first."""
    plan.attached = True
    for path, module in block.named_modules():
        if module is block or is_list(module) or isinstance(_site_of(module), _Site):
            continue  # a module that blocks share has the site of the first: each region goes by its own plan
        if matmul_leaf(module) is not None:
            module.forward = LeafSite(module, path, plan).__call__  # type: ignore[assignment]
        elif path in plan.named or plan.decision.rule.ops or not _calls_nothing(module):
            module.forward = OwnerSite(module, path, plan).__call__  # type: ignore[assignment]


def detach_sites(model: nn.Module) -> None:
    """Undo `attach_sites` on every block of `model`."""
    for module in model.modules():
        site = _site_of(module)
        if isinstance(site, _Site):
            site.plan.attached = False
            if site.replaced is None:
                del module.forward
            else:
                module.forward = site.replaced


def _site_of(module: nn.Module) -> object:
    return getattr(module.__dict__.get("forward"), "__self__", None)


def _calls_nothing(module: nn.Module) -> bool:
    """A leaf that is known to call nothing worth keeping: norms, activations, dropouts."""
    if any(True for _ in module.children()):
        return False
    own = list(module.parameters(recurse=False))
    return type(module).__module__.startswith("torch.nn.modules.") or (bool(own) and all(p.dim() <= 1 for p in own))
