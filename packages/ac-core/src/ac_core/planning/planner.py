"""`plan`: the cheapest checkpointing, block by block, that fits a memory budget."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import distributed

from ac_core.choice import Option
from ac_core.config import ActivationCheckpointingConfig
from ac_core.discovery.blocks import BlockChoice
from ac_core.errors import ActivationCheckpointingError
from ac_core.estimation.simulate import Simulation
from ac_core.planning.budget import Budget, parse_budget, size_text
from ac_core.planning.course import Course
from ac_core.planning.measuring import Bench, Step, measured
from ac_core.planning.result import Plan, Point

_CORRECTIONS = 6
"""Times that a choice is made again after a simulation has shown it above the budget."""
_POINTS = 32
"""Of the curve."""


def make_plan(
    step: Step,
    budget: object,
    config: ActivationCheckpointingConfig,
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
) -> Plan:
    """The cheapest choice for the blocks of a model within a budget.

    NOTE [ Never over budget ]
    The choice is the optimum for the figures that were counted. What is promised is not that, but what a simulation of
    the chosen mix itself shows. Where that is above the budget, what it shows is added to the figures and the choice is
    made again, until one is within it; if none is, the last word has the choice with the lowest peak.

    Args:
        step: simulates a training step of the model.
        budget: as `memory_budget`.
        config: scope, layers and switches.
        blocks: as for `find_blocks`.

    Raises:
        ValueError: the budget has no such form.
        ActivationCheckpointingError: no choice is within the budget; the model cannot be checkpointed.
    """
    asked = parse_budget(budget)
    bench = Bench(step, replace(config, policy="full", memory_budget=None, plan=None), blocks)
    course, plain = measured(bench)
    limit = _in_bytes(asked, plain.peak)
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
        recompute_flops=simulated.recompute_flops,
        forward_flops=simulated.forward_flops,
        none_peak_bytes=plain.peak,
        curve=tuple(Point(peak, *course.totals(choice)) for peak, choice in course.curve(_POINTS)),
        per_block={name: (figures.kept, figures.flops) for name, figures in shares.items()},
        config=bench.config,
    )


def _within(limit: int, course: Course, bench: Bench) -> tuple[dict[str, Option], Simulation]:
    for _ in range(_CORRECTIONS):
        chosen = course.solve(limit)
        if chosen is None:
            break
        simulated = bench.run(chosen, "full")
        if simulated.peak <= limit:
            return chosen, simulated
        course.calibrate(simulated, chosen, above=limit)
    chosen = course.smallest()
    simulated = bench.run(chosen, "full")
    if simulated.peak > limit:
        raise ActivationCheckpointingError(_too_small(limit, simulated))
    return chosen, simulated


def _too_small(limit: int, smallest: Simulation) -> str:
    lasting = sum(smallest.log.before.values())
    where = smallest.peak_moment
    if where == "optimizer step":
        remedy = "an optimizer with less state, or parameters and state sharded over more ranks (strategy fsdp2)"
    elif "loss" in where:
        remedy = "a loss that never has all logits (loss='fused'), or a smaller batch or shorter sequence"
    else:
        remedy = "a smaller batch or shorter sequence, or parameters and state sharded over more ranks (strategy fsdp2)"
    return (
        f"memory_budget: no plan fits into {size_text(limit)}. The smallest peak of any is {size_text(smallest.peak)}, "
        f"{size_text(smallest.peak - limit)} more, in the {where}; parameters, optimizer state and batch alone are "
        f"{size_text(lasting)}. Give at least {smallest.peak} bytes, or {remedy}"
    )


def _in_bytes(asked: Budget, without: int) -> int:
    if asked == "device":
        return _of_device()
    return int(asked * without) if isinstance(asked, float) else asked


def _of_device() -> int:
    """Bytes that this process can have on its CUDA device: what is free, and what it holds already. Over the ranks of
    a process group the least: all have to make the same plan."""
    if not torch.cuda.is_available():
        raise ActivationCheckpointingError(
            "memory_budget: 'device' is what the current CUDA device has, and there is none here; give a size, such as "
            "'80GiB'"
        )
    free, _ = torch.cuda.mem_get_info()
    available = free + torch.cuda.memory_reserved()
    if distributed.is_available() and distributed.is_initialized():
        least = torch.tensor(available, device=torch.cuda.current_device())
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        available = int(least)
    return available
