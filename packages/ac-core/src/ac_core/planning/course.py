"""The memory of a step as a function of what is done with each block, read off simulations of it.

NOTE [ Stations ]
A step is highest at one of its stations: the backward of a block, or a stretch outside of blocks (embeddings, what lies
between towers, head and loss, the optimizer's step). At each, memory holds what the blocks keep whose backward has not
come yet, those before it in the order of the forward; and for a block, its own working memory. The rest does not depend
on the options: parameters, optimizer state, gradients so far, buffers. It is what remains of a simulated step when the
former is taken off.

The tensor between two blocks belongs to the second, which keeps it or not. The simulation counts it to the first, which
made it; in a step where all blocks hold their inputs alike, or all do not, that is the same number of bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ac_core.choice import Option as BlockOption
from ac_core.estimation.simulate import Simulation
from ac_core.planning.knapsack import Option, Solution, least_peak, pareto, solve
from ac_core.planning.result import FixedPolicy

_NOTHING = [Option("", 0, 0, 0.0)]


@dataclass(frozen=True)
class Figures:
    """What an option of a block takes. kept, working: bytes, as in NOTE [ Peak of a plan ]. flops: run again.
    rewritten: bytes of the tensors made again, or copied. host: bytes in host memory."""

    kept: int
    working: int
    flops: int
    rewritten: int
    host: int = 0


@dataclass
class Course:
    """The stations of a step.

    order: the blocks, as the forward comes to them. options: figures of each block's options, the one that it has in
    the first simulation included. beside: bytes beside the options at each block's backward. between: those of the
    stretches after the first `i` blocks, for i from 0 to all of them; 0 where there is none. exchange: FLOPs that take
    as long as making a byte again. fixed: the policies to compare with, by name.
    """

    order: tuple[str, ...]
    options: Mapping[str, Mapping[BlockOption, Figures]]
    exchange: float
    beside: dict[str, int] = field(default_factory=dict)
    between: list[int] = field(default_factory=list)
    fixed: dict[str, FixedPolicy] = field(default_factory=dict)

    def calibrate(
        self, simulated: Simulation, chosen: Mapping[str, BlockOption], *, above: float | None = None
    ) -> None:
        """Raise what lies beside the options to what a simulation shows.

        above: only where the step has more bytes than this; and there, the forward of a block counts as a stretch. That
        is lower than the block's backward, but for a block that needs much memory that is not for its backward.
        """
        self.between = self.between or [0] * (len(self.order) + 1)
        kept = self.kept_before(chosen)
        for station, size in stations(simulated, self.order, forwards=above is not None):
            if above is not None and size <= above:
                continue
            if isinstance(station, int):
                self.between[station] = max(self.between[station], size - kept[station])
            else:
                working = self.options[station][chosen[station]].working
                beside = size - kept[self.order.index(station)] - working
                self.beside[station] = max(self.beside.get(station, beside), beside)

    def kept_before(self, chosen: Mapping[str, BlockOption]) -> list[int]:
        """Bytes that the first `i` blocks keep, for i from 0 to all of them."""
        sums = [0]
        for name in self.order:
            sums.append(sums[-1] + self.options[name][chosen[name]].kept)
        return sums

    def peak(self, chosen: Mapping[str, BlockOption]) -> int:
        """Of a step, in bytes."""
        kept = self.kept_before(chosen)
        at_blocks = (
            kept[place] + self.options[name][chosen[name]].working + self.beside[name]
            for place, name in enumerate(self.order)
        )
        return max(*at_blocks, *(k + beside for k, beside in zip(kept, self.between, strict=True)))

    def solve(self, limit: float) -> dict[str, BlockOption] | None:
        """The cheapest choice whose peak is at most `limit` bytes; `None` where there is none."""
        blocks, fixed, end = self._instance()
        found = solve(blocks, limit, fixed=fixed, end=end)
        return None if found is None else self._chosen(found)

    def smallest(self) -> dict[str, BlockOption]:
        """The choice with the lowest peak."""
        blocks, fixed, end = self._instance()
        return self._chosen(least_peak(blocks, fixed=fixed, end=end))

    def kinds(self) -> list[list[str]]:
        """The blocks, by their structure: those of one have the same options."""
        found: dict[int, list[str]] = {}
        for name in self.order:
            found.setdefault(id(self.options[name]), []).append(name)
        return list(found.values())

    def curve(self, most: int) -> list[tuple[int, dict[str, BlockOption]]]:
        """Choices that no other beats in peak and cost, with the peak of each: from the cheapest to the smallest."""
        blocks, fixed, end = self._instance()
        return [(found.peak, self._chosen(found)) for found in pareto(blocks, fixed=fixed, end=end, most=most)]

    def totals(self, chosen: Mapping[str, BlockOption]) -> tuple[int, int, float]:
        """Of all blocks: bytes kept, FLOPs run again, and cost."""
        figures = [self.options[name][chosen[name]] for name in self.order]
        return sum(f.kept for f in figures), sum(f.flops for f in figures), sum(map(self.cost, figures))

    def cost(self, figures: Figures) -> float:
        """Of an option, in FLOPs: what is run again, and the time of the memory traffic that goes with it."""
        return figures.flops + self.exchange * figures.rewritten

    def _instance(self) -> tuple[list[Sequence[Option]], list[int], int]:
        blocks: list[Sequence[Option]] = []
        fixed = []
        for place, name in enumerate(self.order):
            own = [
                Option(str(number), figures.kept, figures.working, self.cost(figures))
                for number, figures in enumerate(self.options[name].values())
            ]
            blocks += [_NOTHING, own]
            fixed += [self.between[place], self.beside[name]]
        return blocks, fixed, self.between[-1]

    def _chosen(self, found: Solution) -> dict[str, BlockOption]:
        of_blocks = found.options[1::2]
        return {
            name: list(self.options[name])[int(option.name)] for name, option in zip(self.order, of_blocks, strict=True)
        }


def stations(simulated: Simulation, order: Sequence[str], *, forwards: bool) -> list[tuple[str | int, int]]:
    """What a simulation shows of its stations: the block whose backward it is, or the number of blocks whose forward
    has been and whose backward has not; and the most bytes at it. forwards: those of blocks as well."""
    moments = simulated.log.moments
    last_forward: dict[str, int] = {}
    first_backward: dict[str, int] = {}
    for index, moment in enumerate(moments):
        if moment.block in order and moment.phase == "forward":
            last_forward[moment.block] = index
        elif moment.block in order and moment.phase == "backward":
            first_backward.setdefault(moment.block, index)

    def pending(index: int) -> int:
        there = [
            place
            for place, name in enumerate(order)
            if last_forward[name] < index <= first_backward[name] and moments[index].block != name
        ]
        return max(there, default=-1) + 1

    return [
        (moment.block if moment.block in order and moment.phase == "backward" else pending(index), size)
        for index, (moment, (_, size)) in enumerate(zip(moments, simulated.timeline, strict=True))
        if forwards or moment.block not in order or moment.phase == "backward"
    ]
