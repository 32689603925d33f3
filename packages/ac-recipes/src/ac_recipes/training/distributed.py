"""Activation checkpointing and the parallelism strategy, put on a model in the right order."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    Report,
    apply_activation_checkpointing,
    find_blocks,
)
from ac_recipes.errors import UsageError
from ac_recipes.recipe import StrategyConfig
from ac_recipes.training.ranks import Ranks

_CONFIGS = {"fsdp2": FSDP2Config, "ddp": DDPConfig, "megatron_fsdp": MegatronFSDPConfig}


@dataclass(frozen=True)
class DistributedSetup:
    """A strategy with its sizes and its activation checkpointing."""

    config: StrategyConfig

    @classmethod
    def build(
        cls,
        strategy: str = "fsdp2",
        *,
        activation_checkpointing: bool | str | ActivationCheckpointingConfig = False,
        **fields: Any,
    ) -> "DistributedSetup":
        """From the fields of a recipe's `distributed:` section.

        Raises:
            ValueError: naming the field, the value and the valid values.
        """
        if strategy not in _CONFIGS:
            raise ValueError(f"strategy: {strategy!r} is not one of {', '.join(map(repr, _CONFIGS))}")
        return cls(_CONFIGS[strategy](activation_checkpointing=activation_checkpointing, **fields))

    def check(self, world_size: int) -> None:
        """Refuse a `dp_size` that is not the number of ranks there is.

        Raises:
            UsageError: naming both.
        """
        asked = self.config.dp_size
        if asked is not None and asked != world_size:
            raise UsageError(
                f"distributed.dp_size: {asked} ranks asked for, but the run has {world_size}; start it with "
                f"--nproc-per-node {asked}, or leave dp_size out"
            )

    def apply(self, model: nn.Module, ranks: Ranks) -> tuple[nn.Module, Report]:
        """Checkpoint the blocks of `model` and wrap it for `ranks`. The model must be on its device.

        One process has nothing to shard and no gradient to average, so there the model is not wrapped.

        Raises:
            UsageError: checkpointing cannot be what was asked for.
        """
        try:
            report = apply_activation_checkpointing(model, self.config.checkpointing)
        except ActivationCheckpointingError as error:
            raise UsageError(f"distributed.activation_checkpointing: {error}") from error
        if ranks.world_size == 1:
            return model, report
        if isinstance(self.config, DDPConfig):
            devices = [ranks.device] if ranks.device.type == "cuda" else None
            return DistributedDataParallel(model, device_ids=devices), report
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("dp",))
        for block in find_blocks(model):
            fully_shard(block.module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, report
