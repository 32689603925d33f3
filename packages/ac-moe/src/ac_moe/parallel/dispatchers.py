"""Dispatchers by name."""

import inspect
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ac_moe.dispatch.alltoall import AllToAllDispatcher
from ac_moe.dispatch.base import Dispatcher
from ac_moe.dispatch.hybridep import HybridEPDispatcher
from ac_moe.parallel.discovery import Experts

CLASSES: dict[str, type[Dispatcher]] = {"alltoall": AllToAllDispatcher, "hybridep": HybridEPDispatcher}


def make_dispatchers(
    layers: list[Experts], mesh: DeviceMesh, dispatcher: str, options: Mapping[str, object]
) -> list[Dispatcher]:
    """One for each layer, over the ranks of `mesh`. Communicates nothing.

    Args:
        dispatcher: a key of `CLASSES`.
        options: further arguments of its class.

    Raises:
        ValueError: an option is none of that class, or the class refuses its value.
        ModuleNotFoundError: DeepEP is not installed.
    """
    cls = CLASSES[dispatcher]
    known = [name for name in inspect.signature(cls).parameters if name not in ("num_experts", "group", "name")]
    for name in options:
        if name not in known:
            raise ValueError(
                f"dispatcher_options: {name!r} is none of {cls.__name__}'s ({', '.join(known) or 'it has none'})"
            )
    group = mesh.get_group()
    if group is dist.group.WORLD:
        group = None  # so that the model can be pickled
    return [cls(layer.num_experts, group, name=layer.name, **options) for layer in layers]
