"""Rows of a run, and what they say about the goals of the project."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from tools.bench.meter import Memory
from tools.bench.rounds import Seconds, best_ratio, paired_difference, paired_ratio, paired_spread
from tools.bench.shapes import Shape
from tools.bench.variants import Variant

MIB = 2**20
FULL_GOAL = 1.02  # time of our full over Hugging Face's
SELECTIVE_GOAL = 0.7  # overhead of our selective, within a peer's bytes, over the best overhead of the peers
HOST_GOAL = 0.65  # host overhead of ours over that of a peer's selective


@dataclass(frozen=True)
class Row:
    """One line of the table.

    milliseconds: of a step, median over the rounds. ratio: paired with no checkpointing, median over the rounds;
    spread: half the interquartile range of that. best: best round over best round. per_block: milliseconds over no
    checkpointing, per block and step. memory: of a step. gradients: "equal" to those of no checkpointing bit for bit,
    or by how much not.
    """

    name: str
    owner: str
    policy: str
    milliseconds: float
    ratio: float
    spread: float
    best: float
    per_block: float
    memory: Memory
    gradients: str

    @property
    def overhead(self) -> float:
        """Share of a step that checkpointing adds."""
        return self.ratio - 1


@dataclass(frozen=True)
class Missing:
    """A variant that did not run, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Goal:
    """One comparison with a goal: it is met where `value <= limit`. `value` is None where nothing qualifies."""

    what: str
    value: float | None
    limit: float

    @property
    def met(self) -> bool:
        """Whether the value is there and within the limit."""
        return self.value is not None and self.value <= self.limit


@dataclass(frozen=True)
class Outcome:
    """A whole run of one command."""

    command: str
    shape: Shape
    rounds: int
    rows: list[Row]
    missing: list[Missing]
    goals: list[Goal]


def make_row(variant: Variant, seconds: Seconds, blocks: int, memory: Memory, gradients: str) -> Row:
    """The row of a variant from the times of all of them; the one named "none" is the base."""
    name = variant.name
    return Row(
        name=name,
        owner=variant.owner,
        policy=variant.policy,
        milliseconds=1e3 * median(seconds[name]),
        ratio=paired_ratio(seconds, name, "none"),
        spread=paired_spread(seconds, name, "none"),
        best=best_ratio(seconds, name, "none"),
        per_block=1e3 * paired_difference(seconds, name, "none") / blocks,
        memory=memory,
        gradients=gradients,
    )


def full_goals(rows: Iterable[Row], seconds: Seconds) -> list[Goal]:
    """Our whole-block checkpointing over Hugging Face's, paired by round."""
    names = {(row.owner, row.policy): row.name for row in rows}
    ours, theirs = names.get(("ours", "full")), names.get(("Hugging Face", "full"))
    value = paired_ratio(seconds, ours, theirs) if ours and theirs else None
    return [Goal("time of ours full over Hugging Face full", value, FULL_GOAL)]


def selective_goals(rows: list[Row], peers: Iterable[str]) -> list[Goal]:
    """For each selective peer: the cheapest of ours that holds no more than it, over the best overhead of any peer."""
    ours = [row for row in rows if row.owner == "ours" and row.policy == "selective"]
    theirs = [row for row in rows if row.owner in peers and row.policy == "selective"]
    if not ours or not theirs:
        return []
    best = min(row.overhead for row in theirs)
    goals = []
    for peer in theirs:
        fitting = [row for row in ours if row.memory.held <= peer.memory.held]
        cheapest = min(fitting, key=lambda row: row.overhead, default=None)
        what = f"overhead within the {peer.memory.held / MIB:.1f} MiB of {peer.name}"
        if cheapest is None:
            goals.append(Goal(f"{what}: none of ours fits", None, SELECTIVE_GOAL))
            continue
        share = cheapest.overhead / peer.overhead
        what += f": {cheapest.name}, {share:.2f} of that peer's and of the best peer's"
        goals.append(Goal(what, cheapest.overhead / best, SELECTIVE_GOAL))
    return goals


def host_goals(rows: list[Row], peers: Iterable[str]) -> list[Goal]:
    """Each of ours over each selective peer, in host milliseconds per block and step."""
    theirs = [row for row in rows if row.owner in peers and row.policy == "selective"]
    return [
        Goal(f"host overhead of {row.name} over {peer.name}", row.per_block / peer.per_block, HOST_GOAL)
        for row in rows
        if row.owner == "ours"
        for peer in theirs
    ]
