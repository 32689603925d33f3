"""From what the caller has, plain or distributed, to the plain tensors that a backend computes with."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ac_loss._validation import check_are_tensors, check_tensors
from ac_loss.config import GradReduce
from ac_loss.sharded.gather import Layout, gather, kept_sharded, layout
from ac_loss.sharded.mesh import describe, dim_ranks, mesh_roles, unknown_role
from ac_loss.sharded.vocabulary import VocabShard, meet, summed_gradient


class Groups(NamedTuple):
    """What the caller says of the ranks; see :func:`ac_loss.linear_cross_entropy`."""

    grad_reduce_group: dist.ProcessGroup | None
    grad_reduce: GradReduce
    vocab_parallel_group: dist.ProcessGroup | None

    def check(self) -> None:
        """Raise unless the groups are groups that this rank is in."""
        for name in ("grad_reduce_group", "vocab_parallel_group"):
            group = getattr(self, name)
            if group is not None and not isinstance(group, dist.ProcessGroup):
                hint = "this rank is not in it" if group is dist.GroupMember.NON_GROUP_MEMBER else "mesh.get_group()"
                raise TypeError(f"{name}: a torch.distributed.ProcessGroup is needed, got {group!r} ({hint})")


class Localized(NamedTuple):
    """Plain tensors of this rank.

    Attributes:
        hidden: ``[..., H]``, all the tokens of this rank's data.
        weight: ``[V, H]``, the rows of ``vocabulary``.
        labels: ``[...]``.
        bias: ``[V]`` or None.
        vocabulary: this rank's part; None if it has all of it.
        saving: context in which the backend has to run.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    vocabulary: VocabShard | None
    saving: contextlib.AbstractContextManager[object]


def localize(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    groups: Groups,
    autocast: torch.dtype | None,
) -> Localized:
    """Plain tensors that give this rank's loss, with gradients that find their way back.

    Args:
        hidden: ``[..., H]``, plain or distributed.
        weight: ``[V, H]``, plain or distributed; plain rows of the vocabulary under ``vocab_parallel_group``.
        labels: ``[...]``, plain or distributed.
        bias: ``[V]``, as ``weight``, or None.
        groups: what the caller says of the ranks.
        autocast: dtype of the products under autocast, None without it.

    Raises:
        TypeError: a group is none.
        ValueError: the tensors do not lie as the loss needs them.
    """
    groups.check()
    check_are_tensors(hidden, weight, labels, bias)
    head = _head(weight, bias, groups)
    given = hidden
    hidden, summed = _local_tokens("hidden", hidden, groups, head.ranks)
    tokens = [(hidden, given)] if isinstance(given, DTensor) else []
    labels, _ = _local_tokens("labels", labels, groups, head.ranks)

    weight_dtype = _dtype(weight, head.weight, autocast or hidden.dtype)
    bias_dtype = None if bias is None else _dtype(bias, head.bias, autocast or hidden.dtype)
    # Before anything moves: with the shapes of the whole, and the dtypes that they will have.
    check_tensors(hidden, _outline(weight, weight_dtype), labels, _outline(bias, bias_dtype), autocast)
    gathered, others = None, list(tokens)
    if head.weight is not None:
        sharded, weight = weight, gather(weight, head.weight, weight_dtype)
        gathered = (weight, sharded, head.weight)
    if head.bias is not None:
        sharded, bias = bias, gather(bias, head.bias, bias_dtype)
        others.append((bias, sharded))
    saving: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if torch.is_grad_enabled() and (gathered or others):
        saving = kept_sharded(gathered, others)

    vocabulary = None
    if head.group is not None:
        wanted = hidden.requires_grad and torch.is_grad_enabled()
        vocabulary = meet(head.group, head.ranks, weight.shape[0], labels, wanted=wanted)
        if not summed and wanted:
            hidden = summed_gradient(hidden, head.group)
    return Localized(hidden, weight, labels, bias, vocabulary, saving)


class _Head(NamedTuple):
    """How weight and bias lie; the layouts are None for plain tensors.

    Attributes:
        group: the ranks that share the vocabulary, None if every rank has all of it.
        ranks: theirs, in order of their rows.
    """

    weight: Layout | None
    bias: Layout | None
    group: dist.ProcessGroup | None
    ranks: list[int]


