"""How the ranks of a run are arranged, from the sizes of a `distributed:` section. Loads without torch."""

from dataclasses import dataclass

from ac_core.strategies import DDPConfig, FSDP2Config, MegatronFSDPConfig
from ac_recipes.errors import UsageError

StrategyConfig = FSDP2Config | DDPConfig | MegatronFSDPConfig

_UNAVAILABLE = {
    "cp_size": "context parallelism splits each sequence over ranks, and the attention of transformers' models takes "
    "whole sequences; leave it at 1, and use a smaller step_scheduler.local_batch_size or activation checkpointing "
    "for long sequences",
    "pp_size": "the pipeline stages of transformers run forwards alone, without a schedule for training; leave it at "
    "1, and shard with strategy 'fsdp2' or with tp_size",
}

# NOTE [ Sizes ]
#
# 1. `dp_size * tp_size` ranks. The ranks of one tensor-parallel group are neighbours and hold the same batch; `dp_size`
#    counts the groups that hold different batches.
# 2. `dp_replicate_size` divides `dp_size`: FSDP2 then shards over `dp_size / dp_replicate_size` ranks and keeps
#    `dp_replicate_size` copies (HSDP).
# 3. `ep_size` divides `dp_size`: ranks that share the experts out hold different batches, and are data-parallel for
#    everything else. `dp_size / ep_size` ranks hold copies of the same experts.


@dataclass(frozen=True)
class Layout:
    """Ranks in the order `[dp_replicate, dp_shard, tp]`, the last varying fastest."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Ranks that hold different batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "dp_replicate": self.dp_replicate, "tp": self.tp, "ep": self.ep}
        told = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks: {told}"


def check_sizes(config: StrategyConfig) -> None:
    """Refuse sizes that no number of ranks makes right.

    Raises:
        ValueError: naming the size, the reason and the remedy.
    """
    if unavailable := [f"{n}: {size}: {why}" for n, why in _UNAVAILABLE.items() if (size := getattr(config, n)) > 1]:
        raise ValueError(". Also ".join(unavailable))
    if config.dp_size is not None and config.dp_size % config.dp_replicate_size:
        raise ValueError(
            f"dp_replicate_size: {config.dp_replicate_size} does not divide dp_size {config.dp_size}, of whose ranks "
            "it is the number of copies"
        )
    if config.dp_size is not None and config.dp_size % config.ep_size:
        raise ValueError(
            f"ep_size: {config.ep_size} does not divide dp_size {config.dp_size}; expert-parallel ranks are among the "
            "data-parallel ones, each with its own batch"
        )
    if config.ep_size > 1 and config.tp_size > 1:
        raise ValueError(
            f"ep_size: {config.ep_size} together with tp_size {config.tp_size} is not available; use one of the two"
        )
    if isinstance(config, FSDP2Config):
        return
    if config.dp_replicate_size > 1:
        raise ValueError(
            f"dp_replicate_size: {config.dp_replicate_size} belongs to strategy 'fsdp2'; {config.strategy!r} has no "
            "groups of replicas here"
        )
    if isinstance(config, MegatronFSDPConfig):
        for name in ("tp_size", "ep_size"):
            if (size := getattr(config, name)) > 1:
                raise ValueError(f"{name}: {size} is not available with strategy 'megatron_fsdp'; use 'fsdp2'")
    elif config.tp_size > 1 and config.dp_size not in {None, 1}:
        raise ValueError(_ddp_with_tp(config.tp_size))


def layout_of(config: StrategyConfig, world_size: int) -> Layout:
    """Arrange `world_size` ranks.

    Raises:
        UsageError: the sizes do not fit their number.
    """
    try:
        check_sizes(config)
    except ValueError as error:
        raise UsageError(f"distributed.{error}") from None
    tp, replicas, ep = config.tp_size, config.dp_replicate_size, config.ep_size
    dp = config.dp_size
    if dp is None:
        dp, left = divmod(world_size, tp * replicas)
        if left or not dp:
            raise UsageError(_do_not_fit(config, world_size))
        dp *= replicas
    elif dp * tp != world_size:
        if tp == 1:
            raise UsageError(
                f"distributed.dp_size: {dp} ranks asked for, but the run has {world_size}; start it with "
                f"--nproc-per-node {dp}, or leave dp_size out"
            )
        raise UsageError(
            f"distributed: dp_size {dp} x tp_size {tp} are {dp * tp} ranks, but the run has {world_size}; start it "
            f"with --nproc-per-node {dp * tp}, or leave dp_size out"
        )
    if dp % ep:
        raise UsageError(
            f"distributed.ep_size: {ep} does not divide the {dp} data-parallel ranks of the run; start it with "
            f"--nproc-per-node {-(-dp // ep) * ep}, or choose an ep_size that divides {dp}"
        )
    if isinstance(config, DDPConfig) and tp > 1 and dp > 1:
        raise UsageError(f"distributed.{_ddp_with_tp(tp)}")
    return Layout(dp_replicate=replicas, dp_shard=dp // replicas, tp=tp, ep=ep)


def _do_not_fit(config: StrategyConfig, world_size: int) -> str:
    sizes = {"dp_replicate_size": config.dp_replicate_size, "tp_size": config.tp_size}
    asked = {name: size for name, size in sizes.items() if size > 1}
    least = config.dp_replicate_size * config.tp_size
    named = " x ".join(f"{name} {size}" for name, size in asked.items())
    multiple = -(-world_size // least) * least
    return (
        f"distributed.{' x '.join(asked)}: the run has {world_size} {'rank' if world_size == 1 else 'ranks'}, not a "
        f"multiple of {least} ({named}); start it with --nproc-per-node {multiple}"
    )


def _ddp_with_tp(tp: int) -> str:
    return (
        f"tp_size: {tp} with strategy 'ddp' works for one data-parallel rank alone: DDP cannot average gradients of "
        "parameters that tensor parallelism has sharded; use strategy 'fsdp2'"
    )
