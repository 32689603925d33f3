"""What surrounds one call of a Megatron module: its checkpoints, and what its dispatcher forgets."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ac_moe.cache.conditions import LayerFacts, check_moe_tail
from ac_moe.cache.contexts import Mode
from ac_moe.cache.reentrant import wrap_reentrant
from ac_moe.cache.region import Site, in_region
from ac_moe.megatron.checkpoints import checkpoints_seen
from ac_moe.megatron.replacement import Replacement

# NOTE [ A dispatcher forgets ]
#
# Megatron's dispatchers keep what one step of a call needs from the one before in attributes: probabilities with the
# router's graph, maps, a handle. The graph reaches the checkpoint's input, so these would hold it beyond the backward
# (Megatron-LM#3221), and neither `deepcopy` nor pickle takes such a tensor.
#
# 1. What a call has put there is taken away when the call ends, also by an exception; early stop is one. Tensors that
#    stay the same object in a call are not a call's: they stay.
# 2. `num_permuted_tokens` of the HybridEP manager is one of them. Megatron resets it in `combine` alone, which early
#    stop does not reach, and the next dispatch takes it for the size of its own output.
# 3. A recompute of a checkpointed MoE layer does not come through the layer's `forward`. So the function that is
#    checkpointed forgets too.


class BlockForward(Replacement):
    """`forward` of a `TransformerBlock`, or another module that checkpoints chunks of layers."""

    def __init__(self, block: nn.Module, mode: Mode) -> None:
        super().__init__(block, "forward")
        self.mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with checkpoints_seen(self._wrap) as sight:
            output = self.original(*args, **kwargs)
        if not sight.seen and self._must_checkpoint():
            raise RuntimeError(
                f"{type(self.owner).__name__}: recompute_granularity='full', but no call of Megatron's checkpoint was "
                "seen, so ac-moe would keep nothing and tell nobody. This megatron-core checkpoints in a way that this "
                "version of ac-moe does not know: ac_moe.megatron.disable(model), and report this."
            )
        return output

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return wrap_reentrant(function, self.mode, pin_routing=True)

    def _must_checkpoint(self) -> bool:
        config, block = self.owner.config, self.owner
        return bool(
            config.recompute_granularity == "full"
            and config.recompute_num_layers
            and block.training
            and len(getattr(block, "layers", ()))
        )


class LayerForward(Replacement):
    """`forward` of an `MoELayer`; see NOTE [ A dispatcher forgets ]."""

    def __init__(self, layer: nn.Module, mode: Mode, site: Site) -> None:
        super().__init__(layer, "forward")
        self.mode = mode
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mode == "moe_tail":
            self._must_be_checkpointed()
        with forgetting(self.owner), checkpoints_seen(self._wrap):
            return self.original(*args, **kwargs)

    def _must_be_checkpointed(self) -> None:
        layer = self.owner
        by_megatron = layer.config.recompute_granularity == "full" or layer.moe_layer_recompute
        trains = layer.training and torch.is_grad_enabled()
        if trains and not by_megatron and not in_region():
            check_moe_tail({str(self.site): LayerFacts(activation_checkpointing=False)})

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return wrap_reentrant(Forgetful(function, self.owner), self.mode, pin_routing=True)


class Forgetful:
    """`function`, which is a part of `layer`'s forward, and runs once more without it."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module) -> None:
        self.function = function
        self.layer = layer

    def __call__(self, *args: Any) -> Any:
        with forgetting(self.layer):
            return self.function(*args)


@contextlib.contextmanager
def forgetting(layer: nn.Module) -> Iterator[None]:
    """Takes the tensors away that `layer`'s dispatcher gets in here."""
    dispatcher = layer.token_dispatcher
    holders = [dispatcher, *(vars(dispatcher)[name] for name in ("_comm_manager",) if name in vars(dispatcher))]
    before = [dict(vars(holder)) for holder in holders]
    try:
        yield
    finally:
        for holder, then in zip(holders, before, strict=True):
            for name, value in list(vars(holder).items()):
                if _holds_tensor(value) and value is not then.get(name):
                    _put_back(holder, name, then)


def _put_back(holder: object, name: str, then: dict[str, Any]) -> None:
    if name not in then:
        delattr(holder, name)
    else:
        setattr(holder, name, None if _holds_tensor(then[name]) else then[name])


def _holds_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(_holds_tensor, value)))
