"""One training step without values and without a GPU, and what it holds in memory at any time.

NOTE [ What a simulation is ]
The model is one of fake tensors on the CPU device, with parameters, buffers, optimizer state and batch all made inside
of the fake mode. The step is the real one: its own forward, checkpointing, autograd's own backward, the optimizer's own
step. A meter sees every allocation and release. So nothing about the model is modelled but what lies below the
operations: scratch memory inside of kernels and the allocator's rounding.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ac_core.discovery.blocks import Block, BlockChoice, find_blocks
from ac_core.errors import ActivationCheckpointingError
from ac_core.estimation.categories import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS
from ac_core.estimation.fake import NEEDS_VALUES, KnownValues, count_experts, fake_batch, fake_mode, fake_model
from ac_core.estimation.ledger import Ledger
from ac_core.estimation.reading import Simulation, read_log
from ac_core.estimation.routing import Routing
from ac_core.proof.meters import Flops
from ac_core.proof.step import Forward, Loss, named_tensors, run_forward
from ac_core.region.forward import checkpointed_forwards

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From the parameters that need gradients to the optimizer that steps on them."""


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    prepare: Callable[[nn.Module], object] | None = None,
    shard: Callable[[nn.Module, list[Block]], list[Tensor]] | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    keep_output: bool = False,
    accumulates: bool = False,
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
    routing: Routing | None = None,
) -> Simulation:
    """Simulate a training step of `model` on `batch`: forward, backward, optimizer step.

    Steps that come before it let optimizer state and learnt policies settle.

    Args:
        model: a module with real, meta or fake tensors, which is left as it is, or a function that builds one, which is
            called with fake tensors on: no weight is ever allocated.
        batch: what the model is called with, as for `ac_core.measure`, or a function of the model and its blocks that
            makes it. Tensors may be real, meta or fake; a model that looks at values of integers or booleans (masks,
            grids of images) needs real ones.
        prepare: what is to be done to the model before the step, in place, such as applying a policy.
        shard: what a strategy does to the model and its blocks after that; returns the buffers that it holds.
        loss: from the output to what is differentiated, as for `ac_core.measure`.
        optimizer: builds the optimizer; `None`: no optimizer.
        dtype: of the floating-point parameters; `None`: as they are.
        autocast: run the forward under autocast to this dtype.
        keep_output: the training loop holds the output of the model, logits and all, until the backward is over.
        accumulates: the backward adds to gradients that another microbatch has left.
        blocks: what the blocks are, where the rules do not find them; see `find_blocks`.
        routing: of a mixture of experts; by default every expert gets as many tokens as any other.

    Raises:
        TypeError: the model is none, or the batch is nothing that a model can be called with.
        ActivationCheckpointingError: nothing needs a gradient; tensors of the model cannot be made fake; it looks at
            values that are not known.
    """
    flops, known_values = Flops(), KnownValues(routing=routing)
    with fake_mode(), known_values, flops, Ledger(flops) as ledger:
        with known_values.building():
            made = fake_model(model, dtype)
        found = find_blocks(made, blocks)
        inputs = fake_batch(batch(made, found) if callable(batch) else batch)
        if prepare is not None:
            prepare(made)
        known_values.experts = count_experts(made)
        buffers = [] if shard is None else shard(made, found)
        ledger.sharded = any(isinstance(module, FSDPModule) for module in made.modules())
        stepper = None if optimizer is None or not _trains(made) else _Stepper(made, optimizer)
        step = _Step(made, inputs, loss, autocast, keep_output, known_values)
        for _ in range(max(_steps_until_settled(made), accumulates)):
            step.forward().backward()
            if not accumulates:
                made.zero_grad(set_to_none=True)
        gc.collect()
        with _watched(found, ledger):
            ledger.start("forward")
            flops.forward = flops.backward = flops.recompute = 0
            forward = step.forward()
            end = ledger.entries
            ledger.begin("backward")
            flops.in_backward = True
            forward.backward()
            del forward
            flops.in_backward = False
            ledger.begin("optimizer")
            known = {
                PARAMETERS: ledger.numbers([*made.parameters(), *made.buffers()]),
                GRADIENTS: ledger.numbers(p.grad for p in made.parameters() if p.grad is not None),
                OPTIMIZER: set() if stepper is None else ledger.numbers(stepper.state(used=True)),
                COMMUNICATION: ledger.numbers(buffers),
            }
            unused = set() if stepper is None else ledger.numbers(stepper.state(used=False))
            if stepper is not None:
                stepper.step()
            log = ledger.finish(without=unused)
    return read_log(log, known, end, flops, known_values, hosted=ledger.hosted)


