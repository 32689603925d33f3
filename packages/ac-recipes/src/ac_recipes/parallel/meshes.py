"""The device meshes of a layout."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ac_recipes.parallel.layout import Layout
from ac_recipes.training.ranks import Ranks


@dataclass(frozen=True)
class Meshes:
    """What each part of the model is split over; None where that has one rank.

    data: where this process stands among the ranks with different batches.
    dense: those ranks for FSDP2 and DDP: `("dp",)`, or `("dp_replicate", "dp_shard")`.
    tp: `("tp",)`, ranks with the same batch.
    ep, expert_copies: the ranks that share the experts out, and those that hold copies of the same ones.
    """

    data: Ranks
    dense: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    expert_copies: DeviceMesh | None = None


def make_meshes(layout: Layout, ranks: Ranks) -> Meshes:
    """To be called on every rank alike. The dimensions' names tell ac_loss which ranks hold different tokens."""
    if ranks.world_size == 1:
        return Meshes(data=ranks)

    def mesh(**sizes: int) -> DeviceMesh:
        return init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    by_batch = mesh(dp=layout.dp, tp=layout.tp)
    data = Ranks(ranks.rank // layout.tp, layout.dp, ranks.device, by_batch["dp"].get_group())
    if layout.dp == 1:
        return Meshes(data, tp=by_batch["tp"])
    dense, tp = by_batch["dp"], by_batch["tp"]
    if layout.dp_replicate > 1:
        whole = mesh(dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, tp=layout.tp)
        dense, tp = whole["dp_replicate", "dp_shard"], whole["tp"]
    if layout.ep == 1:
        return Meshes(data, dense, tp if layout.tp > 1 else None)
    experts = mesh(expert_copies=layout.dp // layout.ep, ep=layout.ep)
    return Meshes(data, dense, None, experts["ep"], experts["expert_copies"])
