"""`plan`: the cheapest checkpointing, block by block, that fits a memory budget."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from ac_core.choice import Option
from ac_core.config import ActivationCheckpointingConfig, OffloadName, Scope
from ac_core.discovery.blocks import BlockChoice
from ac_core.errors import ActivationCheckpointingError, BudgetError
from ac_core.estimation.estimate import Device, Kernels, TrainingStep
from ac_core.estimation.simulate import Optimizer, Simulation
from ac_core.estimation.strategies import ShareExperts, Strategy
from ac_core.planning.budget import Budget, parse_budget
from ac_core.planning.course import Course
from ac_core.planning.measuring import Bench, measured
from ac_core.planning.refusal import too_small
from ac_core.planning.result import Plan, Point
from ac_core.proof.step import Loss

_CORRECTIONS = 6
"""Times that a choice is made again after a simulation has shown it above the budget."""
_POINTS = 32
"""Of the curve."""


def plan(
    model: nn.Module | Callable[[], nn.Module],
    *,
    budget: str | int | float,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    batch: Any = None,
    dtype: torch.dtype | None = torch.bfloat16,
    compute_dtype: torch.dtype | None = None,
    optimizer: str | Optimizer | None = "adamw",
    scope: Scope | list[str] = "all",
    layers: str | dict[str, str] | None = None,
    offload: OffloadName = "none",
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
    strategy: Strategy = "none",
    dp_size: int = 1,
    ep_size: int = 1,
    share_experts: ShareExperts | None = None,
    expert_load: float = 1.0,
    gradient_accumulation_steps: int = 1,
    loss: Literal["plain", "fused"] | Loss = "plain",
    kernels: Kernels = "plain",
    keep_output: bool = False,
    device: Device = "cuda",
) -> Plan:
    """The cheapest checkpointing, block by block, with which a training step fits a memory budget.

    Each block keeps everything, or its input alone, or one of several sets of calls between. What each of these takes
    is counted on tensors without values, the best mix is found exactly, and the mix is simulated once more: it is never
    over the budget if any is within it.

        plan = ac_core.plan(lambda: LlamaForCausalLM(config), batch_size=8, sequence_length=2048, budget="24GiB")
        print(plan)
        ac_core.apply_activation_checkpointing(model, plan.to_config())

    Args:
        budget: of a step at its peak, parameters, gradients and optimizer state included: `"24GiB"`, `"24GB"`, a whole
            number of bytes, `0.5` or `"50%"` of what the step takes without checkpointing, or `"device"`: what the
            current CUDA device has left for this process.
        scope, layers: which blocks may be checkpointed, as in `ActivationCheckpointingConfig`. The others keep all.
        offload: `"cpu"`: inputs of checkpointed blocks may go to host memory, where that makes the plan cheaper.
        model and the rest: as for `ac_core.estimate`.

    Raises:
        ValueError: a setting has no such value, or two contradict each other.
        TypeError: the model is none.
        BudgetError: no plan is within the budget; it says what the smallest takes, and what would help.
        ActivationCheckpointingError: there is no CUDA device for `"device"`; the model cannot be checkpointed or
            simulated.
    """
    parse_budget(budget)
    step = TrainingStep(
        model=model,
        batch_size=batch_size,
        sequence_length=sequence_length,
        batch=batch,
        dtype=dtype,
        compute_dtype=compute_dtype,
        optimizer=optimizer,
        blocks=blocks,
        strategy=strategy,
        dp_size=dp_size,
        ep_size=ep_size,
        share_experts=share_experts,
        expert_load=expert_load,
        gradient_accumulation_steps=gradient_accumulation_steps,
        loss=loss,
        kernels=kernels,
        keep_output=keep_output,
        device=device,
    )
    config = ActivationCheckpointingConfig(scope=scope, layers=layers, offload=offload)
    return make_plan(step, budget, config)


def plan_here(
    model: nn.Module,
    config: ActivationCheckpointingConfig,
    batch: Any,
    blocks: BlockChoice | Iterable[BlockChoice] | None,
) -> Plan:
    """The plan for the `memory_budget` of a config, for a model as it is, one process and AdamW."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ActivationCheckpointingError(
            "memory_budget: the parameters of this model are sharded already, and a plan is made from whole ones; make "
            "it before: ac_core.plan(model, ..., strategy='fsdp2', dp_size=...).to_config()"
        )
    device: Device = "cuda" if any(parameter.is_cuda for parameter in model.parameters()) else "cpu"
    step = TrainingStep(model=model, batch=batch, dtype=None, blocks=blocks, device=device)
    assert config.memory_budget is not None
    return make_plan(step, config.memory_budget, config)


def make_plan(step: TrainingStep, budget: str | int | float, config: ActivationCheckpointingConfig) -> Plan:
    """The plan for a step.

    Args:
        budget: as `memory_budget`.
        config: scope, layers and switches; its policy is not looked at.

    Raises: as `plan`.
    """
    parse_budget(budget)
    base = replace(config, policy="full", memory_budget=None, plan=None)
    bench = Bench(step.simulate, base, step.blocks, step.setting(base))
    return fit(budget, bench, *measured(bench))


