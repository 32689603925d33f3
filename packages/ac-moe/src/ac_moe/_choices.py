"""One wording for every setting that takes one of a few names. Imports neither torch nor Megatron."""

from ac_moe import __version__


def choice_mistake(name: str, value: object, known: tuple[str, ...], built: tuple[str, ...]) -> str | None:
    """What is wrong with `value` as a choice for `name`, or None if nothing is.

    Args:
        name: the field or argument; the message begins with it.
        value: what the user gave, of any type.
        known: every name of the design.
        built: the names among `known` that this version implements.
    """
    if value in built:
        return None
    if value in known:
        return f"{name}: {value!r} is not in ac-moe {__version__}; available: {_listed(built)}"
    return f"{name}: {value!r} is not one of {_listed(known)}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)