def _head(weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups) -> _Head:
    group = groups.vocab_parallel_group
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    if not isinstance(weight, DTensor):
        if isinstance(bias, DTensor):
            raise ValueError(
                f"bias: is a DTensor (placements {bias.placements}) and weight is a plain tensor; pass both in one way"
            )
        return _Head(None, None, group, [] if group is None else dist.get_process_group_ranks(group))

    mesh = weight.device_mesh
    roles = mesh_roles(mesh, data_group=groups.grad_reduce_group, tensor_group=group)
    lay, bias_lay = layout("weight", weight, roles, groups.grad_reduce), None
    if bias is not None:
        if not isinstance(bias, DTensor) or bias.device_mesh != mesh:
            there = f"a DTensor on {bias.device_mesh}" if isinstance(bias, DTensor) else "a plain tensor"
            raise ValueError(
                f"bias: is {there}, and weight is a DTensor on {mesh}; shard the head as one module, so that both lie "
                "on one mesh and the gradients of both are reduced"
            )
        bias_lay = layout("bias", bias, roles, groups.grad_reduce)
        if bias_lay.vocabulary_dim != lay.vocabulary_dim:
            raise ValueError(
                f"bias: has placements {bias.placements} and weight {weight.placements}; over tensor-parallel ranks "
                "both must be sharded by rows of the vocabulary, or neither"
            )
    if lay.vocabulary_dim is not None:
        return _Head(lay, bias_lay, mesh.get_group(lay.vocabulary_dim), dim_ranks(mesh, [lay.vocabulary_dim]))
    if group is None:
        return _Head(lay, bias_lay, None, [])
    ranks = dist.get_process_group_ranks(group)
    if set(ranks) <= set(mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"vocab_parallel_group: weight has placements {weight.placements}, so the ranks {ranks} of the group all "
            "have all of the vocabulary; leave the argument out, or shard the head over them by Shard(0)"
        )
    return _Head(lay, bias_lay, group, ranks)


def _dtype(tensor: torch.Tensor, lay: Layout | None, products: torch.dtype) -> torch.dtype:
    """The dtype that a head's tensor is computed with: that of the products if it is gathered and wider than they."""
    gathered = lay is not None and any(placement.is_replicate() for placement in lay.compute)
    narrower = tensor.is_floating_point() and torch.promote_types(tensor.dtype, products) == tensor.dtype
    return products if gathered and narrower else tensor.dtype


def _outline(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """A plain tensor without memory that has the shape, dtype and device of one that will be gathered."""
    if not isinstance(tensor, DTensor):
        return tensor
    return torch.empty((), dtype=dtype, device=tensor.device).expand(tensor.shape)


def _local_tokens(
    name: str, tensor: torch.Tensor, groups: Groups, vocabulary_ranks: list[int]
) -> tuple[torch.Tensor, bool]:
    """All the tokens of this rank's data, plain; and whether its gradient is summed over ``vocabulary_ranks``."""
    if not isinstance(tensor, DTensor):
        return tensor, False
    mesh, summed = tensor.device_mesh, False
    roles = mesh_roles(mesh, data_group=groups.grad_reduce_group, tensor_group=groups.vocab_parallel_group)
    token_dims = tensor.dim() - (name == "hidden")
    compute: list[Placement] = []
    gradient: list[Placement] = []
    for dim, (role, placement) in enumerate(zip(roles, tensor.placements, strict=True)):
        if mesh.size(dim) == 1 or role == "tensor":
            ours = mesh.size(dim) > 1 and dim_ranks(mesh, [dim]) == vocabulary_ranks
            if mesh.size(dim) > 1 and vocabulary_ranks and not ours:
                raise ValueError(
                    f"{name}: lies over {describe(mesh, dim)}, ranks {dim_ranks(mesh, [dim])}, and the vocabulary is "
                    f"sharded over ranks {vocabulary_ranks}; both must be the same tensor-parallel ranks"
                )
            summed |= ours
            compute.append(Replicate())
            gradient.append(Partial() if ours else Replicate())
        elif role is None:
            raise unknown_role(name, mesh, dim)
        elif type(placement) is Shard and placement.dim < token_dims:
            compute.append(placement)
            gradient.append(placement)
        else:
            raise ValueError(
                f"{name}: is {placement} over {describe(mesh, dim)}, whose ranks must hold different tokens for the "
                "gradient of the weight to be reduced over them; shard the batch over it (Shard(0)), or pass each "
                "rank's own tokens as a plain tensor"
            )
    return tensor.redistribute(placements=compute).to_local(grad_placements=gradient), summed
