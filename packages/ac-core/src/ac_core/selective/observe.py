"""The first step of a block, watched: which calls it makes, how large they are, and which of them a recompute needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ac_core.region.tracing import never_compiled
from ac_core.selective.families import CallKind
from ac_core.selective.kept import Key, Region
from ac_core.selective.plan import BlockPlan, Site, Unit
from ac_core.selective.tensors import is_parameter, on_this_rank, source_of_cast, storage_bytes, storage_key

# `_top_saved_tensors_default_hooks` is private: nothing public tells whether saved-tensor hooks are active, nor hands
# them out. It is imported here alone, so that a torch that has moved it fails at once and by name.


class Observer:
    """Watches the first forward of a region and its first recompute; then tells the plan."""

    def __init__(self, plan: BlockPlan) -> None:
        self._plan = plan
        self._sites: dict[Key, Site] = {}
        self._units: dict[str, Unit] = {}
        self._reached: set[Key | str] = set()
        self._open: list[_UnitSaves] = []
        self._owners: set[str] = set()

    @never_compiled
    def called(self, region: Region, key: Key, kind: CallKind, args: tuple[Any, ...], result: Any) -> None:
        """A call of interest has returned."""
        if region.recomputing:
            self._reached.add(key)
            return
        outputs = [on_this_rank(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        nbytes = sum(output.numel() * output.element_size() for output in outputs)
        inner, weight = _inner_size(args, outputs)
        flops = 2 * inner * sum(output.numel() for output in outputs)
        held = region.kept[key].held if key in region.kept else {}
        own = {storage_key(output) for output in outputs}
        besides = sum(size for storage, size in held.items() if storage not in own)
        given = sum(tensor.numel() * tensor.element_size() for tensor in args if isinstance(tensor, Tensor))
        site = Site(kind, nbytes, flops / max(nbytes, 1), given, besides, weight=weight)
        site.spoiled = key in self._plan.sites and self._plan.sites[key].spoiled
        self._sites[key] = site
        if site.costly:
            region.decision.costly.add((key[0], kind.name))  # at once: the blocks behind are not to hold as much
        for unit in self._open:
            unit.held |= held

    @never_compiled
    def enter(self, path: str, inputs: list[Tensor], module: nn.Module) -> "_UnitSaves":
        """The module at `path` is about to run, in the forward."""
        self._owners.add(path)
        unit = _UnitSaves(inputs, list(module.parameters()))
        self._open.append(unit)
        return unit

    @never_compiled
    def left(self, path: str, unit: "_UnitSaves", result: Any, *, pure: bool) -> None:
        """The module at `path` has returned, in the forward. pure: and has changed nothing."""
        self._open.remove(unit)
        if pure:
            self._units[path] = Unit(unit.total(tree_leaves(result)))

    def reached(self, path: str) -> None:
        """The module at `path` has returned, in the recompute."""
        self._reached.add(path)

    def end(self, region: Region, kind: type[BaseException] | None) -> None:
        """A pass over the region has ended, with what kind of exception if any."""
        if region.recomputing and (kind is None or is_early_stop(kind)):
            for key, site in self._sites.items():
                site.needed = key in self._reached
            for path, unit in self._units.items():
                unit.needed = path in self._reached
            self._plan.learn(self._sites, self._units, self._owners)
            region.observer = None


class _UnitSaves:
    """Counts what autograd saves while a module runs, and passes it on to the hooks of the region.

    The tensors are held for as long as the module runs: the memory of a freed one would be given to the next, and the
    two be counted as one.
    """

    def __init__(self, inputs: list[Tensor], parameters: list[Tensor]) -> None:
        self._inputs = inputs
        self._free = {storage_key(tensor) for tensor in (*inputs, *parameters)}
        self._saved: dict[int, Tensor] = {}
        self.held: dict[int, int] = {}  # by the kept calls that the module makes

    @contextmanager
    def hooks(self, region: Region) -> Iterator[None]:
        """The context to run the module in."""
        region_pack, region_unpack = top_hooks(True)

        def pack(tensor: Tensor) -> Any:
            self._count(tensor)
            return region_pack(tensor)

        outer = region.hooks
        with saved_tensors_hooks(pack, region_unpack):
            region.hooks = innermost_hooks()
            try:
                yield
            finally:
                region.hooks = outer

    def total(self, outputs: list[Any]) -> int:
        for output in outputs:
            if isinstance(output, Tensor):
                self._count(output)
        saved = self.held | {key: storage_bytes(tensor) for key, tensor in self._saved.items()}
        self._saved.clear()
        return sum(size for key, size in saved.items() if key not in self._free)

    def _count(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._free and source_of_cast(tensor, self._inputs) is None:
            self._saved[key] = tensor.detach()


def is_early_stop(kind: type[BaseException]) -> bool:
    """Whether torch has ended a recompute with the last tensor that the backward needs."""
    return kind.__name__ == "_StopRecomputationError"  # private: known by name, here alone


def innermost_hooks() -> Any:
    """The pack hook that a tensor saved now goes to, of a region, an outer checkpoint, an offload; or None."""
    hooks = top_hooks(True)
    return None if hooks is None else hooks[0]


def _inner_size(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, bool]:
    """The size that a product contracts, and whether one factor is a weight matrix; from its factors' shapes."""
    weight = next((a for a in args if isinstance(a, Tensor) and is_parameter(a) and a.dim() == 2), None)
    if weight is not None and outputs and outputs[0].dim():
        return on_this_rank(weight).numel() // max(outputs[0].shape[-1], 1), True
    first = next((a for a in args if isinstance(a, Tensor) and a.dim()), None)
    return (0 if first is None else first.shape[-1]), False
