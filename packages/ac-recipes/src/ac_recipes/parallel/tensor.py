"""Tensor parallelism, by the plan that transformers has for the model."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from transformers import PreTrainedModel

from ac_recipes.errors import UsageError

# NOTE [ transformers' plans ]
#
# 1. `model.tp_plan` maps names, with `*` for the number of a layer, to styles; `apply_tensor_parallelism` shards the
#    named parameters as DTensors over a one-dimensional mesh and replaces forwards on the instances. It is written for
#    models on the meta device, and does the same with weights that are alike on all ranks: nothing is communicated.
# 2. `replicated_with_grad_allreduce` is not taken from there. It adds up the accumulated gradient in a hook of every
#    backward, which counts earlier microbatches again, and its hook does not survive FSDP2's exchange of parameters.
#    `SummedGradients` does the same to the gradient of one forward.
# 3. The loss stands in for the head's forward (`ac_recipes.training.loss`) and takes the sharded weight as it is. It
#    stays outermost; what it replaces is asked for whole logits.

_SUMMED = "replicated_with_grad_allreduce"


def split_over_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard `model`, in place, over the ranks of `mesh`, which hold the same weights and will get the same batches.

    Raises:
        UsageError: transformers has no plan for this model, or this version of it no way to apply one.
    """
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise UsageError(
            "distributed.tp_size: this transformers cannot apply a tensor-parallel plan to a model; install "
            "transformers >= 5.24, or leave tp_size at 1"
        ) from error
    plan = _plan_by_name(model, getattr(model, "tp_plan", None) or {})
    if not plan:
        raise UsageError(
            f"distributed.tp_size: transformers has no tensor-parallel plan for {type(model).__name__}; leave tp_size "
            "at 1 and shard with strategy 'fsdp2'"
        )
    _check_widths(model, plan, mesh.size())
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    loss = vars(head).pop("forward", None) if head is not None else None
    if head is not None and head.weight is embeddings.weight:
        names = [name for name, module in model.named_modules() if module is embeddings]
        if plan.get(names[0]) != "embedding_rowwise":
            raise UsageError(
                f"distributed.tp_size: the plan of {type(model).__name__} does not share its embeddings out by rows of "
                "the vocabulary, and its head has the same weight; set model.config.tie_word_embeddings to false"
            )
        head.weight = nn.Parameter(head.weight.detach())  # a parameter is known by one name; tied again below
    summed = [name for name, style in plan.items() if style == _SUMMED]
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != _SUMMED})
    for name in summed:
        if not _is_parameter(model, name):
            module = model.get_submodule(name)
            module.forward = SummedGradients(module, mesh.get_group())
    model.tie_weights()
    if loss is not None:
        loss.logits = vars(head).get("forward")
        head.forward = loss


class SummedGradients:
    """The forward of a module that every rank has whole, and that sees only the rank's part of what is normalised or
    scaled: the gradients of its parameters are summed over the ranks of `group`."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module = module
        self.group = group
        self._running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._running:  # functional_call calls the module, and so this
            return type(self.module).forward(self.module, *args, **kwargs)
        own = self.module.named_parameters(recurse=False)
        summed = {name: _SumGradient.apply(parameter, self.group) for name, parameter in own}
        self._running = True
        try:
            return functional_call(self.module, summed, args, kwargs)
        finally:
            self._running = False


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _plan_by_name(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """One entry for each parameter and module that the plan names: a module's parameters before the module."""
    found = {}
    for name, module in model.named_modules():
        rule = plan.get(_numberless(name))
        for parameter, _ in module.named_parameters(recurse=False):
            full = f"{name}.{parameter}" if name else parameter
            if style := plan.get(_numberless(full), rule):
                found[full] = style
        if rule is not None:
            found[name] = rule
    return found


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_parameter(model: nn.Module, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    return last in dict(model.get_submodule(parent).named_parameters(recurse=False))


def _check_widths(model: nn.Module, plan: dict[str, str], size: int) -> None:
    for name, style in plan.items():
        if _is_parameter(model, name):
            continue
        module = model.get_submodule(name)
        width = None
        if style.startswith("colwise"):
            width = getattr(module, "out_features", None)
        elif style.startswith("rowwise"):
            width = getattr(module, "in_features", None)
        elif style == "embedding_rowwise":
            width = getattr(module, "num_embeddings", None)
        if width is not None and width % size:
            remedy = f"; set model.config.vocab_size to {-(-width // size) * size}" if "layers" not in name else ""
            raise UsageError(
                f"distributed.tp_size: the width {width} of {name} is not a multiple of {size}, the ranks that share "
                f"it{remedy}"
            )
