"""Parameters under checkpointing: a recompute with other parameters than the forward's is an error.

Without checkpointing autograd notices a parameter that was edited between forward and backward by its version. A
recompute would silently use the edited one, or another one where `torch.func.functional_call` had put it in.
"""

import sys
from operator import is_
from typing import NamedTuple

from torch import Tensor

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.layout import Layout


class _Noted(NamedTuple):
    layout: Layout
    parameters: list[Tensor]
    versions: list[int]


class SameParameters:
    """The part of a block's state that may not change. A `Part`, see `region/state.py`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def note(self, layout: Layout) -> _Noted:
        parameters = [p for holder in layout.parameters for p in holder.values() if p is not None]
        return _Noted(layout, parameters, [p._version for p in parameters])

    def settle(self, _noted: _Noted, _failed: bool) -> None:
        pass

    def restore(self, noted: _Noted) -> None:
        """Restores nothing.

        Raises:
            ActivationCheckpointingError: a parameter is another tensor, or was written to, since the forward.
        """
        _, parameters, versions = self.note(noted.layout)
        same = versions == noted.versions and all(map(is_, parameters, noted.parameters))
        if not same or not noted.layout.serves(noted.layout.modules):
            self._refuse(noted)

    def release(self, _noted: _Noted, _taken: None) -> None:
        pass

    def _refuse(self, noted: _Noted) -> None:
        layout, parameters, versions = noted
        now = [(h, name, p) for h in layout.parameters for name, p in h.items() if p is not None]
        elsewhere = _sharded_inside(layout)
        if len(now) < len(parameters) and len(now) + len(_views_of_flat_parameter(layout)) == len(parameters):
            return
        if not layout.serves(layout.modules) or len(now) != len(parameters):
            what = f"block '{self.name}' has gained or lost a parameter"
        else:
            what = next(
                (
                    f"parameter '{layout.place(holder, name)}' of block '{self.name}' "
                    + ("is another tensor" if parameter is not was else "was modified in place")
                    for (holder, name, parameter), was, version in zip(now, parameters, versions, strict=True)
                    if (parameter is not was or parameter._version != version) and id(holder) not in elsewhere
                ),
                None,
            )
        if what is not None:
            raise ActivationCheckpointingError(
                f"{what} since the forward, so the recompute would give gradients of another function; run backward "
                "before the optimizer's step, and inside the same torch.func.functional_call as the forward"
            )


def _sharded_inside(layout: Layout) -> set[int]:
    """The `id`s of the parameter dictionaries that FSDP exchanges inside the block, gathered and sharded parameters in
    turn. A block that is a unit itself has its own gathered whenever it runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    units = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    inner = [module for module in layout.modules[1:] if isinstance(module, units)]
    return {id(module._parameters) for unit in inner for module in unit.modules()}


def _views_of_flat_parameter(layout: Layout) -> list[Tensor]:
    """Tensors that FSDP1 puts in the place of parameters: in the backward its units have plain views of their flat
    parameter where they had parameters in the forward."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return [value for module in layout.modules for value in vars(module).values() if isinstance(value, Tensor)]
