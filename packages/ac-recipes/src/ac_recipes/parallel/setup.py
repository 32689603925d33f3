"""The `distributed:` section put on a model: everything in the right order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    Report,
    apply_activation_checkpointing,
)
from ac_core.sizes import counted
from ac_moe import MoEConfig
from ac_recipes.errors import UsageError
from ac_recipes.parallel.compiling import compile_blocks
from ac_recipes.parallel.config import CompileConfig, check_compile, compile_config
from ac_recipes.parallel.data import ddp, fsdp2
from ac_recipes.parallel.experts import share_experts
from ac_recipes.parallel.layout import Layout, StrategyConfig, check_sizes, layout_of
from ac_recipes.parallel.meshes import make_meshes
from ac_recipes.parallel.tensor import split_over_ranks
from ac_recipes.training.ranks import Ranks

_CONFIGS = {"fsdp2": FSDP2Config, "ddp": DDPConfig, "megatron_fsdp": MegatronFSDPConfig}


@dataclass(frozen=True)
class Parallel:
    """A model that is ready to train.

    report: of activation checkpointing, asked and applied.
    data: where this process stands among the ranks with different batches.
    rows: `(setting, asked, applied, how)` of everything else that was done.
    strategy: what the gradients are left to.
    """

    model: nn.Module
    report: Report
    data: Ranks
    rows: tuple[tuple[str, str, str, str], ...]
    strategy: StrategyConfig

    @property
    def loss_factor(self) -> int:
        """What to multiply a rank's loss with that is divided by the tokens of all of them: the number of ranks that
        gradients are averaged over, 1 where they are summed."""
        return 1 if isinstance(self.strategy, MegatronFSDPConfig) else self.data.world_size

    def finish(self, optimizer: Optimizer) -> Optimizer:
        """What the strategy does to an optimizer of the model's parameters."""
        if isinstance(self.strategy, MegatronFSDPConfig) and self.data.world_size > 1:
            from ac_recipes.parallel.megatron import shard_optimizer

            return shard_optimizer(optimizer)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class DistributedSetup:
    """A strategy with its sizes and activation checkpointing, how experts run, and whether blocks are compiled."""

    config: StrategyConfig
    backend: MoEConfig | None = None
    compile: CompileConfig | None = None

    def __post_init__(self) -> None:
        check_sizes(self.config)
        if self.compile is not None:
            check_compile(self.config)

    @classmethod
    def build(
        cls,
        strategy: str = "fsdp2",
        *,
        activation_checkpointing: bool | str | ActivationCheckpointingConfig = False,
        backend: MoEConfig | None = None,
        compile: CompileConfig | bool = False,  # noqa: A002 - the name of the recipe's section
        **fields: Any,
    ) -> "DistributedSetup":
        """From the fields of a recipe's `distributed:` section, and of `model.backend` and `compile`.

        Raises:
            ValueError: naming the field, the value and the valid values.
        """
        if strategy not in _CONFIGS:
            raise ValueError(f"strategy: {strategy!r} is not one of {', '.join(map(repr, _CONFIGS))}")
        config = _CONFIGS[strategy](activation_checkpointing=activation_checkpointing, **fields)
        return cls(config=config, backend=backend, compile=compile_config(compile))

    def layout(self, world_size: int) -> Layout:
        """How `world_size` ranks are arranged.

        Raises:
            UsageError: they cannot be, or the strategy is not for this machine.
        """
        layout = layout_of(self.config, world_size)
        if isinstance(self.config, MegatronFSDPConfig):
            from ac_recipes.parallel.megatron import check_machine

            check_machine()
        return layout

    def apply(self, model: nn.Module, ranks: Ranks) -> Parallel:
        """Split `model`, checkpoint and compile its blocks, and wrap it for `ranks`. It must be on its device, with the
        same weights on every rank.

        One process has nothing to share and no gradient to average, so there the model is not wrapped.

        Raises:
            UsageError: something cannot be what was asked for.
        """
        layout = self.layout(ranks.world_size)
        meshes = make_meshes(layout, ranks)
        rows = [self._strategy_row(layout)]
        context_fn: Callable[[], Any] | None = None
        if meshes.ep is not None:
            assert meshes.expert_copies is not None
            backend = self.backend or MoEConfig()
            on = self.config.checkpointing.policy != "none"
            experts, dispatcher = share_experts(
                model, backend, meshes.ep, meshes.expert_copies, device=ranks.device, checkpointing=on
            )
            context_fn = experts.context_fn
            copies = layout.dp // layout.ep
            held = f"{counted(len(experts.layers), 'layer')}, each rank 1/{layout.ep} of the experts, {copies} x each"
            rows.append(("experts", backend.dispatcher, dispatcher, f"{held}; {backend.experts}"))
            cache = backend.dispatcher_recompute_cache
            rows.append(("dispatcher recompute cache", cache, cache, "kept of each MoE layer for its recompute"))
        if meshes.tp is not None:
            split_over_ranks(model, meshes.tp)
        try:
            report = apply_activation_checkpointing(model, self.config.checkpointing, context_fn=context_fn)
        except ActivationCheckpointingError as error:
            raise UsageError(f"distributed.activation_checkpointing: {error}") from error
        if self.compile is not None:
            count = compile_blocks(model, self.compile)
            rows.append(("compile", str(self.compile), str(self.compile), f"{counted(count, 'block')}, one by one"))
        if meshes.dense is None:
            wrapped: nn.Module = model
        elif isinstance(self.config, FSDP2Config):
            wrapped = fsdp2(model, meshes.dense)
        elif isinstance(self.config, DDPConfig):
            wrapped = ddp(model, meshes.dense, ranks.device)
        else:
            from ac_recipes.parallel.megatron import megatron_fsdp

            wrapped = megatron_fsdp(model, meshes.dense, ranks.device)
        return Parallel(wrapped, report, meshes.data, tuple(rows), self.config)

    def _strategy_row(self, layout: Layout) -> tuple[str, str, str, str]:
        asked = self.config.strategy
        if layout.world_size == 1:
            return ("strategy", asked, "none", "one process: nothing to shard and no gradient to average")
        if layout.dp == 1:
            return ("strategy", asked, "tensor parallel alone", str(layout))
        return ("strategy", asked, asked, str(layout))
