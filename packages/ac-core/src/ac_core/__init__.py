"""Activation checkpointing that can be trusted.

    import ac_core

    report = ac_core.apply_activation_checkpointing(model, "full")  # the model is changed in place
    print(report)                                                   # asked -> applied, one line a group of blocks
    ac_core.remove_activation_checkpointing(model)

Settings (:mod:`ac_core.config`, :mod:`ac_core.strategies`) are plain data and load without torch, so that a command
line can read and refuse a recipe at once; everything else is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ac_core.config import ActivationCheckpointingConfig
from ac_core.strategies import DDPConfig, FSDP2Config, MegatronFSDPConfig

if TYPE_CHECKING:
    from ac_core.apply import apply_activation_checkpointing, remove_activation_checkpointing
    from ac_core.discovery.blocks import Block, find_blocks
    from ac_core.errors import ActivationCheckpointingError, BudgetError, RecomputeMismatchError
    from ac_core.estimation.estimate import estimate
    from ac_core.estimation.result import Estimate
    from ac_core.mismatch.guard import check_recompute
    from ac_core.planning.planner import plan
    from ac_core.planning.result import Plan
    from ac_core.proof.compare import Comparison, Difference
    from ac_core.proof.measure import Usage, measure
    from ac_core.proof.trace import Trace, TracedOp, trace_decisions
    from ac_core.proof.verify import Verification, verify
    from ac_core.report import BlockGroup, Report

__version__ = "0.1.0"

_HOME = {
    "ActivationCheckpointingError": "ac_core.errors",
    "Block": "ac_core.discovery.blocks",
    "BlockGroup": "ac_core.report",
    "BudgetError": "ac_core.errors",
    "Estimate": "ac_core.estimation.result",
    "estimate": "ac_core.estimation.estimate",
    "RecomputeMismatchError": "ac_core.errors",
    "Report": "ac_core.report",
    "Trace": "ac_core.proof.trace",
    "TracedOp": "ac_core.proof.trace",
    "trace_decisions": "ac_core.proof.trace",
    "Comparison": "ac_core.proof.compare",
    "Difference": "ac_core.proof.compare",
    "Usage": "ac_core.proof.measure",
    "Verification": "ac_core.proof.verify",
    "apply_activation_checkpointing": "ac_core.apply",
    "check_recompute": "ac_core.mismatch.guard",
    "find_blocks": "ac_core.discovery.blocks",
    "Plan": "ac_core.planning.result",
    "measure": "ac_core.proof.measure",
    "plan": "ac_core.planning.planner",
    "remove_activation_checkpointing": "ac_core.apply",
    "verify": "ac_core.proof.verify",
}

__all__ = [
    "ActivationCheckpointingConfig",
    "ActivationCheckpointingError",
    "Block",
    "BlockGroup",
    "BudgetError",
    "Comparison",
    "DDPConfig",
    "Difference",
    "Estimate",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "Plan",
    "RecomputeMismatchError",
    "Report",
    "Trace",
    "TracedOp",
    "Usage",
    "Verification",
    "apply_activation_checkpointing",
    "check_recompute",
    "estimate",
    "find_blocks",
    "measure",
    "plan",
    "remove_activation_checkpointing",
    "trace_decisions",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ac_core' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
