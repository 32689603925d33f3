"""Trains one model without activation checkpointing and with each policy, on a rank, and says what differs."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from ac_core_decoder import VOCABULARY, Decoder
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ac_core import apply_activation_checkpointing, remove_activation_checkpointing

POLICIES = {name: name for name in ("none", "full", "selective")}
STEPS = 3  # `selective` learns in the first and settles in the second

Step = Callable[[nn.Module, list[tuple[Tensor, Tensor]]], Tensor]


def one_backward(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The plain step: the first batch alone."""
    loss = model(*batches[0])
    loss.backward()
    return loss


@dataclass(frozen=True)
class Case:
    """A way to train. prepare: the bare model; wrap: for the ranks; after: checkpoint the wrapped model; step: the
    forwards and backwards of an optimizer step; checkpoint: what applies a policy."""

    wrap: Callable[[nn.Module], nn.Module]
    prepare: Callable[[Decoder], nn.Module] = lambda model: model
    after: bool = False
    step: Step = one_backward
    build: Callable[[], nn.Module] = Decoder


@dataclass
class Outcome:
    """What a policy did on a rank.

    different: the losses, gradients and weights that are not those of the run without checkpointing, bit for bit.
    applied: how many blocks are checkpointed. saved: bytes alive after a forward that were not before it, parameters
    apart. matmuls, collectives: run in a step, once `selective` has learnt. grown: bytes alive after that step and not
    after the step before. sharded: whether all parameters are, after it.
    """

    different: list[str] = field(default_factory=list)
    applied: int = 0
    saved: int = 0
    matmuls: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    grown: int = 0
    sharded: bool = False


def outcomes(rank: int, case: Case, policies: Mapping[str, Any] = POLICIES) -> dict[str, Outcome]:
    """Train by each policy, the first of which is none; the outcome of each."""
    results, numbers = {}, {}
    for name, policy in policies.items():
        results[name], numbers[name] = _train(rank, case, policy)
        expected = numbers["none"]
        assert expected.keys() == numbers[name].keys()
        results[name].different = [n for n, value in numbers[name].items() if not torch.equal(value, expected[n])]
    return results


def _train(rank: int, case: Case, policy: Any) -> tuple[Outcome, dict[str, Tensor]]:
    torch.manual_seed(3 + rank)
    data = [_batches() for _ in range(STEPS + 1)]
    bare = model = case.prepare(case.build())
    if not case.after:
        report = apply_activation_checkpointing(model, policy)
    model = case.wrap(model)
    if case.after:
        report = apply_activation_checkpointing(model, policy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    numbers: dict[str, Tensor] = {}

    def step(index: int) -> None:
        numbers[f"loss {index}"] = case.step(model, data[index]).detach().clone()
        for name, parameter in bare.named_parameters():
            if parameter.grad is not None:
                numbers[f"gradient of {name} in step {index}"] = _local(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for index in range(STEPS):
        step(index)
    for name, parameter in bare.named_parameters():
        numbers[f"{name} at the end"] = _local(parameter).clone()
    with Meter(bare.parameters()) as meter:
        loss = model(*data[STEPS][0])
        saved = meter.alive_at_rest()
        loss.backward()
        del loss
        optimizer.zero_grad(set_to_none=True)
        after = []
        for _ in range(2):
            meter.matmuls, meter.collectives = 0, Counter()
            case.step(model, data[STEPS])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after.append(meter.alive_at_rest())
    outcome = Outcome(
        applied=len(report.applied_blocks),
        saved=saved,
        matmuls=meter.matmuls,
        collectives=meter.collectives,
        grown=after[1] - after[0],
        sharded=all(isinstance(p, DTensor) for p in bare.parameters()),
    )
    remove_activation_checkpointing(model)
    return outcome, numbers


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of ids and labels, [batch, sequence] each."""
    return [(torch.randint(VOCABULARY, (2, 8)), torch.randint(VOCABULARY, (2, 8))) for _ in range(2)]


class Meter(TorchDispatchMode):
    """Counts the matmuls and collectives that run, and the bytes alive that ops have made besides `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.matmuls = 0
        self.collectives: Counter[str] = Counter()
        self._ignored = [_local(parameter).untyped_storage() for parameter in parameters]
        self._storages = WeakIdKeyDictionary()

    def alive(self) -> int:
        gc.collect()
        return sum(s.nbytes() for s in self._storages) - sum(s.nbytes() for s in self._ignored if s in self._storages)

    def alive_at_rest(self) -> int:
        """gloo lets go of tensors in threads of its own, a little later: on a busy machine, much later."""
        seen = [self.alive()]
        while len(seen) < 10 or len(set(seen[-10:])) > 1:
            time.sleep(0.01)
            seen.append(self.alive())
        return seen[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the ops that it amounts to come here again
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.collectives[name.strip("_")] += 1
        self.matmuls += name in ("mm", "addmm", "bmm")
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor):
                self._storages[leaf.untyped_storage()] = True
        return result


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
