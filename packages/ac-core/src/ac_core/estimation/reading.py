"""What the log of a simulated step says."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ac_core.estimation.categories import GRADIENTS, OPTIMIZER, PARAMETERS, Bounds
from ac_core.estimation.fake import KnownValues
from ac_core.estimation.ledger import Log
from ac_core.proof.meters import Flops


@dataclass(frozen=True)
class BlockUse:
    """What one block takes. All bytes are of its own tensors.

    kept: bytes from the block's forward to its backward. working: the most during its backward, what it kept included;
    of that moment: beside, what lives besides it and besides what the blocks before it have kept (parameters, optimizer
    state, gradients of the blocks behind, ...). So the step's memory is highest in the block's backward at
    `sum of kept of the blocks before + working + beside`. forward_flops: of its forward. recompute_flops: of what is
    run again for its backward. host: bytes of its inputs that offloading has moved to the host, in none of the others.
    """

    name: str
    kept: int
    working: int
    beside: int
    forward_flops: int
    recompute_flops: int
    host: int


@dataclass(frozen=True)
class Simulation:
    """One step. Bytes are of everything that the step has in memory, parameters included.

    peak: bytes. peak_moment: when that is, such as `"backward of model.layers.3"`. peak_entry: in the log. timeline:
    for each stretch of the step, its name and the most bytes alive in it. parameters, gradients, optimizer: bytes of
    each, all of them. end: bytes alive between forward and backward; end_entry: in the log. blocks: in the order in
    which they first ran. forward_flops, backward_flops, recompute_flops: of matrix multiplications, convolutions and
    attention. host: bytes that offloading has moved to the host, in none of the others. experts: among which a
    router chooses; 0: there is none. assumed_uniform_routing: whether shapes depended on what it chose.
    assumed_no_padding: whether floating-point numbers were compared with a constant, as to find images that are
    padding. log: every allocation and release. known: numbers of the storages in it that are parameters and buffers,
    gradients, optimizer state, communication buffers.
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
    host: int
    experts: int
    assumed_uniform_routing: bool
    assumed_no_padding: bool
    log: Log = field(repr=False)
    known: dict[str, set[int]] = field(repr=False)


def read_log(
    log: Log,
    known: dict[str, set[int]],
    end: int,
    flops: Flops,
    values: KnownValues,
    *,
    hosted: Mapping[str | None, int],
) -> Simulation:
    """What a step was, from its log.

    known: see `Simulation`. end: the entry of the log after which the forward was over. hosted: bytes copied to
    the host, by block.
    """
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
        blocks=tuple(_uses(log, peaks, at_end, known, hosted)),
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        recompute_flops=flops.recompute,
        host=sum(hosted.values()),
        experts=values.experts,
        assumed_uniform_routing=values.assumed,
        assumed_no_padding=values.compared,
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
    log: Log,
    peaks: list[tuple[int, int]],
    at_end: dict[int, int],
    known: dict[str, set[int]],
    hosted: Mapping[str | None, int],
) -> Iterator[BlockUse]:
    order = list(dict.fromkeys(m.block for m in log.moments if m.phase == "forward" and m.block))
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
        yield BlockUse(name, kept[name], working, max(0, total - before - working), forward, again, hosted.get(name, 0))
        before += kept[name]