def fit(budget: str | int | float, bench: Bench, course: Course, plain: Simulation) -> Plan:
    """The cheapest choice for the blocks within a budget.

    NOTE [ Never over budget ]
    The choice is the optimum for the figures that were counted. What is promised is not that, but what a simulation of
    the chosen mix itself shows. Where that is above the budget, what it shows is added to the figures and the choice is
    made again, until one is within it. If none is, choices that are low by other figures have the last word, all `full`
    among them.

    Args:
        budget: as `memory_budget`.
        bench, course, plain: as `measured` leaves them.
    """
    limit = _in_bytes(parse_budget(budget), plain.peak)
    if plain.peak <= limit:
        chosen, simulated = dict.fromkeys(course.order, "none"), plain
    else:
        chosen, simulated = _within(limit, course, bench)
    assert bench.chosen is not None
    shares = {name: course.options[name][option] for name, option in chosen.items()}
    return Plan(
        # A block that has no part in this step is run again whole, which is free, once it has.
        blocks={name: chosen.get(name, "full") for name in bench.chosen},
        budget=budget,
        budget_bytes=limit,
        peak_bytes=simulated.peak,
        peak_moment=simulated.peak_moment,
        saved_bytes=simulated.end - sum(simulated.log.before.values()),
        host_bytes=simulated.host,
        recompute_flops=simulated.recompute_flops,
        forward_flops=simulated.forward_flops,
        none_peak_bytes=plain.peak,
        curve=tuple(Point(peak, *course.totals(choice)) for peak, choice in course.curve(_POINTS)),
        fixed=dict(course.fixed),
        per_block={name: (figures.kept, figures.flops) for name, figures in shares.items()},
        config=bench.config,
    )


def _within(limit: int, course: Course, bench: Bench) -> tuple[dict[str, Option], Simulation]:
    tried: list[tuple[dict[str, Option], Simulation]] = []
    for chosen in _cheapest(limit, course):
        simulated = bench.run(chosen, "full")
        if simulated.peak <= limit:
            return chosen, simulated
        tried.append((chosen, simulated))
        course.calibrate(simulated, chosen, above=limit)
    for chosen in _small(course, tried):
        simulated = bench.run(chosen, "full")
        if simulated.peak <= limit:
            return _cheaper(limit, course, bench, chosen, simulated)
        tried.append((chosen, simulated))
    raise BudgetError(too_small(limit, _lowest(tried)[1], bench.setting))


def _cheapest(limit: int, course: Course) -> Iterator[dict[str, Option]]:
    """By the figures, which are corrected in between."""
    for _ in range(_CORRECTIONS):
        chosen = course.solve(limit)
        if chosen is None:
            return
        yield chosen


def _small(course: Course, tried: list[tuple[dict[str, Option], Simulation]]) -> Iterator[dict[str, Option]]:
    """Choices that take little, one after the other, but for those that were above the limit: they are in `tried`.

    Figures are corrected upwards only, and what one choice has shown may be too much for another. So this asks steps:
    of blocks that are not alike, also those that give all of one kind another option.
    """
    for choice in (course.smallest(), dict.fromkeys(course.order, "full")):
        if not _is_among(tried, choice):
            yield choice
    kinds = course.kinds()
    for members in kinds if len(kinds) > 1 else ():
        for option in ("none", "full"):
            other = _lowest(tried)[0] | dict.fromkeys(members, option)
            if not _is_among(tried, other):
                yield other


def _is_among(tried: list[tuple[dict[str, Option], Simulation]], choice: dict[str, Option]) -> bool:
    return any(choice == other for other, _ in tried)


def _cheaper(
    limit: int, course: Course, bench: Bench, chosen: dict[str, Option], simulated: Simulation
) -> tuple[dict[str, Option], Simulation]:
    """`chosen`, with kinds of blocks that keep everything after all, where a step shows that they can."""
    kinds = course.kinds()
    for members in kinds if len(kinds) > 1 else ():
        other = chosen | dict.fromkeys(members, "none")
        if other != chosen and (found := bench.run(other, "full")).peak <= limit:
            chosen, simulated = other, found
    return chosen, simulated


def _lowest(tried: list[tuple[dict[str, Option], Simulation]]) -> tuple[dict[str, Option], Simulation]:
    return min(tried, key=lambda one: one[1].peak)


def _in_bytes(asked: Budget, without: int) -> int:
    if asked == "device":
        return _of_device()
    return int(asked * without) if isinstance(asked, float) else asked


def _of_device() -> int:
    """Bytes that every rank can have on its CUDA device: the least, for all have to make the same plan."""
    available = _available()
    if not (distributed.is_available() and distributed.is_initialized()):
        return available
    of_ranks = [0] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, available)
    return min(of_ranks)


def _available() -> int:
    """Bytes that this process can have on its CUDA device: what is free, and what it holds already."""
    if not torch.cuda.is_available():
        raise ActivationCheckpointingError(
            "memory_budget: 'device' is what the current CUDA device has, and there is none here; give a size, such as "
            "'80GiB'"
        )
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()
