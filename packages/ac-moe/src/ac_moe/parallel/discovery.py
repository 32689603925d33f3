"""Which modules of a transformers model are experts, and whether they can be shared out over ranks."""

import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

# NOTE [ What counts as experts ]
#
# transformers (since 5.0) writes the experts of an MoE layer as one module of 3-D parameters and describes what they
# compute by a few attributes, so that it can be replaced (`use_experts_implementation` in its integrations/moe.py):
#
# 1. `gate_up_proj` (`up_proj` if `has_gate` is False) and `down_proj`, `[num_experts, out, in]`, or `[num_experts, in,
#    out]` if `is_transposed`; with `has_bias` also `gate_up_proj_bias` (`up_proj_bias`) and `down_proj_bias`,
#    `[num_experts, out]`.
# 2. `forward(hidden_states [tokens, hidden], top_k_index [tokens, top_k], top_k_weights [tokens, top_k])` returns
#    `sum_k weight_k * norm(down(act(up(token))) + bias)`, where `act` is `_apply_gate` or `act_fn`, and the norm is
#    there if `has_post_expert_norm`.
#
# That is all the package knows of a model; there is no list of classes. A module that looks like experts (it is called
# so, or it has `num_experts` and a parameter with that many matrices) and does not fit is named with the reason.

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, eq=False)
class Experts:
    """A module that looks like experts; what it says of itself is valid once `check_experts` has passed it."""

    name: str
    """Path in the model."""
    module: nn.Module
    has_lora: bool
    router_name: str | None
    router: nn.Module | None
    """The module that makes the logits, if there is one beside the experts."""

    @property
    def num_experts(self) -> int:
        return self.module.down_proj.shape[0]

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Of the parameters whose first dimension is the expert."""
        weights = (self.up_name, "down_proj")
        return weights + tuple(f"{name}_bias" for name in weights) if self.has_bias else weights

    @property
    def has_gate(self) -> bool:
        return getattr(self.module, "has_gate", True)

    @property
    def has_bias(self) -> bool:
        return getattr(self.module, "has_bias", False)

    @property
    def is_transposed(self) -> bool:
        return self.module.is_transposed

    @property
    def has_norm(self) -> bool:
        return getattr(self.module, "has_post_expert_norm", False)

    @property
    def weighted_after(self) -> bool:
        """Whether the router's weight must multiply the output: `w * (down(x) + b)` is not `down(w * x) + b`."""
        return self.has_bias or self.has_norm


def find_experts(model: nn.Module) -> list[Experts]:
    """All modules of `model` that look like experts, in the order of its modules.

    Raises:
        ValueError: there are none.
    """
    found = []
    for name, module in model.named_modules():
        if _looks_like_experts(name, module):
            parent = model.get_submodule(name.rpartition(".")[0])
            has_lora = any(hasattr(owner, "base_layer") for owner in (module, parent))  # as PEFT wraps
            found.append(Experts(name, module, has_lora, *_router(name, module, parent)))
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no mixture-of-experts layer: no module holds 3-D parameters of "
            "[num_experts, ...], as those of transformers do (`gate_up_proj`, `down_proj`)"
        )
    return found


def check_experts(layers: list[Experts]) -> None:
    """Raises ValueError unless all fit NOTE [ What counts as experts ], with all that is wrong with the others."""
    mistakes = defaultdict(list)
    for layer in layers:
        for mistake in _mistakes(layer):
            mistakes[alike(layer.name), f"{type(layer.module).__name__}: {mistake}"].append(layer.name)
    if mistakes:
        told = [f"  {len(names)} x {pattern}, {mistake}" for (pattern, mistake), names in mistakes.items()]
        raise ValueError("model: these experts cannot be shared out over ranks:\n" + "\n".join(told))


def alike(name: str) -> str:
    """The path of a module with stars for numbers: the same for the layers of one list."""
    return re.sub(r"\d+", "*", name)


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList) and not len(module):
        return False
    if name.rpartition(".")[2] == "experts":
        return True
    count = getattr(module, "num_experts", None)
    return any(p.ndim == 3 and p.shape[0] == count for p in module.parameters(recurse=False))


