"""One wording for every setting that takes one of a few names. Imports neither torch nor Megatron."""


def choice_mistake(name: str, value: object, known: tuple[str, ...]) -> str | None:
    """What is wrong with `value` as a choice for `name`, or None if nothing is.

    Args:
        name: the field or argument; the message begins with it.
        value: what the user gave, of any type.
        known: the valid names.
    """
    if value in known:
        return None
    return f"{name}: {value!r} is not one of {', '.join(map(repr, known))}"
