"""State that a router changes in its forward: changed once, and seen alike by the recompute."""

from collections.abc import Iterable, MutableMapping
from types import TracebackType
from typing import Any

from torch import nn

from ac_moe.cache.modes import without_dispatch_modes
from ac_moe.cache.region import claim
from ac_moe.routing.places import Place, kept_copy, scratch_copy
from ac_moe.routing.sites import site_of

COUNTERS = "counted state"
"""Kind of the snapshots that a region keeps."""

# NOTE [ Counted once ]
#
# 1. The forward runs on the live state, after a copy of it was kept. The recompute runs on a copy of that copy, put in
#    the place of the live state, which is never touched and comes back afterwards. So live state that went on or was
#    reset since the forward stays as it is, and a recompute that early stop or an error ends leaves nothing behind.
# 2. Places are exchanged, not values: a buffer is another tensor object during the recompute. What the forward found as
#    None, or not at all, the recompute finds so too, and may make it again.
# 3. It is the state of one entering of this context, not of the region: a router that runs twice in one region is
#    recomputed from what each of its runs saw.


class counted_once:  # noqa: N801 - a context manager, named for what it ensures
    """Around what changes a layer's counters, in a block that is checkpointed with an ac-moe context.

        with ac_moe.routing.counted_once(self.router, ["aux_losses"]):
            weights, ids = self.router(x)

    The forward changes the state, once; the recompute begins from what the forward saw and changes nothing that stays.
    For load counters (tokens per expert), accumulators of auxiliary losses, counts of steps and biases of experts: all
    buffers of the module and its parts, the attributes that are named, and the mappings that are given. It may stand
    under `torch.no_grad()` in the block. Outside of an ac-moe context, and so where the checkpoint is called without
    gradients, it does nothing. It copies that state for each forward in flight: give it the router, not the model.

    Args:
        module: whose buffers count, those of its parts included.
        attributes: names of further state, on the module or any of its parts: numbers, tensors, None, and lists and
            dicts of them. What the forward is yet to make need not be there before.
        mappings: further state that the layer changes in place, such as a log of auxiliary losses of the whole model.

    Raises:
        ValueError: an attribute is a property, or a parameter that is trained.
        TypeError: an attribute holds something else than the above.
        AttributeError: when it is left, if no part of the module has an attribute of that name.
        RecomputeCacheError: the recompute comes here more often than the forward did.
    """

    def __init__(
        self, module: nn.Module, attributes: Iterable[str] = (), mappings: Iterable[MutableMapping[Any, Any]] = ()
    ) -> None:
        self._module = module
        self._attributes = (attributes,) if isinstance(attributes, str) else tuple(attributes)
        self._mappings = tuple(mappings)
        self._live: list[tuple[Place, dict[Any, Any]]] = []

    def __enter__(self) -> "counted_once":
        for name in self._attributes:
            for part in self._module.modules():
                _check_attribute(part, name)
        claimed = claim(site_of(self._module), COUNTERS)
        memo: dict[int, Any] = {}
        with without_dispatch_modes():  # a policy that keeps clones would serve one as the other
            if claimed.kept is not None:
                claimed.pass_on()
                for place, seen in zip(self._places(), claimed.kept.value, strict=True):
                    self._live.append((place, place.exchange(scratch_copy(seen, memo))))
            elif claimed.keepers:
                claimed.keep([kept_copy(place.read(), memo) for place in self._places()])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._live:
            place, live = self._live.pop()
            place.exchange(live)
        if kind is not None:
            return
        for name in self._attributes:
            if not any(hasattr(part, name) for part in self._module.modules()):
                raise AttributeError(
                    f"attributes: no part of {type(self._module).__name__} has {name!r}; name what the forward changes"
                )

    def _places(self) -> list[Place]:
        places = [Place(mapping) for mapping in self._mappings]
        for part in self._module.modules():
            places.append(Place(part._buffers))
            if self._attributes:
                places += [Place(part._parameters, self._attributes), Place(part.__dict__, self._attributes)]
        return places


def _check_attribute(part: nn.Module, name: str) -> None:
    where = f"attributes: {name!r} of {type(part).__name__}"
    if isinstance(getattr(type(part), name, None), property):
        raise ValueError(f"{where} is a property; name the attribute that it is stored in")
    parameter = part._parameters.get(name)
    if parameter is not None and parameter.requires_grad:
        raise ValueError(f"{where} is a parameter that is trained; only the optimizer may change it")
    if not Place.holds(part.__dict__.get(name)):
        raise TypeError(
            f"{where} is a {type(part.__dict__[name]).__name__}; only numbers, strings, tensors, None, and lists, "
            "tuples and dicts can be taken back"
        )
