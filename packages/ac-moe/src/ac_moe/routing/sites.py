"""The identity that a region knows a module by."""

import weakref

from torch import nn

from ac_moe.cache.region import Site

_sites: "weakref.WeakKeyDictionary[nn.Module, Site]" = weakref.WeakKeyDictionary()


def site_of(module: nn.Module, name: str | None = None) -> Site:
    """The site of a module: the same one each time, as long as the module lives; a copy of it is another.

    Args:
        module: a router or a layer. Nothing is written into it.
        name: how errors call it, such as its module path. Only the first call's name counts.
    """
    if module not in _sites:
        _sites[module] = Site(type(module).__name__, name)
    return _sites[module]
