"""What `estimate` returns."""

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from ac_core.advice import Advice
from ac_core.estimation.advice import advice
from ac_core.estimation.assumptions import LINK, Setting, assumptions
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
from ac_core.pictures import Chart, Mark, save_chart
from ac_core.sizes import size_text

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one step will need, on one rank.

    peak_bytes: the most bytes alive at once. peak_moment: when, such as `"backward of model.layers.3"`.
    parameter_bytes, gradient_bytes, optimizer_bytes: of this rank's share, buffers of the model counted as parameters.
    activation_bytes: that the forward keeps for the backward, besides head and loss. loss_bytes: the most that head and
    loss have at once. communication_bytes: the most that gathered parameters and buckets have at once. host_bytes: put
    into host memory by offloading, in none of the others. link_seconds: for which these keep the link to the host busy,
    out and back. at_peak: bytes of each category at the peak, which add up to it. activations: `{block: {family of
    operations: bytes kept for the backward}}`, `""` for what is in no block. recompute_flops: what checkpointing adds
    to forward_flops and backward_flops. timeline: for each stretch of the step, its name and the most bytes in it.
    dominant: the largest tensor of the category that takes most at the peak. advice: on what dominates and
    what would help most; `str(advice)` is a text. assumptions: what was taken for granted.
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
    link_seconds: float
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    dominant: str
    advice: Advice
    setting: str
    assumptions: tuple[str, ...]
    at_peak: dict[str, int] = field(repr=False)
    timeline: tuple[tuple[str, int], ...] = field(repr=False)
    activations: dict[str, dict[str, int]] = field(repr=False)
    blocks: tuple[BlockUse, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        lists = {"assumptions": list(self.assumptions), "timeline": [list(row) for row in self.timeline]}
        return asdict(self) | lists | {"advice": str(self.advice)}

    def save_timeline(self, path: str | PathLike[str]) -> None:
        """Draw `timeline`, the most memory in each stretch of the step, with the peak marked on it.

        Args:
            path: of the file, `.png` (which needs matplotlib: `ac-core[pictures]`), `.html` or `.svg`.

        Raises:
            ValueError: the path has another suffix.
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        names, sizes = [name for name, _ in self.timeline], [size / GIB for _, size in self.timeline]
        highest = max(range(len(sizes)), key=sizes.__getitem__)
        phases = [name.split()[0] for name in names]
        starts = [(float(phases.index(phase)), phase) for phase in dict.fromkeys(phases)]
        chart = Chart(
            title=f"Memory over a step: {self.setting}",
            x_label="stretches of the step, one after the other",
            y_label="most memory, GiB",
            x=list(range(len(sizes))),
            y=sizes,
            names=names,
            marks=[Mark(highest, sizes[highest], f"{self.peak_moment}: {size_text(self.peak_bytes)}", chosen=True)],
            stairs=True,
            ticks=starts,
        )
        save_chart(chart, path)

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameter_bytes, PARAMETERS),
            ("gradients", self.gradient_bytes, GRADIENTS),
            ("optimizer state", self.optimizer_bytes, OPTIMIZER),
            ("activations", self.activation_bytes, ACTIVATIONS),
            ("head and loss", self.loss_bytes, LOSS),
            ("communication", self.communication_bytes, COMMUNICATION),
        ]
        peak = self.peak_bytes
        shown = [(label, size_text(size, like=peak), self.at_peak[name]) for label, size, name in rows]
        shown += [("other", "", self.at_peak[TEMPORARIES]), ("peak", "", peak)]
        lines = [f"estimate: {self.setting}", f"  {'':16}{'needs':>24}{'at the peak':>24}"]
        lines += [f"  {label:16}{needs:>24}{size_text(size, like=peak):>24}" for label, needs, size in shown]
        forward = self.forward_flops
        share = f", {self.recompute_flops / forward:.1%} of the forward" if forward else ""
        lines.append(f"  peak in {self.peak_moment}; recompute {self.recompute_flops / 1e12:.3g} TFLOP{share}")
        if self.host_bytes:
            link = f"{self.link_seconds * 1e3:.3g} ms out and back"
            lines.append(f"  in host memory {size_text(self.host_bytes)}; {link}")
        lines.append(f"  {self.advice}")
        lines += ["  assumed:", *(f"    {said}" for said in self.assumptions)]
        return "\n".join(lines)


def read_estimate(simulation: Simulation, setting: Setting) -> Estimate:
    """What a simulation says."""
    log = simulation.log
    category = categorise(log, simulation.known)
    share = shares(log, category, simulation.peak_entry)
    kept = kept_by_block(log, category, log.alive(simulation.end_entry))
    dominant, advised = advice(simulation, setting, category, share)
    said = assumptions(
        setting,
        uniform_routing=simulation.assumed_uniform_routing,
        experts=simulation.experts > 0,
        no_padding=simulation.assumed_no_padding,
        host=simulation.host > 0,
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
        host_bytes=simulation.host,
        link_seconds=2 * simulation.host / LINK,
        forward_flops=simulation.forward_flops,
        backward_flops=simulation.backward_flops,
        recompute_flops=simulation.recompute_flops,
        dominant=dominant,
        advice=advised,
        setting=str(setting),
        assumptions=said,
        at_peak=share.at_peak,
        timeline=simulation.timeline,
        activations=kept,
        blocks=simulation.blocks,
    )
