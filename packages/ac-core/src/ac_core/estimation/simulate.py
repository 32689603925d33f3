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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ac_core.discovery.blocks import Block, BlockChoice, find_blocks
from ac_core.errors import ActivationCheckpointingError
from ac_core.estimation.categories import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS, Bounds
from ac_core.estimation.fake import NEEDS_VALUES, KnownValues, count_experts, fake_batch, fake_mode, fake_model
from ac_core.estimation.ledger import Ledger, Log
from ac_core.proof.meters import Flops
from ac_core.proof.step import Forward, Loss, named_tensors, run_forward
from ac_core.region.forward import checkpointed_forwards

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From the parameters that need gradients to the optimizer that steps on them."""


@dataclass(frozen=True)
class BlockUse:
    """What one block takes. All bytes are of its own tensors.

    kept: bytes from the block's forward to its backward. working: the most during its backward, what it kept included;
    of that moment: beside, what lives besides it and besides what the blocks before it have kept (parameters, optimizer
    state, gradients of the blocks behind, ...). So the step's memory is highest in the block's backward at
    `sum of kept of the blocks before + working + beside`. forward_flops: of its forward. recompute_flops: of what is
    run again for its backward.
    """

    name: str
    kept: int
    working: int
    beside: int
    forward_flops: int
    recompute_flops: int


@dataclass(frozen=True)
class Simulation:
    """One step. Bytes are of everything that the step has in memory, parameters included.

    peak: bytes. peak_moment: when that is, such as `"backward of model.layers.3"`. peak_entry: in the log. timeline:
    for each stretch of the step, its name and the most bytes alive in it. parameters, gradients, optimizer: bytes of
    each, all of them. end: bytes alive between forward and backward; end_entry: in the log. blocks: in the order in
    which they first ran. forward_flops, backward_flops, recompute_flops: of matrix multiplications, convolutions and attention.
    experts: among which a router chooses; 0: there is none. assumed_uniform_routing: whether shapes depended on what it
    chose. log: every allocation and release. known: numbers of the storages in it that are parameters and buffers, gradients,
    optimizer state, communication buffers.
    """

    peak: int
    peak_moment: str
    peak_entry: int
    timeline: tuple[tuple[str, int], ...]
    parameters: int
    gradients: int
    optimizer: int
    end: int
    end_entry: int
    blocks: tuple[BlockUse, ...]
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    experts: int
    assumed_uniform_routing: bool
    log: Log = field(repr=False)
    known: dict[str, set[int]] = field(repr=False)


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
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
) -> Simulation:
    """Simulate a training step of `model` on `batch`: forward, backward into empty gradients, optimizer step.

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
        blocks: what the blocks are, where the rules do not find them; see `find_blocks`.

    Raises:
        TypeError: the model is none, or the batch is nothing that a model can be called with.
        ActivationCheckpointingError: nothing needs a gradient; tensors of the model cannot be made fake; it looks at
            values that are not known.
    """
    flops, known_values = Flops(), KnownValues()
    with fake_mode(), known_values, flops, Ledger(flops) as ledger:
        made = fake_model(model, dtype)
        found = find_blocks(made, blocks)
        inputs = fake_batch(batch(made, found) if callable(batch) else batch)
        if prepare is not None:
            prepare(made)
        known_values.experts = count_experts(made)
        buffers = [] if shard is None else shard(made, found)
        ledger.sharded = any(isinstance(module, FSDPModule) for module in made.modules())
        stepper = None if optimizer is None or not _trains(made) else _Stepper(made, optimizer)
        step = _Step(made, inputs, loss, autocast, keep_output)
        for _ in range(_steps_until_settled(made)):
            step.forward().backward()
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
    return _read(log, known, end, flops, [block.name for block in found], known_values)


@dataclass
class _Step:
    model: nn.Module
    batch: Any
    loss: Loss | None
    autocast: torch.dtype | None
    keep_output: bool
    output: Any = None

    def forward(self) -> Forward:
        self.output = None
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            try:
                return run_forward(self._run, self.batch, self.loss)[0]
            except NEEDS_VALUES as error:
                raise ActivationCheckpointingError(
                    f"{type(self.model).__name__} looks at values that only a real run has ({error}). Integers and "
                    "booleans of the batch are known if the batch has real tensors for them; what depends on weights is "
                    "not"
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
        """The state of the parameters that have gradients now, or of the others, for which a real run would have none."""
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


def _read(
    log: Log, known: dict[str, set[int]], end: int, flops: Flops, names: list[str], values: KnownValues
) -> Simulation:
    peaks = log.peaks()
    at_end, at_stop = log.alive(end), log.alive(len(log.changes))
    first = max(range(len(peaks)), key=lambda i: peaks[i][0])
    labels = _labels(log)
    return Simulation(
        peak=peaks[first][0],
        peak_moment=labels[first],
        peak_entry=peaks[first][1],
        timeline=tuple((label, size) for label, (size, _) in zip(labels, peaks, strict=True)),
        parameters=sum(at_stop.get(number, 0) for number in known[PARAMETERS]),
        gradients=sum(at_stop.get(number, 0) for number in known[GRADIENTS]),
        optimizer=sum(at_stop.get(number, 0) for number in known[OPTIMIZER]),
        end=sum(at_end.values()),
        end_entry=end,
        blocks=tuple(_uses(log, peaks, at_end, known, names)),
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        recompute_flops=flops.recompute,
        experts=values.experts,
        assumed_uniform_routing=values.assumed,
        log=log,
        known=known,
    )


def _labels(log: Log) -> list[str]:
    """What to call the moments."""
    bounds = Bounds.of(log)
    labels = []
    for index, moment in enumerate(log.moments):
        if moment.phase == "optimizer":
            labels.append("optimizer step")
        elif moment.block:
            labels.append(f"{moment.phase} of {moment.block}")
        else:
            labels.append(f"{moment.phase} {'of head and loss' if index in bounds else 'outside of blocks'}")
    return labels


def _uses(
    log: Log, peaks: list[tuple[int, int]], at_end: dict[int, int], known: dict[str, set[int]], names: list[str]
) -> Iterator[BlockUse]:
    order = list(dict.fromkeys(m.block for m in log.moments if m.phase == "forward" and m.block in names))
    lasting = set().union(*known.values())
    owner: dict[int, tuple[str, str]] = {}  # storages of blocks
    for number, birth in log.births.items():
        moment = log.moments[birth.moment] if birth.moment >= 0 else None
        if moment is not None and moment.block is not None and number not in lasting:
            owner[number] = (moment.phase, moment.block)
    kept = dict.fromkeys(order, 0)
    after = log.alive(len(log.changes))
    for number, size in at_end.items():
        phase, block = owner.get(number, ("", None))
        if phase == "forward" and block in kept:
            kept[block] += size - after.get(number, 0)
    before = 0
    for name in order:
        windows = [i for i, m in enumerate(log.moments) if (m.phase, m.block) == ("backward", name)]
        total = working = 0
        for i in windows:
            size, entry = peaks[i]
            if size > total:
                alive = log.alive(entry)
                total, working = size, sum(s for n, s in alive.items() if owner.get(n, ("", None))[1] == name)
        forward = sum(m.flops for m in log.moments if (m.phase, m.block) == ("forward", name))
        again = sum(log.moments[i].recompute for i in windows)
        yield BlockUse(name, kept[name], working, max(0, total - before - working), forward, again)
        before += kept[name]
