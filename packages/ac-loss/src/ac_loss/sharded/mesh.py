"""Which ranks hold other tokens, and which the same tokens and other rows of the vocabulary.

NOTE [ Told, not guessed ]
A weight sharded by FSDP and one sharded by tensor parallelism are the same object, a ``DTensor`` with ``Shard(0)``. The
first must be gathered and its gradient reduced; the second must not be gathered, and is wrong if it is reduced. What
tells them apart is what the ranks do with their tokens, and no tensor holds that. So it is taken from the names of the
mesh's dimensions and from the groups that the caller passes, the two may not contradict one another, and where both are
silent it is an error.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Role = Literal["data", "tensor"]
"""``"data"``: the ranks hold different tokens. ``"tensor"``: they hold the same tokens."""

_WORDS: dict[str, Role | None] = {
    **dict.fromkeys(("dp", "ddp", "fsdp", "hsdp", "cp", "data", "batch", "shard", "replicate"), "data"),
    **dict.fromkeys(("tp", "tensor"), "tensor"),
}
_FILLERS = ("parallel", "model", "mesh")
_ARGUMENTS: dict[Role, str] = {"data": "grad_reduce_group", "tensor": "vocab_parallel_group"}


def role_of_name(name: str) -> Role | None:
    """The role that a mesh dimension's name tells (``dp_shard_cp``, ``fsdp``, ``tp``), None if it tells none or two."""
    words = [word for word in re.findall(r"[a-z]+", name.lower()) if word not in _FILLERS]
    roles = {_WORDS.get(word) for word in words}
    return roles.pop() if len(roles) == 1 else None


def mesh_roles(
    mesh: DeviceMesh, *, data_group: dist.ProcessGroup | None, tensor_group: dist.ProcessGroup | None
) -> tuple[Role | None, ...]:
    """The role of each dimension of ``mesh``; None where neither a name nor a group tells.

    Args:
        mesh: of a ``DTensor``.
        data_group: the caller's ``grad_reduce_group``: all the ranks that hold other tokens.
        tensor_group: the caller's ``vocab_parallel_group``: all the ranks that share the vocabulary.

    Raises:
        ValueError: a group is neither made of whole dimensions nor apart from the mesh, or contradicts a name.
    """
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    roles = [None if name is None else role_of_name(name) for name in names]
    groups: dict[Role, dist.ProcessGroup | None] = {"data": data_group, "tensor": tensor_group}
    told: dict[int, Role] = {}
    for role, group in groups.items():
        if group is None:
            continue
        argument = _ARGUMENTS[role]
        dims = _dims_of(mesh, group, argument)
        for dim in dims:
            if roles[dim] not in (None, role) or dim in told:
                by_name = f"is {roles[dim]} parallel by its name"
                by_whom = f"{_ARGUMENTS[told[dim]]} covers too" if dim in told else by_name
                raise ValueError(
                    f"{argument}: covers {describe(mesh, dim)}, which {by_whom}; ranks hold either different tokens "
                    "(grad_reduce_group) or the same tokens and different rows of the vocabulary "
                    "(vocab_parallel_group): pass each group where it belongs"
                )
            told[dim] = role
        for dim in set(range(mesh.ndim)).difference(dims):
            if roles[dim] == role and mesh.size(dim) > 1:
                ranks = dist.get_process_group_ranks(group)
                raise ValueError(
                    f"{argument}: its ranks {ranks} leave out {describe(mesh, dim)}, which is {role} parallel by its "
                    f"name; pass the group of all {role}-parallel ranks, or none, and the names decide"
                )
    return tuple(told.get(dim, roles[dim]) for dim in range(mesh.ndim))


def unknown_role(name: str, mesh: DeviceMesh, dim: int) -> ValueError:
    """The error for a tensor that lies over a dimension of which nothing tells the role."""
    return ValueError(
        f"{name}: is a DTensor over {describe(mesh, dim)}, and nothing tells whether those {mesh.size(dim)} ranks hold "
        "different tokens (FSDP: the weight is gathered and its gradient reduced) or the same tokens and different "
        "rows of the vocabulary (tensor parallelism: the weight stays sharded). Either name the mesh's dimensions, "
        "init_device_mesh(..., mesh_dim_names=('dp',)) or ('tp',), or pass the group of those ranks as "
        "grad_reduce_group or as vocab_parallel_group. Under FSDP2 ac_loss.sharded.add_loss_method(head), "
        "called after fully_shard, needs neither"
    )


def describe(mesh: DeviceMesh, dim: int) -> str:
    """A mesh dimension in words."""
    name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else None
    return f"dimension {dim} of its mesh (" + ("without a name" if name is None else repr(name)) + ")"


def dim_ranks(mesh: DeviceMesh, dims: Sequence[int]) -> list[int]:
    """Global ranks along ``dims`` through this rank, in order of their coordinates."""
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh} of a tensor that it was given")
    return mesh.mesh[tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))].flatten().tolist()


def _dims_of(mesh: DeviceMesh, group: dist.ProcessGroup, argument: str) -> tuple[int, ...]:
    """The dimensions of more than one rank that ``group`` is made of; none if it lies across the mesh."""
    ranks = set(dist.get_process_group_ranks(group))
    wide = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    for count in range(len(wide) + 1):
        for dims in itertools.combinations(wide, count):
            if ranks == set(dim_ranks(mesh, dims)):
                return dims
    if ranks & set(mesh.mesh.flatten().tolist()) == {dist.get_rank()}:
        return ()
    raise ValueError(
        f"{argument}: its ranks are {sorted(ranks)} and the tensor lies over a mesh of shape {tuple(mesh.shape)} with "
        f"ranks {mesh.mesh.flatten().tolist()}; it must be the group of one or more whole dimensions of that mesh, or "
        "share no rank with it but this one"
    )
