"""The recompute cache inside Megatron-core: its MoE layers, its dispatchers, its own activation checkpointing.

    ac_moe.megatron.enable(model, "combine")

Importing this package imports neither torch nor Megatron: a name loads its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ac_moe.megatron.enabling import disable, enable
    from ac_moe.megatron.experts import TorchGroupedExperts

__all__ = ["TorchGroupedExperts", "disable", "enable"]

_HOME = {
    "TorchGroupedExperts": "ac_moe.megatron.experts",
    "disable": "ac_moe.megatron.enabling",
    "enable": "ac_moe.megatron.enabling",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ac_moe.megatron' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
