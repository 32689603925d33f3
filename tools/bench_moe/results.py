"""What the samples of all ranks say: ratios paired by round, and the saving that arithmetic predicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tools.bench.rounds import Seconds, best_ratio, paired_ratio, paired_spread
from tools.bench_moe.records import NONE, ONE_COMBINE, ONE_PROJECTION, Measured, Work
from tools.bench_moe.settings import Settings


@dataclass(frozen=True)
class Ratio:
    """Time of a variant over that of `none`.

    measured: median over the rounds, each over `none` of the same round; spread: half the interquartile range of those.
    best: the best round over the best round of `none`.
    predicted: 1 less the share of `none`'s step that is not run, median over the rounds; None where `none` is no base
    for it.
    """

    measured: float
    spread: float
    best: float
    predicted: float | None


@dataclass(frozen=True)
class Row:
    """One variant.

    wall: by the clock, of the slowest rank. cpu: of all ranks' processes together; None on a GPU. work: of each rank,
    but for `product_flops`, which are those of all ranks.
    """

    variant: str
    milliseconds: float
    wall: Ratio
    cpu: Ratio | None
    work: Work


@dataclass(frozen=True)
class Alone:
    """One combine and one down projection by themselves: milliseconds by the clock, medians over the rounds."""

    combine_milliseconds: float
    projection_milliseconds: float
    projection_flops: int

    @property
    def projection_rate(self) -> float:
        """FLOP/s of a rank."""
        return self.projection_flops / (1e-3 * self.projection_milliseconds)


@dataclass(frozen=True)
class Result:
    """One dispatcher and form."""

    dispatcher: str
    form: str
    rows: list[Row]
    alone: Alone


def evaluate(settings: Settings, ranks: Sequence[Measured]) -> Result:
    """The table of one case, from what each rank measured of it."""
    names = list(ranks[0].samples)
    wall = {name: [max(one.wall for one in round_) for round_ in _rounds(ranks, name)] for name in names}
    cpu = {name: [sum(one.cpu for one in round_) for round_ in _rounds(ranks, name)] for name in names}
    rows = [
        Row(
            variant=variant,
            milliseconds=1e3 * median(wall[variant]),
            wall=_ratio(wall, variant, work),
            cpu=_ratio(cpu, variant, work) if settings.device == "cpu" else None,
            work=work,
        )
        for variant, work in _agreed(ranks).items()
    ]
    alone = Alone(
        combine_milliseconds=1e3 * median(wall[ONE_COMBINE]),
        projection_milliseconds=1e3 * median(wall[ONE_PROJECTION]),
        projection_flops=settings.shape.projection_flops,
    )
    return Result(ranks[0].dispatcher, ranks[0].form, rows, alone)


def predicted_ratio(seconds: Seconds, combines: int, projections: int) -> float:
    """Of a step that goes without so many combines and down projections, to `none`: median over the rounds.

    A down projection takes its FLOPs, `Shape.projection_flops` on the average rank, over the rate at which it runs:
    the time of one alone, in the same round, as that of a combine.
    """
    return median(
        1 - (combines * combine + projections * projection) / step
        for combine, projection, step in zip(seconds[ONE_COMBINE], seconds[ONE_PROJECTION], seconds[NONE], strict=True)
    )


def _ratio(seconds: Seconds, variant: str, work: Work) -> Ratio:
    modes = work.stored or variant == NONE
    return Ratio(
        measured=paired_ratio(seconds, variant, NONE),
        spread=paired_spread(seconds, variant, NONE),
        best=best_ratio(seconds, variant, NONE),
        predicted=predicted_ratio(seconds, work.served, work.gemms_skipped) if modes else None,
    )


def _rounds(ranks: Sequence[Measured], name: str) -> zip:
    """Round by round the samples of all ranks."""
    return zip(*(rank.samples[name] for rank in ranks), strict=True)


def _agreed(ranks: Sequence[Measured]) -> Mapping[str, Work]:
    """The work of rank 0, which is that of each; but the products of all ranks, and gradients that are equal on all."""
    return {
        variant: replace(
            work,
            product_flops=sum(rank.work[variant].product_flops for rank in ranks),
            gradients_equal=all(rank.work[variant].gradients_equal for rank in ranks),
        )
        for variant, work in ranks[0].work.items()
    }
