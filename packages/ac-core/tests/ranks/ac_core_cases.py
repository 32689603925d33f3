"""Ways to train on two ranks. Each is trained by every policy; see `ac_core_training`."""

import torch
from ac_core_decoder import Decoder, with_adapters, with_lower_half_frozen
from ac_core_training import Case, Outcome, outcomes
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def sharded(model: nn.Module, *, inner: tuple[str, ...] = (), shape: tuple[int, ...] = (2,), **options) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model.layers:
        for name in inner:
            fully_shard(layer.get_submodule(name), mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    # The root is resharded after its forward as well, so that what is alive then is what is saved for the backward.
    return fully_shard(model, mesh=mesh, **{"reshard_after_forward": True, **options})


def sharded_bf16(model: nn.Module) -> nn.Module:
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def sharded_inside(model: nn.Module) -> nn.Module:
    return sharded(model, inner=("attention", "mlp"))


def accumulated_fsdp2(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    losses = []
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        losses.append(model(*batch) / len(batches))
        losses[-1].backward()
    return torch.stack(losses).sum()


def accumulated_ddp(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    *others, last = batches
    total = torch.zeros(())
    with model.no_sync():
        for batch in others:
            loss = model(*batch) / len(batches)
            loss.backward()
            total += loss.detach()
    loss = model(*last) / len(batches)
    loss.backward()
    return total + loss.detach()


def ddp(model: nn.Module, **options) -> nn.Module:
    return DistributedDataParallel(model, **options)


class WithUnusedBranch(Decoder):
    """Has a parameter that takes no part, for DDP to find."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def tensor_parallel(model: Decoder) -> Decoder:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    columns, rows = ColwiseParallel, RowwiseParallel
    attention = {"attention.q": columns(), "attention.k": columns(), "attention.v": columns(), "attention.o": rows()}
    mlp = {"mlp.gate": columns(), "mlp.up": columns(), "mlp.down": rows()}
    for layer in model.layers:
        parallelize_module(layer, mesh, attention | mlp)
    return model


def sequence_parallel(model: Decoder) -> Decoder:
    """Between the tensor-parallel parts each rank has half of the sequence."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    rows = {"output_layouts": Shard(1)}
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(use_local_output=True),
                "mlp_norm": SequenceParallel(use_local_output=True),
                "attention": whole,
                "mlp": whole,
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.o": RowwiseParallel(**rows),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(**rows),
            },
        )
    embedding = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    head = {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    return parallelize_module(model, mesh, embedding | head)


FSDP2 = {
    "fsdp2": Case(sharded),
    "fsdp2, applied after": Case(sharded, after=True),
    "fsdp2, bf16": Case(sharded_bf16),
    "fsdp2, units inside of blocks": Case(sharded_inside),
    "fsdp2, units inside of blocks, applied after": Case(sharded_inside, after=True),
    "fsdp2, not resharded": Case(lambda model: sharded(model, reshard_after_forward=False)),
    "fsdp2, accumulated": Case(sharded, step=accumulated_fsdp2),
    "fsdp2, lower half frozen": Case(sharded, prepare=with_lower_half_frozen),
    "fsdp2, adapters": Case(sharded, prepare=with_adapters),
    "fsdp2, adapters, bf16": Case(sharded_bf16, prepare=with_adapters),
    "fsdp2, hybrid": Case(lambda model: sharded(model, shape=(2, 1))),
}
DDP = {
    "ddp": Case(ddp),
    "ddp, applied after": Case(ddp, after=True),
    "ddp, static graph": Case(lambda model: ddp(model, static_graph=True)),
    "ddp, unused parameters": Case(lambda model: ddp(model, find_unused_parameters=True), build=WithUnusedBranch),
    "ddp, accumulated": Case(ddp, step=accumulated_ddp),
    "ddp, gradients in buckets": Case(lambda model: ddp(model, gradient_as_bucket_view=True)),
    "ddp, lower half frozen": Case(ddp, prepare=with_lower_half_frozen),
    "ddp, adapters": Case(ddp, prepare=with_adapters),
    "replicate": Case(replicate),
}
TENSOR_PARALLEL = {
    "tensor parallel": Case(tensor_parallel),
    "tensor parallel, applied after": Case(tensor_parallel, after=True),
    "sequence parallel": Case(sequence_parallel),
}
CASES = FSDP2 | DDP | TENSOR_PARALLEL


def train(rank: int, case: str) -> dict[str, Outcome]:
    """By every policy, on this rank."""
    return outcomes(rank, CASES[case])
