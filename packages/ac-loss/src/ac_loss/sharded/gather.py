"""Weight and bias out of a ``DTensor``: what each rank computes with, and the way back for its gradient.

NOTE [ A gathered weight and its gradient ]
Where ranks hold different tokens, each computes the gradient of the whole weight from its own tokens only. These are
addends, and the shard's gradient is their average (or sum) over the ranks: a reduce-scatter. ``DTensor.full_tensor()``
takes them for copies of one gradient instead, keeps each rank's own rows, and is silently wrong.
1. The cast to the dtype of the products comes before the all-gather: a fp32 weight under bf16 products moves half.
2. The gradient is reduced in the dtype of the weight, over sharded mesh dimensions first and over replicated ones
   (HSDP) then, when it is one shard small.
3. The whole weight lives for the forward only. What autograd would keep of it for a backward is the shard, gathered
   once more when it is asked for.
4. A rank without labels runs the same collectives as the others: nothing here depends on what the tokens are.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ac_loss.config import GradReduce
from ac_loss.sharded.mesh import Role, describe, unknown_role


class Layout(NamedTuple):
    """How a weight or bias is taken out of its ``DTensor``.

    Attributes:
        compute: placements that the loss computes with: replicated where the ranks hold different tokens.
        gradient: placements of the gradient that this rank's tokens give.
        vocabulary_dim: mesh dimension over which the vocabulary stays sharded, None if over none.
    """

    compute: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    vocabulary_dim: int | None


def layout(name: str, tensor: DTensor, roles: Sequence[Role | None], grad_reduce: GradReduce) -> Layout:
    """The layout of ``tensor``, a weight ``[V, H]`` or a bias ``[V]``.

    Raises:
        ValueError: the loss cannot be computed from such placements, or nothing tells the role of a mesh dimension.
    """
    mesh, needs_grad = tensor.device_mesh, tensor.requires_grad and torch.is_grad_enabled()
    compute, gradient, vocabulary_dim = [], [], None
    for dim, (role, placement) in enumerate(zip(roles, tensor.placements, strict=True)):
        alone = mesh.size(dim) == 1
        if placement.is_partial():
            raise ValueError(f"{name}: is {placement} over {describe(mesh, dim)}, an incomplete sum; reduce it")
        if role is None and needs_grad and not alone:
            raise unknown_role(name, mesh, dim)
        if role == "tensor" and not alone and not placement.is_replicate():
            if type(placement) is not Shard or placement.dim != 0:
                raise ValueError(
                    f"{name}: is {placement} over {describe(mesh, dim)}, and over ranks with the same tokens only rows "
                    "of the vocabulary may be sharded, by Shard(0); parallelize the head with ColwiseParallel"
                )
            if vocabulary_dim is not None:
                raise ValueError(
                    f"{name}: the vocabulary is sharded over two tensor-parallel dimensions, {vocabulary_dim} and "
                    f"{dim}; shard it over one, or flatten them into one"
                )
            vocabulary_dim = dim
        if role == "tensor" and not alone:
            compute.append(placement)
            gradient.append(placement)
        else:
            # Without a gradient the gathered weight is right for both roles; that is why None may come here.
            compute.append(Replicate())
            gradient.append(Partial(grad_reduce))
    return Layout(tuple(compute), tuple(gradient), vocabulary_dim)


def gather(tensor: DTensor, lay: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The plain tensor that this rank computes with, in ``dtype``; differentiable, as the NOTE above says."""
    # Under inference_mode a DTensor cannot be detached, which the function below does.
    return _Gather.apply(tensor, lay, dtype) if torch.is_grad_enabled() else _whole(tensor, lay, dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, lay, dtype):
        ctx.lay, ctx.like = lay, tensor.detach()
        return _whole(tensor, lay, dtype)

    @staticmethod
    def backward(ctx, gradient):
        lay, like = ctx.lay, ctx.like
        addend = DTensor.from_local(
            gradient.to(like.dtype),
            like.device_mesh,
            lay.gradient,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        scattered = [
            there if here.is_replicate() else here for here, there in zip(like.placements, lay.gradient, strict=True)
        ]
        return addend.redistribute(placements=scattered).redistribute(placements=like.placements), None, None


def _whole(tensor: DTensor, lay: Layout, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        # Detached: with nothing to gather this is the shard itself, whose requires_grad is not ours to change.
        return tensor.redistribute(placements=lay.compute, forward_dtype=dtype).to_local().detach()


def kept_sharded(
    weight: tuple[torch.Tensor, DTensor, Layout] | None, others: Sequence[tuple[torch.Tensor, DTensor]]
) -> contextlib.AbstractContextManager[object]:
    """A context in which autograd saves the shard of a weight when it is asked to save the whole, and checks versions.

    Args:
        weight: the plain weight, what it was gathered from, and how; None if it was plain to begin with.
        others: plain tensors, and what each was taken out of.
    """
    # Of the whole weight nothing outlives the forward but what tells it from others.
    whole = shard = lay = dtype = None
    if weight is not None:
        plain, shard, lay = weight[0], weight[1].detach(), weight[2]
        whole, dtype = (_storage(plain), plain.shape), plain.dtype
    with torch.no_grad():
        given = {_storage(p): d.detach() for p, d in others if _storage(p) == _storage(d.to_local())}

    # Hooks switch autograd's own check off, and it does not see that the DTensor behind a plain tensor was changed.
    def pack(saved: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, int]:
        if (_storage(saved), saved.shape) == whole:
            return None, shard, shard._version
        source = given.get(_storage(saved), saved)
        return saved, source, source._version

    def unpack(kept: tuple[torch.Tensor | None, torch.Tensor, int]) -> torch.Tensor:
        saved, source, version = kept
        if source._version != version:
            what = "the sharded weight" if saved is None else f"a tensor {list(source.shape)}"
            raise RuntimeError(
                f"linear_cross_entropy: {what} has been modified by an inplace operation since the forward, and the "
                "backward needs its values; step the optimizer after the backward"
            )
        return _whole(shard, lay, dtype) if saved is None else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
