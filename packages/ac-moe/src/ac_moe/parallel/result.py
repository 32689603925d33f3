"""What `parallelize` did to a model, and what the rest of a training program needs to know of it."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ac_moe.cache.contexts import ContextFn, Mode, context_fn
from ac_moe.parallel.checks import check_replicas
from ac_moe.parallel.discovery import Experts, alike

ADVICE = (
    "checkpointing: prefer full. Experts are cheap to compute again and expensive to store, and what the dispatcher "
    "does is hidden from a selective policy, which then adds memory without speed; selective stays available."
)


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertParallel:
    """The experts of a model, shared out; see `parallelize`. Printed, it gives one line for layers that are alike."""

    model: nn.Module
    layers: tuple[Experts, ...]
    mesh: DeviceMesh
    """The expert-parallel ranks, one dimension."""
    dispatcher: str
    dispatcher_recompute_cache: Mode
    gradient_reduction: str

    @property
    def context_fn(self) -> ContextFn:
        """For `torch.utils.checkpoint(..., use_reentrant=False, context_fn=)` and whatever takes the same.

        The recompute of a checkpointed block routes as its forward did, and is served what
        `dispatcher_recompute_cache` says.
        """
        return context_fn(self.dispatcher_recompute_cache, pin_routing=True)

    def expert_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters as they are now; `fully_shard` exchanges them."""
        return [getattr(layer.module, name) for layer in self.layers for name in layer.parameter_names]

    def fully_shard_experts(self, mesh: DeviceMesh, **options: Any) -> None:
        """Makes each experts module a unit of FSDP2 over the ranks that hold copies of its experts.

        To be called before `fully_shard` on the blocks or the model (which then leave the experts alone), and before
        DDP. Also right with `mesh` of size 1, where it gives the experts FSDP2's mixed precision.

        Args:
            mesh: the other dimension of the mesh that the expert-parallel one was taken from, such as `mesh["replica"]`
                of `init_device_mesh(device, (world // ep, ep), mesh_dim_names=("replica", "ep"))`.
            options: of `torch.distributed.fsdp.fully_shard`. Inputs are not cast (`cast_forward_inputs` of a mixed
                precision policy is off): experts compute in the dtype of their weights whatever they are given, and the
                router's weights keep their precision.

        Raises:
            TypeError: `mesh` is no mesh.
            ValueError: `mesh` holds other ranks of the expert-parallel mesh, or the experts are units already.
        """
        check_replicas(mesh, self.mesh)
        for layer in self.layers:
            if isinstance(layer.module, FSDPModule):
                raise ValueError(f"{layer.name}: is a unit of FSDP2 already; call fully_shard_experts once")
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        options["mp_policy"] = dataclasses.replace(policy, cast_forward_inputs=False)
        for layer in self.layers:
            fully_shard(layer.module, mesh=mesh, **options)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the whole model, experts of all ranks included.

        That function takes no gradients of several meshes at once. To be called on every rank, with dense gradients
        reduced. Returns the norm before clipping, the same on all ranks.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = [_full(get_total_norm(alike, norm_type)) for alike in _by_mesh(gradients)]
        total = get_total_norm(norms, norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch does
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
        return total

    def __str__(self) -> str:
        size = self.mesh.size()
        head = (
            f"expert parallelism over {size} ranks, dispatcher {self.dispatcher}, recompute cache "
            f"{self.dispatcher_recompute_cache}, gradients as {self.gradient_reduction} over ranks"
        )
        return "\n".join([head, *(f"  {line}" for line in self._lines()), ADVICE])

    def _lines(self) -> Iterator[str]:
        groups: dict[str, list[str]] = {}
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
        for layer in self.layers:
            count = layer.num_experts // size
            routing = "logits and top-k pinned" if layer.router_name else "top-k pinned (no router module found)"
            weighting = "after the down projection" if layer.weighted_after else "inside the activation"
            told = (
                f"{type(layer.module).__name__}, {layer.num_experts} experts, {count} on a rank, here "
                f"{rank * count}-{rank * count + count - 1}; router weight {weighting}; {routing}"
            )
            groups.setdefault(f"{alike(layer.name)}: {told}", []).append(layer.name)
        for line, names in groups.items():
            yield f"{len(names)} x {line}"


def _by_mesh(gradients: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    return list(groups.values())


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
