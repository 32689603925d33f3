"""Sections of a recipe that belong to the parallel package. Loads without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ac_core.config import ActivationCheckpointingConfig, FamilyName
from ac_recipes.parallel.layout import StrategyConfig
from ac_recipes.section import Section


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Section):
    """`torch.compile` of every block that activation checkpointing knows, one by one.

    enabled: `false` turns it off and keeps the other settings.
    mode, backend, fullgraph, dynamic: as in `torch.compile`. `dynamic: null` lets it decide.

    Raises:
        ValueError: naming the field, the value and the valid values.
    """

    enabled: bool = True
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode: {self.mode!r} is a mode of backend 'inductor', not of {self.backend!r}")

    def __str__(self) -> str:
        said = [self.backend] + [self.mode] * (self.mode != "default") + ["fullgraph"] * self.fullgraph
        return ", ".join([*said, *{True: ["dynamic"], False: ["not dynamic"]}.get(self.dynamic, [])])


def compile_config(setting: CompileConfig | bool) -> CompileConfig | None:
    """What a `compile` setting means: `true` is every default, `false` is off."""
    if isinstance(setting, CompileConfig):
        return setting if setting.enabled else None
    return CompileConfig() if setting else None


def check_compile(distributed: StrategyConfig) -> None:
    """Refuse what compiled blocks cannot honour.

    Raises:
        ValueError: naming the field, the reason and the remedy.
    """
    if distributed.ep_size > 1:
        raise ValueError(
            f"compile: is on, and ep_size is {distributed.ep_size}; torch.compile cannot trace a checkpoint that keeps "
            "the routing of experts for its recompute; turn it off, or leave ep_size at 1"
        )
    if distributed.checkpointing.offload == "cpu":
        raise ValueError(
            "compile: is on, and activation_checkpointing_offload is 'cpu'; a compiler decides itself what compiled "
            "blocks keep and where, so that nothing would be moved; turn compile off, or set the offload to 'none'"
        )
    if distributed.checkpointing.policy == "budget" and distributed.checkpointing.plan is None:
        raise ValueError(
            "compile: is on, and policy 'budget' has no plan yet: it may name modules, which torch.compile does not "
            "see; give a plan without them, or turn it off"
        )
    named = next(_named_modules(distributed.checkpointing), None)
    if named is not None:
        raise ValueError(
            f"compile: is on, and what activation checkpointing keeps is named by the module {named!r}, which "
            "torch.compile does not see; name families or ops such as 'aten::mm', or turn it off"
        )


def _named_modules(checkpointing: ActivationCheckpointingConfig) -> Iterator[str]:
    kept = [checkpointing.save or (), *(checkpointing.plan or {}).values()]
    for names in kept:
        if not isinstance(names, str):
            yield from (name for name in names if "::" not in name and name not in get_args(FamilyName))
