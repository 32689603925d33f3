"""Names of ops in settings: are there such, and which was meant."""

from difflib import get_close_matches

NATIVE = ("aten", "prims", "_c10d_functional", "c10d", "c10d_functional", "_c10d_functional_autograd")
"""Namespaces that torch itself registers: an unknown name in these is a mistake wherever it is read."""


def check_op_name(name: str, *, imported: bool) -> str | None:
    """What is wrong with an op name `namespace::name`, or `namespace::name.overload`; None if there is such an op.

    imported: the libraries that register ops have been imported. Until then an op of a namespace that is not torch's
    own passes. Imports torch.
    """
    import torch

    registered = torch._C._dispatch_get_all_op_names()  # no public list of the operators; a test watches this one
    if name in registered or any(op.startswith(f"{name}.") for op in registered):
        return None
    namespace = name.partition("::")[0]
    known = {op.partition(".")[0] for op in registered if op.startswith(f"{namespace}::")}
    if namespace not in NATIVE and not known:
        close = get_close_matches(namespace, NATIVE, n=1)
        if close:
            return f"no op namespace {namespace!r}; did you mean {close[0]!r}?"
        return f"no op {name!r} is registered; import the library that registers it first" if imported else None
    close = get_close_matches(name.partition(".")[0], sorted(known), n=3)
    hint = f"; near matches: {', '.join(map(repr, close))}" if close else ""
    return f"no op {name!r} is registered{hint}"