@dataclass
class _Step:
    model: nn.Module
    batch: Any
    loss: Loss | None
    autocast: torch.dtype | None
    keep_output: bool
    known_values: KnownValues
    output: Any = None

    def forward(self) -> Forward:
        self.output = None
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            try:
                return run_forward(self._run, self.batch, self.loss)[0]
            except NEEDS_VALUES as error:
                raise ActivationCheckpointingError(
                    f"{type(self.model).__name__} looks at values that only a real run has ({error}). Integers and "
                    "booleans of the batch are known if the batch has real tensors for them; what depends on weights "
                    "is not"
                ) from error
            except (ValueError, RuntimeError, IndexError) as error:
                if not self.known_values.compared or isinstance(error, ActivationCheckpointingError):
                    raise
                raise ActivationCheckpointingError(
                    f"{type(self.model).__name__} fails on this batch ({error}) after it has compared pixels that are "
                    "not known with a constant: no image was taken to be padding. If some are, give the real pixels in "
                    "batch="
                ) from error

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.keep_output:
            self.output = output
        return output


def _steps_until_settled(model: nn.Module) -> int:
    # `selective` learns in its first step what to keep. FSDP2's first is like all others, buffers and all.
    return int(any(forward.context_fn is not None for _, forward in checkpointed_forwards(model)))


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


class _Stepper:
    """An optimizer that has stepped once, so that its state is there from the beginning of the step.

    Of a sharded parameter it steps on this rank's part, as a plain tensor: the bytes are those of the DTensor, which
    would take ten times as long.
    """

    def __init__(self, model: nn.Module, build: Optimizer) -> None:
        self._pairs = [(p, nn.Parameter(_local(p.detach()))) for p in model.parameters() if p.requires_grad]
        self.optimizer = build([part for _, part in self._pairs])
        for _, part in self._pairs:
            part.grad = torch.empty_like(part)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for parameter, part in self._pairs:
            part.grad = None if parameter.grad is None else _local(parameter.grad)
        self.optimizer.step()

    def state(self, *, used: bool) -> list[Tensor]:
        """The state of the parameters that have gradients now, or of the others, for which a real run has none."""
        parts = [part for parameter, part in self._pairs if (parameter.grad is not None) == used]
        return [tensor for part in parts for _, tensor in named_tensors(self.optimizer.state.get(part, {}), "")]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _watched(blocks: list[Block], ledger: Ledger) -> Iterator[None]:
    """Tells the ledger when a block begins and ends, in forward and backward.

    A block's backward begins when the gradient of its output is there. It ends when that of its input is, which in most
    models is when the block before it begins.
    """

    def backward_begins(name: str, _: Tensor) -> None:
        ledger.begin("backward", name)

    def backward_ends(name: str, _: Tensor) -> None:
        if ledger.now == ("backward", name):
            ledger.begin("backward")

    def on_gradients(values: Any, hook: Callable[[Tensor], None]) -> None:
        for _, tensor in named_tensors(values, ""):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def before(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_gradients([*args, *kwargs.values()], partial(backward_ends, name))
        ledger.begin("forward", name)

    def after(name: str, _: nn.Module, _args: Any, output: Any) -> None:
        ledger.begin("forward")
        on_gradients(output, partial(backward_begins, name))

    with ExitStack() as stack:
        for block in blocks:
            handles = (
                block.module.register_forward_pre_hook(partial(before, block.name), with_kwargs=True),
                block.module.register_forward_hook(partial(after, block.name)),
            )
            for handle in handles:
                stack.callback(handle.remove)
        yield
