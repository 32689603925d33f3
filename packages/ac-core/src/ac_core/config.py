"""The settings of activation checkpointing, as plain data. Loads without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["none", "full", "selective", "budget"]
ScopeName = Literal["all", "language", "vision", "audio", "multimodal"]
Scope = ScopeName | tuple[ScopeName, ...]

AVAILABLE_POLICIES = ("none", "full")
"""The policies that this version applies. The others have a name already so that a recipe that asks for one is told
so, and is never trained with a weaker policy."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Which blocks are checkpointed, and how.

    policy: what a block keeps for backward. `False` or `"none"`: everything. `True` or `"full"`: its input alone; its
        forward runs once more in the backward. Stored as the name.
    scope: the parts of the model that are checkpointed: `"all"`, one part, `"multimodal"` (every part that is not
        language), or several of them.
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
    preserve_rng_state: bool = True
    early_stop: bool = True
    keep_cache: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", policy_name(self.policy, field="policy"))
        object.__setattr__(self, "scope", scope_names(self.scope, field="scope"))
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
    if value not in AVAILABLE_POLICIES:
        raise ValueError(
            f"{field}: {value!r} is not available in this version of ac-core; available: {_listed(AVAILABLE_POLICIES)}"
        )
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
