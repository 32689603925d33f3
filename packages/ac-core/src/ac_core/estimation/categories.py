"""What the bytes of a step are: every storage in one category, so that they add up."""

from collections.abc import Iterable
from dataclasses import dataclass

from ac_core.estimation.ledger import Birth, Log

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, LOSS, COMMUNICATION, TEMPORARIES = "activations", "loss", "communication", "temporaries"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, COMMUNICATION, TEMPORARIES)
"""Parameters and buffers, gradients of parameters, optimizer state; what the forward keeps or a recompute makes again;
what head and loss make; gathered parameters, buckets and what collectives write to; the rest: gradients of activations,
an optimizer's scratch, the batch."""

_FAMILIES = {
    "attention": ("attention", "flash", "flex"),
    "matmul": ("mm", "linear", "matmul", "convolution", "einsum"),
    "norm": ("norm", "rsqrt", "mean", "pow", "var"),
    "activation function": ("silu", "gelu", "relu", "sigmoid", "tanh", "softmax", "softplus"),
    "embedding": ("embedding",),
    "dropout": ("dropout", "bernoulli", "rand"),
    "cast or copy": ("_to_copy", "copy", "clone", "cat", "repeat", "contiguous"),
    "elementwise": ("add", "mul", "sub", "div", "neg", "exp", "where", "masked"),
}


def family(op: str) -> str:
    """The family of an operation, by its name."""
    return next((name for name, parts in _FAMILIES.items() if any(part in op for part in parts)), "other")


@dataclass(frozen=True)
class Bounds:
    """The moments of head and loss: those behind the last block's forward and before the first block's backward."""

    first: int
    last: int

    @classmethod
    def of(cls, log: Log) -> "Bounds":
        forwards = [i for i, moment in enumerate(log.moments) if moment.phase == "forward"]
        with_block = [i for i in forwards if log.moments[i].block]
        backwards = [i for i, m in enumerate(log.moments) if m.phase == "backward" and m.block]
        first = (with_block[-1] + 1) if with_block else len(log.moments)
        last = (
            backwards[0]
            if backwards
            else next((i for i, m in enumerate(log.moments) if m.phase == "optimizer"), len(log.moments))
        )
        return cls(first, last)

    def __contains__(self, moment: int) -> bool:
        return self.first <= moment < self.last


def categorise(log: Log, known: dict[str, set[int]]) -> dict[int, str]:
    """The category of each storage, by its number."""
    bounds = Bounds.of(log)
    named = {number: category for category, numbers in known.items() for number in numbers}
    grown = {number for number, change in zip(log.storages, log.changes, strict=True) if change > 0}
    return {
        number: named.get(number) or _by_birth(log, birth, bounds, grew=number in grown)
        for number, birth in log.births.items()
    }


def _by_birth(log: Log, birth: Birth, bounds: Bounds, *, grew: bool) -> str:
    if birth.communication or (birth.moment < 0 and grew):  # FSDP2 frees and allocates gathered parameters in place
        return COMMUNICATION
    if birth.moment < 0:
        return TEMPORARIES
    if birth.moment in bounds:
        return LOSS
    phase = log.moments[birth.moment].phase
    return ACTIVATIONS if phase == "forward" or birth.again else TEMPORARIES


@dataclass(frozen=True)
class Shares:
    """most: the most bytes that each category has at any time. at_peak: bytes of each when the step is at its peak."""

    most: dict[str, int]
    at_peak: dict[str, int]


def shares(log: Log, category: dict[int, str], peak_entry: int) -> Shares:
    """How much each category has; see `Shares`."""
    now = dict.fromkeys(CATEGORIES, 0)
    for number, size in log.before.items():
        now[category[number]] += size
    most = dict(now)
    at_peak = dict(now)
    for entry, (number, change) in enumerate(zip(log.storages, log.changes, strict=True), start=1):
        name = category[number]
        now[name] += change
        most[name] = max(most[name], now[name])
        if entry == peak_entry:
            at_peak = dict(now)
    return Shares(most, at_peak)


def kept_by_block(log: Log, category: dict[int, str], at_end: dict[int, int]) -> dict[str, dict[str, int]]:
    """Bytes that the forward keeps for the backward, by block and family of operations; `""`: outside of blocks."""
    after = log.alive(len(log.changes))
    found: dict[str, dict[str, int]] = {}
    for number, size in at_end.items():
        birth = log.births[number]
        if category[number] == ACTIVATIONS and birth.moment >= 0 and size > after.get(number, 0):
            of_block = found.setdefault(log.moments[birth.moment].block or "", {})
            name = family(birth.op)
            of_block[name] = of_block.get(name, 0) + size - after.get(number, 0)
    return found


def largest(alive: dict[int, int], category: dict[int, str], names: Iterable[str]) -> int | None:
    """The number of the largest storage alive of these categories."""
    names = set(names)
    present = [number for number in alive if category[number] in names]
    return max(present, key=alive.__getitem__, default=None)
