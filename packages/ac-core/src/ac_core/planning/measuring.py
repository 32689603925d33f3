"""What each option of each block takes: counted in as few simulated steps as show them all.

Blocks of the same structure take the same, so each of them can be given another option in one and the same step.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from ac_core.apply import apply_activation_checkpointing
from ac_core.choice import OFFLOAD, Option, selected_blocks, with_offload
from ac_core.config import ActivationCheckpointingConfig, PolicyName
from ac_core.discovery.blocks import BlockChoice, find_blocks
from ac_core.estimation.assumptions import Setting
from ac_core.estimation.estimate import Apply
from ac_core.estimation.simulate import Simulation
from ac_core.planning.course import Course, Figures, stations
from ac_core.planning.options import KEEP_ALL, kept_sets
from ac_core.planning.result import FixedPolicy
from ac_core.region.contexts import ContextFn
from ac_core.region.forward import checkpointed_forwards
from ac_core.selective.context import KeptCalls

Step = Callable[[Apply], Simulation]
"""Simulates a training step of a model to which a function is applied first."""

_EXCHANGE = {2: 400.0, 4: 20.0}
"""FLOPs in the time that a byte takes to be made again, by the size of the model's numbers.

A norm or an activation moves about three bytes for one that it makes. By its data sheet an A100 does some 250 TFLOP/s
of bfloat16 matmuls while it moves 2 TB/s, which is 400 FLOPs for a byte made; an H100 somewhat more. In fp32 on a CPU 5
to 45 were measured, the less the wider the model. It decides between options that differ little in FLOPs: keeping all
of a block is dearer in bytes than keeping its matmuls, and cheaper in time.
"""


@dataclass
class Bench:
    """Simulates steps of one model under one option or another for each of its blocks.

    step: of the model. config: scope, layers and switches. blocks: as for `find_blocks`. setting: what the step is of.
    """

    step: Step
    config: ActivationCheckpointingConfig
    blocks: BlockChoice | Iterable[BlockChoice] | None = None
    setting: Setting = field(default_factory=Setting)
    model: nn.Module | None = None
    """That of the last step, without values."""
    chosen: dict[str, Option] | None = None
    """What was applied in it, by block in model order."""

    def run(self, options: Mapping[str, Option], rest: Option, *, strict: bool = True) -> Simulation:
        """A step with these options for these blocks, and one for the rest. strict: what they name has to be there.

        Raises:
            ActivationCheckpointingError: the model, or its blocks, cannot be checkpointed as the config says.
        """

        def apply(model: nn.Module, *, context_fn: ContextFn | None = None) -> None:
            found = find_blocks(model, self.blocks)
            names = selected_blocks(found, self.config)
            self.model = model
            self.chosen = {block.name: options.get(block.name, rest) for block in found if block.name in names}
            base = replace(self.config, strict=strict and self.config.strict)
            config = replace(base, policy="full") if not names else budget_config(base, self.chosen)
            apply_activation_checkpointing(model, config, blocks=self.blocks, context_fn=context_fn)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "plan: ")  # of families that are named in case there are any
            return self.step(apply)

    def fixed(self, policy: PolicyName) -> Simulation:
        """A step with one policy for all blocks. Raises: as `run`."""
        config = replace(self.config, policy=policy, offload="none")
        return self.step(partial(apply_activation_checkpointing, config=config, blocks=self.blocks))


def budget_config(base: ActivationCheckpointingConfig, plan: dict[str, Any]) -> ActivationCheckpointingConfig:
    """The config that applies a plan."""
    return replace(base, policy="budget", plan=plan)


def measured(bench: Bench) -> tuple[Course, Simulation]:
    """The course of a step of the bench's model, and the step without checkpointing.

    Blocks that the step does not call, or that no gradient comes to, are not in it.
    """
    plain = bench.run({}, "none")
    assert bench.model is not None
    assert bench.chosen is not None
    order = tuple(use.name for use in plain.blocks if use.name in bench.chosen and use.working)
    classes = _classes(bench.model, plain, order)
    bench.run({members[0]: KEEP_ALL for members in classes}, "none", strict=False)
    sets = [_sets(bench.model, members[0]) for members in classes]

    uses = {use.name: use for use in plain.blocks}
    by_class: list[dict[Option, Figures]] = []
    typical = []
    for members in classes:
        kept = Counter(uses[name].kept for name in members).most_common(1)[0][0]  # that at the ends may differ
        typical.append([name for name in members if uses[name].kept == kept])
        by_class.append({"none": Figures(kept, uses[typical[-1][0]].working, 0, 0)})
    options = {name: by_class[index] for index, members in enumerate(classes) for name in members}
    course = Course(order, options, _exchange(bench.model))
    course.calibrate(plain, dict.fromkeys(order, "none"))
    todo: list[list[Option]] = [["full", *own] for own in sets]
    while any(todo):
        given = {n: o for places, wanted in zip(typical, todo, strict=True) for n, o in zip(places, wanted)}  # noqa: B905
        simulated = bench.run(given, "full")
        _read(course, simulated, given)
        todo = [wanted[len(places) :] for places, wanted in zip(typical, todo, strict=True)]
    full = dict.fromkeys(order, "full")
    selective = bench.fixed("selective")
    course.fixed = {
        "none": FixedPolicy(plain.peak, 0),
        "selective": FixedPolicy(selective.peak, selective.recompute_flops),
        "full": FixedPolicy(course.peak(full), course.totals(full)[1]),
    }
    if bench.config.offload == "cpu":
        moved = {use.name: use.host for use in bench.run({}, OFFLOAD).blocks}
        for names, figures in zip(typical, by_class, strict=True):
            figures |= {with_offload(o): _offloaded(f, moved[names[0]]) for o, f in figures.items() if o != "none"}
    return course, plain


def _offloaded(figures: Figures, host: int) -> Figures:
    """The same option with the inputs, of `host` bytes, in host memory.

    While the block's backward runs they are back, and so are those of the block before it, which are as large: NOTE
    [ Boundary tensors on the host ]. The copies overlap with computation, and cost the device's memory traffic.
    """
    return Figures(
        max(0, figures.kept - host), figures.working + host, figures.flops, figures.rewritten + 2 * host, host
    )


def _read(course: Course, simulated: Simulation, given: Mapping[str, Option]) -> None:
    """Write down the figures of the options that a step has shown for the first time."""
    uses = {use.name: use for use in simulated.blocks}
    moments = simulated.log.moments
    again: Counter[str | None] = Counter()
    for number, change in zip(simulated.log.storages, simulated.log.changes, strict=True):
        birth = simulated.log.births[number]
        if birth.again and change > 0:
            again[moments[birth.moment].block] += change
    for name, option in given.items():
        course.options[name][option] = Figures(uses[name].kept, 0, uses[name].recompute_flops, again[name])
    chosen = {name: given.get(name, "full") for name in course.order}
    kept = course.kept_before(chosen)
    highest = dict(stations(simulated, course.order, forwards=False))
    for name, option in given.items():
        working = highest[name] - kept[course.order.index(name)] - course.beside[name]
        course.options[name][option] = replace(course.options[name][option], working=working)
    course.calibrate(simulated, chosen)


def _sets(model: nn.Module, block: str) -> list[tuple[str, ...]]:
    """What can be kept of a block, as it has shown under the rule `KEEP_ALL`. Of one that is checkpointed in pieces,
    around its attention: nothing."""
    forwards = {forward.name: forward for _, forward in checkpointed_forwards(model)}
    context_fn = getattr(forwards.get(block), "context_fn", None)
    return kept_sets(context_fn.plan) if isinstance(context_fn, KeptCalls) else []


def _classes(model: nn.Module, plain: Simulation, order: tuple[str, ...]) -> list[list[str]]:
    """The blocks that are alike: of the same modules, with parameters of the same shapes and dtypes, that need
    gradients alike, and whose forward takes the same FLOPs."""
    flops = {use.name: use.forward_flops for use in plain.blocks}
    alike: dict[Any, list[str]] = {}
    for name in order:
        block = model.get_submodule(name)
        tensors = [(p, t.shape, t.dtype, t.requires_grad) for p, t in block.named_parameters()]
        key = (tuple((path, type(m)) for path, m in block.named_modules()), tuple(tensors), flops[name])
        alike.setdefault(key, []).append(name)
    return list(alike.values())


def _exchange(model: nn.Module) -> float:
    sizes = Counter(p.element_size() for p in model.parameters() if p.is_floating_point())
    return _EXCHANGE.get(sizes.most_common(1)[0][0] if sizes else 4, _EXCHANGE[2])
