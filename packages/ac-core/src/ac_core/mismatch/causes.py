"""Why a recompute saved other tensors than its forward: rules over evidence, each naming what it saw."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ac_core.mismatch.evidence import GENERATOR, NUMPY_RANDOM, PYTHON_RANDOM, Change, Extent
from ac_core.mismatch.recording import Choice, Meta, Saved


@dataclass
class Evidence:
    """What is known about a mismatch.

    forward, recompute: the first saved tensor that differs, as each had it; None where it had none at that position, or
        where it is not known.
    forward_node, saved: what saved it in the forward, and in the recompute.
    repeated: the tensor at that position in one recompute more. repeatable: two recomputes more agreed.
    changed: plain attributes and settings that the recompute saw otherwise than the forward, without those that are
        known not to matter. confirmed: with these put back, the recompute saves what the forward saved.
    moved: state that one more recompute changed.
    choices: data-dependent ops before that tensor, the latest last.
    """

    block: nn.Module
    forward: Meta | None = None
    recompute: Meta | None = None
    forward_node: str = ""
    saved: Saved | None = None
    repeated: Meta | None = None
    repeatable: bool = True
    autocast_at_entry: bool | None = None
    changed: list[Change] = field(default_factory=list)
    confirmed: bool = False
    moved: list[Change] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


@dataclass(frozen=True)
class Cause:
    """kind: one word or two, for programs. seen: the evidence. remedy: what to do."""

    kind: str
    seen: str
    remedy: str


def probable_cause(evidence: Evidence) -> tuple[Cause, list[Cause]]:
    """The strongest cause that the evidence speaks for, and the others that it speaks for as well."""
    found = [cause for rule in _RULES if (cause := rule(evidence)) is not None]
    return (found[0], found[1:]) if found else (_UNKNOWN, [])


def _parameter_without_data(evidence: Evidence) -> Cause | None:
    for name, parameter in evidence.block.named_parameters():
        if not parameter.is_meta and parameter.numel() > 0 and _holds_no_data(parameter):
            return Cause(
                "sharded parameter",
                f"parameter '{name}' has no data at the moment: it was resharded after the forward",
                "apply checkpointing and fully_shard to the same modules, so that its hooks gather around the block",
            )
    return None


def _grown(evidence: Evidence) -> Cause | None:
    remedy = "turn the cache off for training (use_cache=False on every config), or keep it outside the block"
    for change in evidence.moved:
        if _grew(change.was, change.now):
            return Cause(
                "cache",
                f"every run of the block makes {change.path} longer ({change.was} -> {change.now} in one recompute "
                "more), as a key/value cache does",
                remedy,
            )
    sizes = [meta.shape for meta in (evidence.forward, evidence.recompute, evidence.repeated) if meta is not None]
    if len(sizes) == 3 and len({len(size) for size in sizes}) == 1:
        for dimension, (first, second, third) in enumerate(zip(*sizes, strict=True)):
            if second - first == third - second > 0:
                return Cause(
                    "cache",
                    f"dimension {dimension} of the tensor grows with every run of the block ({first}, {second}, "
                    f"{third}), as a key/value cache does",
                    remedy,
                )
    return None


def _training_flipped(evidence: Evidence) -> Cause | None:
    flags = [change for change in evidence.changed if change.path.split(".")[-1] == "training"]
    if not flags:
        return None
    more = f", and so in {len(flags) - 1} modules more" if len(flags) > 1 else ""
    return Cause(
        "training",
        f"{flags[0]}{more}{_checked(evidence)}",
        "call model.train() or model.eval() before the forward or after the backward, not between them",
    )


def _setting_changed(evidence: Evidence) -> Cause | None:
    for change in evidence.changed:
        for word, kind in (("SDPA", "sdpa"), ("autocast", "autocast"), ("default dtype", "dtype")):
            if word in change.path:
                seen = f"{change}{_checked(evidence)}"
                return Cause(kind, seen, "run the backward under the same setting as the forward")
    return None


def _attribute_changed(evidence: Evidence) -> Cause | None:
    moved = {change.path for change in evidence.moved}
    for change in evidence.changed:
        if change.path.split(".")[-1] == "training" or " " in change.path:
            continue
        if change.path in moved:
            return Cause(
                "attribute",
                f"every run of the block changes its attribute: {change}{_checked(evidence)}",
                "make it a buffer, which the recompute finds as the forward did, or change it outside the block",
            )
        return Cause(
            "attribute",
            f"an attribute of the block was changed since the forward: {change}{_checked(evidence)}",
            "do not change it between forward and backward",
        )
    return None


def _state_moved(evidence: Evidence) -> Cause | None:
    told = {change.path for change in evidence.changed}
    moved = [
        change
        for change in evidence.moved
        if change.path not in told and not _is_random(change) and not _grew(change.was, change.now)
    ]
    if not moved:
        return None
    return Cause(
        "state",
        f"every run of the block changes {moved[0].path}",
        "make it a buffer, which the recompute finds as the forward did, or change it outside the block",
    )


def _random(evidence: Evidence) -> Cause | None:
    drawn = [change.path for change in evidence.moved if _is_random(change)]
    if not drawn:
        return None
    return Cause(
        "random",
        f"the block draws from {drawn[0].replace(GENERATOR, 'a generator of its own, ')}, whose numbers the recompute "
        "does not get again (torch's global ones it does)",
        "draw from torch's global generators inside the block, or draw outside the block and pass the result in",
    )


def _is_random(change: Change) -> bool:
    return change.path in (PYTHON_RANDOM, NUMPY_RANDOM) or change.path.startswith(GENERATOR)


def _autocast(evidence: Evidence) -> Cause | None:
    if not _only_dtype(evidence) or evidence.saved is None or evidence.autocast_at_entry is None:
        return None
    on = evidence.saved.autocast is not None
    if on == evidence.autocast_at_entry:
        return None
    now = f"on ({str(evidence.saved.autocast).removeprefix('torch.')})" if on else "off"
    return Cause(
        "autocast",
        f"the block is entered with autocast {'off' if on else 'on'} and at this call it is {now}, which would explain "
        "the other dtype in the forward: a hook or a context inside the block switched it in one run and not in the "
        "other",
        "switch autocast around the model, or in the block in the same way in every run",
    )


def _attention_backend(evidence: Evidence) -> Cause | None:
    before = evidence.forward_node
    after = evidence.saved.node if evidence.saved else ""
    if not before or not after or before == after or "attention" not in f"{before} {after}".lower():
        return None
    return Cause(
        "sdpa",
        f"where {before} ran in the forward, {after} ran in the recompute: another implementation of attention",
        "choose one implementation around forward and backward (torch.nn.attention.sdpa_kernel, or attn_implementation "
        "of the model), and do not change it between them",
    )


def _unrepeatable(evidence: Evidence) -> Cause | None:
    if evidence.repeatable or evidence.moved or _grown(evidence) is not None:
        return None
    return Cause(
        "random",
        "two more recomputes differed from one another, though no state of the block changed between them: it draws "
        "from randomness that torch does not replay, depends on time or threads, or runs a kernel that is not "
        "deterministic",
        "draw from torch's global generators, or outside the block; torch.use_deterministic_algorithms(True) names "
        "kernels that are not deterministic",
    )


def _inner_fsdp(evidence: Evidence) -> Cause | None:
    units = [n for n, module in evidence.block.named_modules() if n and type(module).__name__.startswith("FSDP")]
    if not units or not _only_dtype(evidence):
        return None
    return Cause(
        "fsdp cast",
        f"'{units[0]}' inside the block is an FSDP unit of its own, whose hooks cast, and only the dtype differs",
        "shard and checkpoint the same modules, or give both the same MixedPrecisionPolicy",
    )


def _routing(evidence: Evidence) -> Cause | None:
    chosen = [choice for choice in evidence.choices if not choice.op.startswith(_SCALARS)]
    if not chosen or _only_dtype(evidence):
        return None
    return Cause(
        "routing",
        f"{chosen[-1].op}{_at(chosen[-1])} decides by values how many or which items follow, as a mixture-of-experts "
        "router does, and may have decided otherwise",
        "compute the routing outside the checkpointed block, or keep its outcome; ac_core.check_recompute() names the "
        "first value that differs",
    )


def _control_flow(evidence: Evidence) -> Cause | None:
    read = [choice for choice in evidence.choices if choice.op.startswith(_SCALARS)]
    if not read or _only_dtype(evidence):
        return None
    return Cause(
        "control flow",
        f"Python reads the value of a tensor ({read[-1].op}){_at(read[-1])}, and what runs next can depend on it",
        "make the branch depend on what forward and recompute share; ac_core.check_recompute() names the first value "
        "that differs",
    )


def _dtype(evidence: Evidence) -> Cause | None:
    if not _only_dtype(evidence):
        return None
    return Cause(
        "dtype",
        "only the dtype differs: a cast that depends on state, which the block reads from elsewhere, was made in one "
        "run and not in the other",
        "cast outside the block, or in the same way in every run",
    )


_UNKNOWN = Cause(
    "unknown",
    "no attribute, argument, setting or random number that the block reads is seen to have changed; it may depend on a "
    "global variable or on another module",
    "run the step under `with ac_core.check_recompute():` (forward and backward), which names the call and the line in "
    "the forward too, and the first value that differs",
)

_RULES: tuple[Callable[[Evidence], Cause | None], ...] = (
    _parameter_without_data,
    _training_flipped,
    _setting_changed,
    _attribute_changed,
    _grown,
    _random,
    _state_moved,
    _autocast,
    _attention_backend,
    _unrepeatable,
    _inner_fsdp,
    _routing,
    _control_flow,
    _dtype,
)
"""The first that applies is named as the cause: what was seen to change before what merely can differ."""

_SCALARS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::allclose")


def _only_dtype(evidence: Evidence) -> bool:
    one, other = evidence.forward, evidence.recompute
    return one is not None and other is not None and one.shape == other.shape and one.dtype != other.dtype


def _grew(was: object, now: object) -> bool:
    if not isinstance(was, Extent) or not isinstance(now, Extent) or len(was.size) != len(now.size):
        return False
    return was.size != now.size and all(a <= b for a, b in zip(was.size, now.size, strict=True))


def _checked(evidence: Evidence) -> str:
    return "; with that put back the recompute saves what the forward saved" if evidence.confirmed else ""


def _at(choice: Choice) -> str:
    return choice.place and f" at {choice.place}"


def _holds_no_data(parameter: Tensor) -> bool:
    try:
        return parameter.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):  # a tensor subclass without a storage of its own
        return False
