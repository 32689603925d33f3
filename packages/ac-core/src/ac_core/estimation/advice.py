"""One sentence on what takes most and what would help most."""

from ac_core.advice import FULL, FUSED_LOSS, OFFLOADED, SELECTIVE, Advice, Change, sharded
from ac_core.estimation.assumptions import Setting
from ac_core.estimation.categories import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Shares,
    largest,
)
from ac_core.estimation.reading import Simulation
from ac_core.sizes import size_text

_Parts = tuple[str | Change, ...]
_HEAD = "head and loss"
_STATE = "parameters, gradients and optimizer state"
_GROUPS = {
    _STATE: (PARAMETERS, GRADIENTS, OPTIMIZER),
    "activations": (ACTIVATIONS, TEMPORARIES),
    _HEAD: (LOSS,),
    "communication": (COMMUNICATION,),
}
_KEEP_LESS: dict[str, _Parts] = {
    "none": ("Checkpointing would help most (", FULL, ", or ", SELECTIVE, " for less recompute)."),
    "selective": ("Keeping less would help most (", FULL, ")."),
}


def advice(simulation: Simulation, setting: Setting, category: dict[int, str], share: Shares) -> tuple[str, Advice]:
    """The largest tensor of what takes most at the peak, and a sentence on both and on the remedy."""
    sums = {group: sum(share.at_peak[name] for name in names) for group, names in _GROUPS.items()}
    group = max(sums, key=sums.__getitem__)
    tensor = _largest(simulation, category, _GROUPS[group])
    part = sums[group] / max(1, simulation.peak)
    remedy = _about_head(simulation, setting) if group == _HEAD else _remedy(simulation, setting, group)
    return tensor, Advice((f"At the peak {group} take {part:.0%}; the largest tensor is {tensor}. ", *remedy))


def _largest(simulation: Simulation, category: dict[int, str], names: tuple[str, ...]) -> str:
    number = largest(simulation.log.alive(simulation.peak_entry), category, names)
    if number is None:
        return "none"
    birth = simulation.log.births[number]
    what = "" if birth.dtype is None else f"{str(birth.dtype).removeprefix('torch.')} {list(birth.shape or ())} of "
    if category[number] in (*_GROUPS[_STATE], COMMUNICATION):
        return f"{what}{category[number]}"
    where = simulation.log.moments[birth.moment].block if birth.moment >= 0 else None
    return f"{what}{birth.op}" + (f" in {where}" if where else "")


def _about_head(simulation: Simulation, setting: Setting) -> _Parts:
    if setting.loss == "fused":
        return ("That is the gradient of the head: a sharded or frozen one would help most.",)
    rest = max((size for name, size in simulation.timeline if _HEAD not in name), default=0)
    most = f"by at most {1 - rest / simulation.peak:.0%}: the rest of the step needs {size_text(rest)}."
    return ("A fused loss would help most (", FUSED_LOSS, f"), {most}")


def _remedy(simulation: Simulation, setting: Setting, group: str) -> _Parts:
    if group == "communication":
        return ("Smaller FSDP2 units would help most.",)
    if group == _STATE:
        fewer = "or fewer trainable parameters, as with LoRA"
        change = sharded(setting.strategy, setting.dp_size)
        if change is None:
            return (f"More ranks would help most, {fewer}.",)
        more = ", or more" if change.dp_size else ""
        return ("Sharding them would help most (", change, f"{more}), {fewer}.")
    if setting.policy in _KEEP_LESS:
        return _KEEP_LESS[setting.policy]
    return _about_rest(simulation, setting)


def _about_rest(simulation: Simulation, setting: Setting) -> _Parts:
    inputs = sum(block.kept for block in simulation.blocks)
    if setting.policy == "full" and setting.offload == "none" and inputs > simulation.peak / 4:
        them = "They are inputs of blocks for the most part: host memory for these would help most"
        return (f"{them} (", OFFLOADED, ").")
    if setting.kernels == "plain" and simulation.peak_moment.startswith("backward"):
        return ("They are those of the block that runs: fused kernels or fewer tokens a rank would help most.",)
    return ("Fewer tokens a rank would help most.",)
