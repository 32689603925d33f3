"""What a plan says: block by block, and in sum."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ac_core.choice import Option, option_text
from ac_core.config import ActivationCheckpointingConfig
from ac_core.planning.budget import size_text
from ac_core.report import table, without_index


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
class Plan:
    """The cheapest checkpointing that fits a memory budget. `print(plan)` shows it block by block.

    blocks: what is done with each block of the scope, by name in model order: `"none"`, `"full"`, or names of what is
        kept, as for `save`.
    budget: as asked. budget_bytes: what that is here.
    peak_bytes: the most that a training step has in memory under the plan, as simulated: parameters, gradients and
        optimizer state included. peak_moment: when that is.
    saved_bytes: of that, what the forward leaves for the backward, loss included.
    recompute_flops: run again in a step; forward_flops: of its forward, to compare with.
    none_peak_bytes: the peak of a step without checkpointing.
    curve: the choices of which none has another that is cheaper at no higher peak, from the cheapest to the smallest.
        Predicted from the same figures as the plan, and not simulated one by one.
    per_block: of each block, what it keeps and what is run again for it; nothing of blocks that do not take part.
    config: the settings besides the plan.
    """

    blocks: dict[str, Option]
    budget: str | int | float
    budget_bytes: int
    peak_bytes: int
    peak_moment: str
    saved_bytes: int
    recompute_flops: int
    forward_flops: int
    none_peak_bytes: int
    curve: tuple[Point, ...]
    per_block: dict[str, tuple[int, int]]
    config: ActivationCheckpointingConfig = field(repr=False)

    def to_config(self) -> ActivationCheckpointingConfig:
        """The settings that apply this plan, whatever model and machine it was made on."""
        return ActivationCheckpointingConfig(
            **{**_fields(self.config), "policy": "budget", "memory_budget": self.budget, "plan": self.blocks}
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `Plan.from_dict` reads it back."""
        plain = asdict(self)
        plain["blocks"] = {name: o if isinstance(o, str) else list(o) for name, o in self.blocks.items()}
        plain["curve"] = [asdict(point) for point in self.curve]
        plain["per_block"] = {name: list(figures) for name, figures in self.per_block.items()}
        plain["config"] = _fields(self.config)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` has written, also after a trip through JSON or YAML.

        Raises:
            ValueError: it is not what `to_dict` writes.
        """
        values = dict(plain)
        try:
            values["blocks"] = {n: o if isinstance(o, str) else tuple(o) for n, o in plain["blocks"].items()}
            values["curve"] = tuple(Point(**point) for point in plain["curve"])
            values["per_block"] = {name: tuple(figures) for name, figures in plain["per_block"].items()}
            values["config"] = ActivationCheckpointingConfig(**plain["config"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"plan: this is no plan as Plan.to_dict writes it ({error!r})") from error

    def __str__(self) -> str:
        more = f", {self.recompute_flops / self.forward_flops:.1%} of the forward" if self.forward_flops else ""
        head = (
            f"plan for {size_text(self.budget_bytes)}: peak {size_text(self.peak_bytes)} ({self.peak_moment}), without "
            f"checkpointing {size_text(self.none_peak_bytes)}; run again {self.recompute_flops:,} FLOPs a step{more}"
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


def _fields(config: ActivationCheckpointingConfig) -> dict[str, Any]:
    """The settings of a config besides policy, budget and plan."""
    plain = asdict(config)
    for name in ("policy", "memory_budget", "plan", "save"):
        del plain[name]
    return plain


def _alike(blocks: Mapping[str, Option], per_block: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Neighbours that differ in their index alone."""
    runs: list[list[str]] = []
    for name, option in blocks.items():
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (without_index(last), blocks[last], per_block.get(last))
            == (without_index(name), option, per_block.get(name))
        ):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs
