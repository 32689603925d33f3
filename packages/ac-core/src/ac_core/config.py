"""The settings of activation checkpointing, as plain data. Loads without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ac_core.layers import check_layers
from ac_core.planning.budget import parse_budget

PolicyName = Literal["none", "full", "selective", "budget"]
ScopeName = Literal["all", "language", "vision", "audio", "multimodal"]
Scope = ScopeName | tuple[ScopeName, ...]
OffloadName = Literal["none", "cpu"]
FamilyName = Literal["attention", "matmul", "collective", "router"]

_WHOLE = ("none", "full", "offload")
"""What a plan says of a block as a whole."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Which blocks are checkpointed, and how.

    policy: what a block keeps for backward. `False` or `"none"`: everything. `True` or `"full"`: its input alone; its
        forward runs once more in the backward. `"selective"`: its input and the outputs of chosen calls, which the
        recompute does not make again. `"budget"`: one of these block by block, the cheapest choice within
        `memory_budget`, or the one in `plan`. Stored as the name.
    scope: the parts of the model that are checkpointed: `"all"`, one part, `"multimodal"` (every part that is not
        language), or several of them.
    layers: which blocks of each part in the scope. `"0-7,12-"`, `"-2:"`: positions among the blocks of the part;
        `"every:2"`: every second, from the first; a glob over block names; or one of these by part,
        `{"language": "0-7", "vision": "every:2"}`. `None`: all.
    save: what `selective` keeps: families (`"attention"`, `"matmul"`, `"collective"`, `"router"`), globs over names of
        modules in the blocks (`"mlp.gate_proj"`), or ops (`"aten::mm"`). `None`: attention, collectives, the router's
        choice, and part of the matmuls.
    memory_budget: for `budget`: bytes of a training step at its peak, parameters, gradients and optimizer included.
        `"24GiB"`, `"24GB"`, a whole number of bytes; `0.5` or `"50%"`: of what the step takes without checkpointing;
        `"device"`: what the current CUDA device has. Without a `plan`, `apply_activation_checkpointing` makes one, and
        needs a `batch=` for that.
    plan: for `budget`: what is done with each block of the scope, by name: `"none"`, `"full"`, or a list as in `save`
        of what is kept. `"offload"` is `"full"` with its inputs in host memory; in a list it says that of the inputs.
        `ac_core.plan(...).to_config()` fills it. It is applied as it is.
    planned_for: beside `plan`: what it was made for, by name; `to_config()` gives the `"memory_budget"`, and who plans
        may add more, such as the size of a batch. A plan is refused beside another `memory_budget`, which would count
        for nothing. Without a plan it says nothing, and is stored as `None`.
    offload: `"cpu"`: the inputs that checkpointed blocks keep (those that need a gradient) are moved to host memory and
        back for the recompute; on CUDA it is pinned, and the copies overlap with the blocks' work. With `budget`: for
        the blocks where that is part of the cheapest plan.
    preserve_rng_state: replay the random numbers of the forward in the recompute. Without it, a block that draws
        any raises in its first forward.
    early_stop: end the recompute with the last tensor that the backward needs.
    keep_cache: leave the key/value cache on, as prefix tuning needs it. A block that takes a cache is then checkpointed
        child by child, without its attention, which costs several times the memory of a whole block. Without it the
        cache is turned off, unless the model declares that it needs one.
    strict: raise where checkpointing cannot be what was asked for. `False` warns instead; what the report says was
        applied is then all there is.

    Raises:
        ValueError: naming the field, the value and the valid values.
    """

    policy: bool | PolicyName | None = "full"
    scope: Scope = "all"
    layers: str | dict[str, str] | None = None
    save: tuple[str, ...] | None = None
    memory_budget: str | int | float | None = None
    plan: dict[str, str | tuple[str, ...]] | None = None
    planned_for: dict[str, str | int | float] | None = None
    offload: OffloadName = "none"
    preserve_rng_state: bool = True
    early_stop: bool = True
    keep_cache: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", policy_name(self.policy, field="policy"))
        object.__setattr__(self, "scope", scope_names(self.scope, field="scope"))
        object.__setattr__(self, "layers", _layers(self.layers))
        object.__setattr__(self, "save", _save(self.save))
        if self.save is not None and self.policy != "selective":
            raise ValueError(f"save: {self.save!r} belongs to policy 'selective'; with {self.policy!r} nothing is kept")
        _check_budget(self.policy, self.memory_budget, self.plan)
        object.__setattr__(self, "plan", _plan(self.plan))
        object.__setattr__(self, "planned_for", None if self.plan is None else _planned_for(self.planned_for))
        if self.plan is not None and self.memory_budget is not None:
            _check_planned_for(self.memory_budget, self.planned_for)
        _check_offload(self.offload, self.policy, self.plan)
        for name in ("preserve_rng_state", "early_stop", "keep_cache", "strict"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}: {value!r} is not true or false")


def policy_name(value: object, *, field: str) -> PolicyName:
    """The policy that a setting names: `None`, `False` -> `"none"`, `True` -> `"full"`, a name -> itself."""
    names = get_args(PolicyName)
    if value is None or value is False:
        return "none"
    if value is True:
        return "full"
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{field}: {value!r} is not one of true, false, {_listed(names)}")
    return value  # type: ignore[return-value]


def scope_names(value: object, *, field: str) -> Scope:
    """A scope setting in its stored form: one name, or a tuple of at least one."""
    names = get_args(ScopeName)
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{field}: {value!r} is not one of {_listed(names)}")
        return value  # type: ignore[return-value]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{field}: {value!r} is neither one of {_listed(names)} nor a list of them")
    for part in value:
        if part not in names:
            raise ValueError(f"{field}: {part!r} in the list is not one of {_listed(names)}")
    return tuple(value)


def _layers(value: object) -> str | dict[str, str] | None:
    if value is None:
        return None
    by_part = value if isinstance(value, Mapping) else {"": value}
    for part, text in by_part.items():
        if problem := check_layers(text):
            raise ValueError(f"layers: {f'for {part!r}: ' if part else ''}{problem}")
    return dict(value) if isinstance(value, Mapping) else str(value)


def _check_budget(policy: object, budget: object, plan: object) -> None:
    for name, value in (("memory_budget", budget), ("plan", plan)):
        if value is not None and policy != "budget":
            raise ValueError(f"{name}: {value!r} belongs to policy 'budget', and the policy is {policy!r}")
    if policy == "budget" and budget is None and plan is None:
        raise ValueError("memory_budget: policy 'budget' needs one, such as '24GiB', 0.5 or 'device', or a plan")
    if budget is not None:
        try:
            parse_budget(budget)
        except ValueError as error:
            raise ValueError(f"memory_budget: {error}") from None


def _plan(value: object) -> dict[str, str | tuple[str, ...]] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"plan: {value!r} does not say by block name what is done with each, as ac_core.plan does")
    plan: dict[str, str | tuple[str, ...]] = {}
    for name, option in value.items():
        if isinstance(option, str) and option not in _WHOLE:
            raise ValueError(f"plan: {option!r} for {name!r} is not {_listed(_WHOLE)}, or a list of what is kept")
        try:
            plan[name] = option if isinstance(option, str) else _kept(option)
        except ValueError as error:
            raise ValueError(f"plan: for {name!r}: {str(error).removeprefix('save: ')}") from None
    return plan


def _planned_for(value: object) -> dict[str, str | int | float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(said, str | int | float) for name, said in value.items()
    ):
        raise ValueError(f"planned_for: {value!r} does not say by name what the plan was made for")
    if "memory_budget" in value:
        try:
            parse_budget(value["memory_budget"])
        except ValueError as error:
            raise ValueError(f"planned_for: memory_budget: {error}") from None
    return dict(value)


def _check_planned_for(budget: str | int | float, planned_for: Mapping[str, object] | None) -> None:
    """Refuse a budget that the plan beside it is not for: the plan is applied as it is."""
    made_for = (planned_for or {}).get("memory_budget")
    if made_for is None:
        raise ValueError(
            f"memory_budget: {budget!r} would count for nothing beside a plan that does not say in planned_for which "
            "memory_budget it was made for; leave one of the two out: without the plan (plan: null) it is made anew"
        )
    if parse_budget(budget) != parse_budget(made_for):
        raise ValueError(
            f"memory_budget: {budget!r} would count for nothing: the plan beside it was made for {made_for!r} and is "
            "applied as it is; leave the plan out (plan: null), and one is made for this budget, or set it back"
        )


def _kept(names: object) -> str | tuple[str, ...]:
    """What a plan says of a block in a list."""
    if names is None:
        raise ValueError(f"nothing is said; give {_listed(_WHOLE)}, or a list of what is kept")
    kept = _save(names)
    assert kept is not None
    return "offload" if set(kept) == {"offload"} else kept


def offload_name(value: object, *, field: str) -> OffloadName:
    """Where a setting says that inputs are kept."""
    if value not in get_args(OffloadName):
        raise ValueError(f"{field}: {value!r} is not one of {_listed(get_args(OffloadName))}")
    return value  # type: ignore[return-value]


def _check_offload(value: object, policy: object, plan: Mapping[str, str | tuple[str, ...]] | None) -> None:
    if offload_name(value, field="offload") == "cpu":
        if policy == "none":
            raise ValueError("offload: 'cpu' moves the inputs of checkpointed blocks, and with policy 'none' none are")
        return
    options = {name: (o,) if isinstance(o, str) else o for name, o in (plan or {}).items()}
    if (moved := next((name for name, option in options.items() if "offload" in option), None)) is not None:
        raise ValueError(f"plan: it has 'offload' for {moved!r}, and offload is 'none'; set offload to 'cpu'")


def _save(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    families = get_args(FamilyName)
    valid = f"a family ({_listed(families)}), a glob over module names, or an op such as 'aten::mm'"
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, Sequence) and not names:
        raise ValueError("save: an empty list keeps nothing; use policy 'full', or None for the rule of 'selective'")
    if not isinstance(names, Sequence):
        raise ValueError(f"save: {value!r} is not a list of names, each {valid}")
    for name in names:
        if not isinstance(name, str) or not name:
            # An op packet stands for several ops, and torch's own policies have taken it for none of them.
            written = "::".join(str(name).split(".")[:2])  # an overload goes: a name stands for all of them
            hint = f"; write {written!r}" if type(name).__name__ in ("OpOverloadPacket", "OpOverload") else ""
            raise ValueError(f"save: {name!r} is not {valid}{hint}")
        if name.startswith(("aten.", "torch.ops.")):
            written = "::".join(name.removeprefix("torch.ops.").split(".")[:2])
            raise ValueError(f"save: {name!r} is not {valid}; write {written!r}")
        if "::" in name:
            from ac_core.selective.ops import check_op_name

            if problem := check_op_name(name, imported=False):
                raise ValueError(f"save: {problem}")
    return tuple(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
