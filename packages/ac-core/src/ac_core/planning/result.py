"""What a plan says: block by block, and in sum."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from os import PathLike
from typing import Any

from ac_core.choice import Option, option_text
from ac_core.config import ActivationCheckpointingConfig
from ac_core.pictures import Chart, Mark, save_chart
from ac_core.report import table, without_index
from ac_core.sizes import size_text

_FORMAT = 1
"""Of what `to_dict` writes: another number where a field comes, goes or means something else."""

_OF_THE_PLAN = ("policy", "memory_budget", "plan", "planned_for", "save")
"""Settings that a plan fills in, and that its `config` does not have."""


@dataclass(frozen=True)
class Point:
    """One choice among many. peak_bytes: of a step. saved_bytes: that the blocks keep from forward to backward.
    recompute_flops: run again in a step. cost: these, and the FLOPs in the time of the memory traffic of what else is
    run again: what a plan has as little of as it can."""

    peak_bytes: int
    saved_bytes: int
    recompute_flops: int
    cost: float


@dataclass(frozen=True)
class FixedPolicy:
    """A policy that is the same for all blocks, to compare with. peak_bytes: of a step. recompute_flops: run again in
    it."""

    peak_bytes: int
    recompute_flops: int


@dataclass(frozen=True)
class Plan:
    """The cheapest checkpointing that fits a memory budget. `print(plan)` shows it block by block.

    blocks: what is done with each block of the scope, by name in model order: `"none"`, `"full"`, or names of what is
        kept, as for `save`.
    budget: as asked. budget_bytes: what that is here.
    peak_bytes: the most that a training step has in memory under the plan, as simulated: parameters, gradients and
        optimizer state included. peak_moment: when that is.
    saved_bytes: of that, what the forward leaves for the backward, loss included. host_bytes: in host memory besides.
    recompute_flops: run again in a step; forward_flops: of its forward, to compare with.
    none_peak_bytes: the peak of a step without checkpointing.
    curve: the choices of which none has another that is cheaper at no higher peak, from the cheapest to the smallest.
        Predicted from the same figures as the plan, and not simulated one by one.
    fixed: the policies none, selective and full, by name.
    per_block: of each block, what it keeps and what is run again for it; nothing of blocks that do not take part.
    config: the settings besides the plan.
    """

    blocks: dict[str, Option]
    budget: str | int | float
    budget_bytes: int
    peak_bytes: int
    peak_moment: str
    saved_bytes: int
    host_bytes: int
    recompute_flops: int
    forward_flops: int
    none_peak_bytes: int
    curve: tuple[Point, ...]
    fixed: dict[str, FixedPolicy]
    per_block: dict[str, tuple[int, int]]
    config: ActivationCheckpointingConfig = field(repr=False)

    def to_config(self) -> ActivationCheckpointingConfig:
        """The settings that apply this plan, whatever model and machine it was made on."""
        return ActivationCheckpointingConfig(
            **_fields(self.config),
            policy="budget",
            memory_budget=self.budget,
            plan=self.blocks,
            planned_for={"memory_budget": self.budget},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `Plan.from_dict` reads it back."""
        plain = {"format": _FORMAT, **asdict(self)}
        plain["blocks"] = {name: o if isinstance(o, str) else list(o) for name, o in self.blocks.items()}
        plain["curve"] = [asdict(point) for point in self.curve]
        plain["per_block"] = {name: list(figures) for name, figures in self.per_block.items()}
        plain["config"] = _fields(self.config)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` has written, also after a trip through JSON or YAML.

        Raises:
            ValueError: it is not what `to_dict` writes, or what another version of ac-core wrote in another format; a
                block, a figure or a setting that was edited is none.
        """
        if not isinstance(plain, Mapping):
            raise ValueError(f"plan: {type(plain).__name__} is no plan as Plan.to_dict writes it")
        values = dict(plain)
        _check_format(values.pop("format", None), values)
        try:
            values["blocks"] = {n: o if isinstance(o, str) else tuple(o) for n, o in plain["blocks"].items()}
            values["curve"] = tuple(Point(**point) for point in plain["curve"])
            values["fixed"] = {name: FixedPolicy(**each) for name, each in plain["fixed"].items()}
            values["per_block"] = {name: tuple(figures) for name, figures in plain["per_block"].items()}
            _check_config(plain["config"])
            values["config"] = ActivationCheckpointingConfig(**plain["config"])
            plan = cls(**values)
            _check_figures(plan)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"plan: this is no plan as Plan.to_dict writes it ({error!r})") from error
        plan.to_config()  # refuses what is no budget, and what nothing can do with a block
        return plan

    def save_picture(self, path: str | PathLike[str]) -> None:
        """Draw `curve`, memory against what is run again, with the fixed policies and this plan marked on it.

        Args:
            path: of the file, `.png` (which needs matplotlib: `ac-core[pictures]`), `.html` or `.svg`.

        Raises:
            ValueError: the path has another suffix.
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        forward = max(1, self.forward_flops)
        marks = [
            Mark(each.peak_bytes / 2**30, 100 * each.recompute_flops / forward, name)
            for name, each in self.fixed.items()
        ]
        marks.append(Mark(self.peak_bytes / 2**30, 100 * self.recompute_flops / forward, "this plan", chosen=True))
        chart = Chart(
            title="Peak memory of a step against what is run again",
            x_label="peak memory, GiB",
            y_label="run again, % of the forward's FLOPs",
            x=[point.peak_bytes / 2**30 for point in self.curve],
            y=[100 * point.recompute_flops / forward for point in self.curve],
            names=[f"plan for {size_text(point.peak_bytes)}" for point in self.curve],
            marks=marks,
        )
        save_chart(chart, path)

    def __str__(self) -> str:
        more = f", {self.recompute_flops / self.forward_flops:.1%} of the forward" if self.forward_flops else ""
        peak = f"peak {size_text(self.peak_bytes)} in the {self.peak_moment}"
        host = f", on the host {size_text(self.host_bytes)}" if self.host_bytes else ""
        head = (
            f"plan for {size_text(self.budget_bytes)}: {peak}{host}, without checkpointing "
            f"{size_text(self.none_peak_bytes)}; run again {self.recompute_flops:,} FLOPs a step{more}"
        )
        rows = [("blocks", "count", "what", "keeps each", "FLOPs again each")]
        for names in _alike(self.blocks, self.per_block):
            kept, flops = self.per_block.get(names[0], (0, 0))
            taking_part = names[0] in self.per_block
            rows.append(
                (
                    names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition('.')[2]}",
                    str(len(names)),
                    option_text(self.blocks[names[0]]),
                    size_text(kept) if taking_part else "nothing: no gradient",
                    f"{flops:,}" if taking_part else "0",
                )
            )
        return "\n".join([head, *table(rows)])


def _check_format(found: object, values: Mapping[str, Any]) -> None:
    """Refuse a plan whose figures this version would not understand."""
    if type(found) is int and found == _FORMAT:  # True and 1.0 are equal to it, and nothing that it writes
        return
    if "blocks" not in values or "config" not in values:
        raise ValueError(f"plan: this is no plan as Plan.to_dict writes it (it has {sorted(values) or 'nothing'})")
    theirs = "an ac-core before formats were numbered" if found is None else f"another ac-core, in format {found!r}"
    raise ValueError(
        f"plan: it was saved by {theirs}, and this one reads format {_FORMAT} alone: its figures have another meaning; "
        "make the plan again with ac_core.plan. What it says of the blocks can still be applied: "
        "ActivationCheckpointingConfig(policy='budget', plan=saved['blocks'], **saved['config'])"
    )


def _check_config(saved: Mapping[str, Any]) -> None:
    """Refuse settings that the plan itself stands for, and that applying it would pass over."""
    for name in _OF_THE_PLAN:
        if name in saved:
            raise ValueError(
                f"plan: its config has {name!r}, which would count for nothing: a plan is applied with policy "
                "'budget', its own blocks and its own budget; take it out, or edit 'blocks'"
            )


def _check_figures(plan: Plan) -> None:
    """Refuse figures that are no numbers: shown or drawn, they would fail far from where they stand."""
    records: list[tuple[str, Any]] = [("", plan)]
    records += [(f"fixed: {name}: ", each) for name, each in plan.fixed.items()]
    records += [(f"curve: {place}: ", point) for place, point in enumerate(plan.curve)]
    figures = [
        (f"{of}{each.name}", getattr(record, each.name), each.type) for of, record in records for each in fields(record)
    ]
    figures += [(f"per_block: {name}", figure, int) for name, pair in plan.per_block.items() for figure in pair]
    for name, value, kind in figures:
        if kind is int and type(value) is not int:
            raise ValueError(f"plan: {name}: {value!r} is no whole number, as Plan.to_dict writes it")
        if kind is float and (type(value) not in (int, float) or not isfinite(value)):
            raise ValueError(f"plan: {name}: {value!r} is no number, as Plan.to_dict writes it")
        if kind is str and not isinstance(value, str):
            raise ValueError(f"plan: {name}: {value!r} is no text, as Plan.to_dict writes it")
    if (pair := next((pair for pair in plan.per_block.values() if len(pair) != 2), None)) is not None:
        raise ValueError(f"plan: per_block: {list(pair)} is not two figures, as Plan.to_dict writes them")


def _fields(config: ActivationCheckpointingConfig) -> dict[str, Any]:
    """The settings of a config besides policy, budget and plan."""
    plain = asdict(config)
    for name in _OF_THE_PLAN:
        del plain[name]
    return plain


def _alike(blocks: Mapping[str, Option], per_block: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Neighbours that differ in their index alone."""
    runs: list[list[str]] = []
    for name, option in blocks.items():
        last = runs[-1][-1] if runs else None
        if last is not None and (without_index(last), blocks[last], per_block.get(last)) == (
            without_index(name),
            option,
            per_block.get(name),
        ):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs
