"""One sentence on what takes most and what would help most."""

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
from ac_core.estimation.simulate import Simulation

_HEAD = "head and loss"
_STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)


def advice(
    simulation: Simulation, setting: Setting, category: dict[int, str], share: Shares
) -> tuple[str, str]:
    """The dominant tensor, and the sentence."""
    groups = {
        "parameters, gradients and optimizer state": sum(share.at_peak[name] for name in _STATE),
        "activations": share.at_peak[ACTIVATIONS] + share.at_peak[TEMPORARIES],
        _HEAD: share.at_peak[LOSS],
        "communication": share.at_peak[COMMUNICATION],
    }
    group = max(groups, key=groups.__getitem__)
    members = {_HEAD: (LOSS,), "activations": (ACTIVATIONS, TEMPORARIES), "communication": (COMMUNICATION,)}
    tensor = _largest(simulation, category, members.get(group, _STATE))
    part = groups[group] / max(1, simulation.peak)
    return tensor, f"At the peak {group} take {part:.0%}; the largest tensor is {tensor}. {_remedy(simulation, setting, group)}"


def _largest(simulation: Simulation, category: dict[int, str], names: tuple[str, ...]) -> str:
    alive = simulation.log.alive(simulation.peak_entry)
    birth = largest(simulation.log, alive, (number for number, name in category.items() if name in names))
    if birth is None or birth.shape is None:
        return "a gathered parameter" if birth is not None else "none"
    dtype = str(birth.dtype).removeprefix("torch.")
    where = simulation.log.moments[birth.moment].block if birth.moment >= 0 else None
    return f"{dtype} {list(birth.shape)} of {birth.op}" + (f" in {where}" if where else "")


def _remedy(simulation: Simulation, setting: Setting, group: str) -> str:
    if group == _HEAD:
        rest = max((size for name, size in simulation.timeline if _HEAD not in name), default=0)
        saved = f"at most {1 - rest / simulation.peak:.0%} of the peak: the rest of the step needs {rest / 2**30:.2f} GiB"
        if setting.loss != "fused":
            return f"A fused loss would help most (loss='fused'), {saved}."
        return f"The gradient of the head is what is left; a sharded or frozen head would help most, {saved}."
    if group == "activations":
        if setting.policy == "none":
            return "Checkpointing would help most (policy='full', or 'selective' for less recompute)."
        if setting.policy == "selective":
            return "policy='full' would help most."
        if setting.kernels == "plain" and simulation.peak_moment.startswith("backward"):
            return "They are those of the one block that runs: fused kernels or fewer tokens would help most."
        return "Fewer tokens a rank would help most."
    if group == "communication":
        return "Smaller FSDP2 units would help most."
    if setting.strategy != "fsdp2":
        return "Sharding them would help most (strategy='fsdp2'), or fewer trainable parameters, as with LoRA."
    return "More ranks would help most, or fewer trainable parameters, as with LoRA."
