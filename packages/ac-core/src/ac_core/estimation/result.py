"""What `estimate` returns."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ac_core.estimation.advice import advice
from ac_core.estimation.assumptions import Setting, assumptions
from ac_core.estimation.categories import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    categorise,
    kept_by_block,
    shares,
)
from ac_core.estimation.reading import BlockUse, Simulation

GIB, GB = 2**30, 10**9


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one step will need, on one rank.

    peak_bytes: the most bytes alive at once. peak_moment: when, such as `"backward of model.layers.3"`.
    parameter_bytes, gradient_bytes, optimizer_bytes: of this rank's share, buffers of the model counted as parameters.
    activation_bytes: that the forward keeps for the backward, besides head and loss. loss_bytes: the most that head and
    loss have at once. communication_bytes: the most that gathered parameters and buckets have at once. host_bytes: put
    into host memory. at_peak: bytes of each category at the peak, which add up to it. activations: `{block: {family of
    operations: bytes kept for the backward}}`, `""` for what is in no block. recompute_flops: what checkpointing adds
    to forward_flops and backward_flops. timeline: for each stretch of the step, its name and the most bytes in it.
    dominant: the largest tensor of the category that takes most at the peak. advice: a sentence on what dominates and
    what would help most. assumptions: what was taken for granted.
    """

    peak_bytes: int
    peak_moment: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    loss_bytes: int
    communication_bytes: int
    host_bytes: int
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    dominant: str
    advice: str
    setting: str
    assumptions: tuple[str, ...]
    at_peak: dict[str, int] = field(repr=False)
    timeline: tuple[tuple[str, int], ...] = field(repr=False)
    activations: dict[str, dict[str, int]] = field(repr=False)
    blocks: tuple[BlockUse, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"assumptions": list(self.assumptions), "timeline": [list(row) for row in self.timeline]}

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameter_bytes, PARAMETERS),
            ("gradients", self.gradient_bytes, GRADIENTS),
            ("optimizer state", self.optimizer_bytes, OPTIMIZER),
            ("activations", self.activation_bytes, ACTIVATIONS),
            ("head and loss", self.loss_bytes, LOSS),
            ("communication", self.communication_bytes, COMMUNICATION),
        ]
        small = self.peak_bytes < GIB
        shown = [(label, both_units(size, small=small), self.at_peak[name]) for label, size, name in rows]
        shown += [("other", "", self.at_peak[TEMPORARIES]), ("peak", "", self.peak_bytes)]
        lines = [f"estimate: {self.setting}", f"  {'':16}{'needs':>24}{'at the peak':>24}"]
        lines += [f"  {label:16}{needs:>24}{both_units(size, small=small):>24}" for label, needs, size in shown]
        useful = self.forward_flops + self.backward_flops
        share = f", {self.recompute_flops / useful:.1%} of the rest" if useful else ""
        lines.append(f"  peak in {self.peak_moment}; recompute {self.recompute_flops / 1e12:.3g} TFLOP{share}")
        lines.append(f"  {self.advice}")
        lines += ["  assumed:", *(f"    {said}" for said in self.assumptions)]
        return "\n".join(lines)


def both_units(size: int, *, small: bool = False) -> str:
    """GiB with GB beside it; small: MiB and MB."""
    if small:
        return f"{size / 2**20:.2f} MiB ({size / 10**6:.2f} MB)"
    return f"{size / GIB:.2f} GiB ({size / GB:.2f} GB)"


def read_estimate(simulation: Simulation, setting: Setting) -> Estimate:
    """What a simulation says."""
    log = simulation.log
    category = categorise(log, simulation.known)
    share = shares(log, category, simulation.peak_entry)
    kept = kept_by_block(log, category, log.alive(simulation.end_entry))
    dominant, sentence = advice(simulation, setting, category, share)
    said = assumptions(
        setting, uniform_routing=simulation.assumed_uniform_routing, experts=simulation.experts > 0
    )
    return Estimate(
        peak_bytes=simulation.peak,
        peak_moment=simulation.peak_moment,
        parameter_bytes=simulation.parameters,
        gradient_bytes=simulation.gradients,
        optimizer_bytes=simulation.optimizer,
        activation_bytes=sum(sum(families.values()) for families in kept.values()),
        loss_bytes=share.most[LOSS],
        communication_bytes=share.most[COMMUNICATION],
        host_bytes=0,
        forward_flops=simulation.forward_flops,
        backward_flops=simulation.backward_flops,
        recompute_flops=simulation.recompute_flops,
        dominant=dominant,
        advice=sentence,
        setting=str(setting),
        assumptions=said,
        at_peak=share.at_peak,
        timeline=simulation.timeline,
        activations=kept,
        blocks=simulation.blocks,
    )