def _mistakes(experts: Experts) -> Iterator[str]:
    module = experts.module
    if experts.has_lora:
        yield (
            "has LoRA adapters. An adapter of sharded experts would have to be sharded as they are, which PEFT does "
            "not do; target the attention, the shared experts or the router instead"
        )
        return
    if parametrize.is_parametrized(module):
        yield "its parameters are parametrized; remove the parametrization first"
        return
    if not isinstance(getattr(module, "is_transposed", None), bool) or not isinstance(
        getattr(module, "has_bias", None), bool
    ):
        yield (
            f"its computation is its own code ({_shapes(module)}), and not described as transformers' experts are "
            "(`use_experts_implementation`)"
        )
        return
    if "forward" in vars(module):
        replaced = vars(module)["forward"]
        told = getattr(replaced, "__qualname__", type(replaced).__name__)
        yield f"its forward is replaced on the instance, by {told} of {replaced.__module__}; parallelize first"
    if getattr(module, "_is_expert_parallel", False):
        yield "transformers has sharded it already; load the model without `distributed_config`"
    arguments = list(inspect.signature(type(module).forward).parameters)
    if len(arguments) != 4:  # self and three
        yield f"forward takes ({', '.join(arguments[1:])}) and not (hidden_states, top_k_index, top_k_weights)"
    own = dict(module.named_parameters(recurse=False))
    missing = [name for name in experts.parameter_names if name not in own]
    if missing:
        yield f"has no parameter {', '.join(missing)} ({_shapes(module)})"
        return
    yield from _parameter_mistakes(experts)


def _parameter_mistakes(experts: Experts) -> Iterator[str]:
    parameters = dict(experts.module.named_parameters())
    for name, parameter in parameters.items():
        if name not in experts.parameter_names:
            yield f"{name} {list(parameter.shape)} is not a parameter per expert: it cannot be sharded as they are"
        elif isinstance(parameter, DTensor):
            yield f"{name} is a DTensor already; parallelize before fully_shard and tensor parallelism"
        elif parameter.dtype not in FLOATING or type(parameter) not in (nn.Parameter, FakeTensor):
            yield (
                f"{name} is quantised ({type(parameter).__name__} of {parameter.dtype}); load the model with its "
                "weights in float32, bfloat16 or float16"
            )
    if any(parameters[name].ndim != 3 for name in experts.parameter_names[:2]):
        yield f"its weights are not 3-D ({_shapes(experts.module)})"
        return
    up, down = (parameters[name].shape for name in experts.parameter_names[:2])
    (up_in, up_out), (down_in, down_out) = (
        (shape[1], shape[2]) if experts.is_transposed else (shape[2], shape[1]) for shape in (up, down)
    )
    expected = {experts.up_name: up_out, "down_proj": down_out}
    fits = up[0] == down[0] and up_in == down_out and up_out == (2 if experts.has_gate else 1) * down_in
    for name in experts.parameter_names[2:]:
        fits &= parameters[name].shape == (down[0], expected[name.removesuffix("_bias")])
    if not fits:
        yield f"its shapes do not fit one another ({_shapes(experts.module)}, is_transposed={experts.is_transposed})"


def _router(name: str, module: nn.Module, parent: nn.Module) -> tuple[str | None, nn.Module | None]:
    """The child of the MoE block that is called a router or gate and has a row of weights for each expert."""
    count = getattr(module, "num_experts", None)
    for child_name, child in parent.named_children():
        called = "router" in child_name or "gate" in child_name
        if child is not module and called and any(p.ndim == 2 and p.shape[0] == count for p in child.parameters()):
            return f"{name.rpartition('.')[0]}.{child_name}".lstrip("."), child
    return None, None


def _shapes(module: nn.Module) -> str:
    parameters = list(module.named_parameters(recurse=False))
    return ", ".join(f"{name} {list(p.shape)}" for name, p in parameters) or "no parameters of its own"
