"""What a parallelism strategy is told about activation checkpointing and sizes, as plain data. Loads without torch.

The names of the fields are those of the `distributed:` section of a recipe. The configs say what is wanted; building
the mesh and wrapping the model is the caller's.
"""

from dataclasses import dataclass, fields
from typing import Literal

from ac_core.config import (
    ActivationCheckpointingConfig,
    OffloadName,
    PolicyName,
    Scope,
    offload_name,
    policy_name,
    scope_names,
)

ActivationCheckpointing = bool | PolicyName | ActivationCheckpointingConfig | None


@dataclass(frozen=True, kw_only=True)
class _StrategyConfig:
    """The fields that every strategy has.

    activation_checkpointing: a policy (`false`, `true`, `"full"`, ...) or a whole `ActivationCheckpointingConfig`.
    activation_checkpointing_scope: as `ActivationCheckpointingConfig.scope`.
    activation_checkpointing_offload: as `ActivationCheckpointingConfig.offload`.
    dp_size: ranks that hold different data; `None`: all that the other sizes leave over.
    dp_replicate_size, tp_size, cp_size, pp_size, ep_size: ranks per replica group, tensor, context, pipeline and
        expert parallelism; 1 means none.

    Raises:
        ValueError: naming the field, the value and the valid values.
    """

    activation_checkpointing: ActivationCheckpointing = False
    activation_checkpointing_scope: Scope = "all"
    activation_checkpointing_offload: OffloadName = "none"
    dp_size: int | None = None
    dp_replicate_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        asked = self.activation_checkpointing
        scope = scope_names(self.activation_checkpointing_scope, field="activation_checkpointing_scope")
        if asked == "budget":
            raise ValueError(
                "activation_checkpointing: 'budget' needs a budget; in its place, give {policy: budget, "
                "memory_budget: 24GiB} with the size that is meant"
            )
        if not isinstance(asked, ActivationCheckpointingConfig):
            object.__setattr__(self, "activation_checkpointing", policy_name(asked, field="activation_checkpointing"))
        elif scope != "all" and _parts(scope) != _parts(asked.scope):
            raise ValueError(
                f"activation_checkpointing_scope: {scope!r} contradicts the scope {asked.scope!r} given inside "
                "activation_checkpointing; give it once"
            )
        object.__setattr__(self, "activation_checkpointing_scope", scope)
        self._check_offload()
        tag = next(field.default for field in fields(self) if field.name == "strategy")
        if (strategy := getattr(self, "strategy")) != tag:  # noqa: B009 - each subclass declares the field
            raise ValueError(f"strategy: {strategy!r} is not {tag!r}, the strategy of {type(self).__name__}")
        for name in ("dp_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size"):
            value = getattr(self, name)
            if value is None and name == "dp_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r} is not a whole number of ranks, at least 1")

    def _check_offload(self) -> None:
        offload = offload_name(self.activation_checkpointing_offload, field="activation_checkpointing_offload")
        asked = self.activation_checkpointing
        if offload == "none":
            return
        if isinstance(asked, ActivationCheckpointingConfig) and asked.offload == "none":
            raise ValueError(
                f"activation_checkpointing_offload: {offload!r} contradicts the offload 'none' given inside "
                "activation_checkpointing; give it there"
            )
        if asked == "none":
            raise ValueError(
                "activation_checkpointing_offload: 'cpu' moves the inputs of checkpointed blocks, and with "
                "activation_checkpointing 'none' none are"
            )

    @property
    def checkpointing(self) -> ActivationCheckpointingConfig:
        """The policy and scope of this strategy as the one config that `apply_activation_checkpointing` takes."""
        asked = self.activation_checkpointing
        if isinstance(asked, ActivationCheckpointingConfig):
            return asked
        return ActivationCheckpointingConfig(
            policy=asked,
            scope=self.activation_checkpointing_scope,
            offload=self.activation_checkpointing_offload,
        )


def _parts(scope: Scope) -> set[str]:
    return {scope} if isinstance(scope, str) else set(scope)


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(_StrategyConfig):
    """Fully sharded data parallelism, `torch.distributed.fsdp.fully_shard`."""

    strategy: Literal["fsdp2"] = "fsdp2"


@dataclass(frozen=True, kw_only=True)
class DDPConfig(_StrategyConfig):
    """Replicated data parallelism, `torch.nn.parallel.DistributedDataParallel`."""

    strategy: Literal["ddp"] = "ddp"


@dataclass(frozen=True, kw_only=True)
class MegatronFSDPConfig(_StrategyConfig):
    """Megatron-FSDP. It checkpoints whole blocks or nothing: `selective` and `budget` are refused.

    `full` may be applied before the model is wrapped or after, with the blocks as `fsdp_unit_modules`. Tested with
    Megatron-FSDP's own wrapper on the CPU, its GPU streams replaced; not measured on a GPU yet.
    """

    strategy: Literal["megatron_fsdp"] = "megatron_fsdp"

    def __post_init__(self) -> None:
        asked = self.activation_checkpointing
        policy = asked.policy if isinstance(asked, ActivationCheckpointingConfig) else asked
        if policy in ("selective", "budget"):
            raise ValueError(
                f"activation_checkpointing: {policy!r} is not supported with strategy 'megatron_fsdp'; use strategy "
                "'fsdp2' or 'ddp' for it, or activation_checkpointing 'full' with Megatron-FSDP"
            )
        inside = asked.offload if isinstance(asked, ActivationCheckpointingConfig) else "none"
        if "cpu" in (self.activation_checkpointing_offload, inside):
            raise ValueError(
                "activation_checkpointing_offload: 'cpu' is not supported with strategy 'megatron_fsdp'; use strategy "
                "'fsdp2' or 'ddp' for it"
            )
        super().__post_init__()
