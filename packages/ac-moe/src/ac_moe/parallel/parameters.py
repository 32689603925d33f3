"""Parameters of experts as DTensors: this rank's experts, under the name and shape of all."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# NOTE [ Gradients of experts ]
#
# The ranks of the expert-parallel mesh are data-parallel ranks for everything that is not an expert: each has its own
# tokens and its own loss L_r. Let W ranks train, in groups of E that share the experts out.
#
# 1. DDP and FSDP2 give a dense parameter the mean over all ranks, 1/W * sum_r dL_r.
# 2. An expert receives rows of all E ranks of its group, and the backward of the dispatch returns the gradients that
#    all of their losses have for it: its gradient is the *sum* over the E ranks. So `local_tensor` divides by E.
# 3. Where W > E each expert has W / E copies. `ExpertParallel.fully_shard_experts` averages over them: 1/W in all.
# 4. With `gradient_reduction="sum"`, for training loops that sum gradients over ranks (a loss divided by the tokens of
#    all ranks), nothing is divided.
#
# The division is a node of the graph, before gradients are accumulated: any number of backwards and any reduction
# after them gives what it would on a dense parameter.


def shard(parameter: nn.Parameter, mesh: DeviceMesh, experts: range) -> nn.Parameter:
    """`[num_experts, ...]`, alike on all ranks, to a DTensor that holds this rank's part. Communicates nothing."""
    local = parameter.detach()[experts.start : experts.stop].clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def local_tensor(parameter: torch.Tensor, gradient_divisor: int) -> torch.Tensor:
    """This rank's part of a sharded parameter; its gradient is divided, see NOTE [ Gradients of experts ]."""
    local = parameter.to_local()
    return local if gradient_divisor == 1 else _DivideGradient.apply(local, gradient_divisor)


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.divisor, None
