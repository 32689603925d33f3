"""What mode `moe_tail` asks of a layer, checked before the first step."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import NoReturn

from ac_moe.cache.region import Site
from ac_moe.errors import MoETailError

# Names rather than one parameter per dispatcher: those whose combine is the plain sum that the cache serves.
DISPATCHERS = ("alltoall", "hybridep")
EXPERTS = ("torch_mm",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What is known of one MoE layer and of how it runs. The defaults are what `moe_tail` needs."""

    activation_checkpointing: bool = True
    """Whether a checkpoint recomputes the layer."""
    dispatcher: str = "alltoall"
    experts: str = "torch_mm"
    """How the down projection is multiplied: `torch_mm` is `ac_moe.experts.down_projection`."""
    expert_bias: bool = False
    """Whether the down projection adds a bias."""
    weight_applied_after: bool = False
    """Whether the router weight multiplies the output of the down projection, not its input."""
    fp8: bool = False
    latent: bool = False
    """Whether the experts work in a latent space, with a projection of their output of its own."""
    lora_on_down: bool = False
    other_reader: str | None = None
    """What else reads the output of the down projection, in words."""

    def unmet(self) -> tuple[str, ...]:
        """Each condition of `moe_tail` that does not hold, with its remedy."""
        found = {
            "activation checkpointing is off: there is no recompute; switch it on": not self.activation_checkpointing,
            f"dispatcher: {self.dispatcher!r} is not {_either(DISPATCHERS)}": self.dispatcher not in DISPATCHERS,
            f"experts: {self.experts!r} is not {_either(EXPERTS)}, torch's grouped GEMM": self.experts not in EXPERTS,
            "the down projection adds a bias to its output": self.expert_bias,
            "the router weight is applied after the down projection: apply it inside the activation": (
                self.weight_applied_after
            ),
            "the experts multiply in fp8": self.fp8,
            "a latent projection reads the output of the experts": self.latent,
            "LoRA adds to the output of the down projection: leave the down projection out of its targets": (
                self.lora_on_down
            ),
            f"{self.other_reader} reads the output of the down projection": self.other_reader is not None,
        }
        return tuple(text for text, holds in found.items() if holds)


def check_moe_tail(layers: Mapping[str, LayerFacts]) -> None:
    """Refuses `moe_tail` with every condition that any layer does not meet.

    Args:
        layers: what is known, by the name of the layer.

    Raises:
        MoETailError: one error for all layers; layers with the same unmet conditions are named together.
    """
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, facts in layers.items():
        alike[facts.unmet()].append(name)
    alike.pop((), None)
    if not alike:
        return
    told = [f"{', '.join(names)}:\n" + "\n".join(f"  * {text}" for text in unmet) for unmet, names in alike.items()]
    raise MoETailError(
        "moe_tail needs a down projection whose output only feeds a combine. Not met:\n"
        + "\n".join(told)
        + "\nUse mode 'combine', which asks for none of these but a dispatcher of ac-moe and a checkpoint, or 'none'.",
        tuple(dict.fromkeys(text for unmet in alike for text in unmet)),
    )


def refuse_rows(site: Site) -> NoReturn:
    """For a forward under `moe_tail` whose combine is given something else than the output of a down projection."""
    reason = "the rows given to combine are not the very output of ac_moe.experts.down_projection"
    raise MoETailError(
        f"{site}: moe_tail: {reason}, so the recompute cannot go without it. Either the experts multiply otherwise, or "
        "something was done to the output in between: a bias, a router weight, a cast, a copy. Use "
        "ac_moe.experts.down_projection and apply the router weight inside the activation, or use mode 'combine'.",
        (reason,),
    )


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in names)
