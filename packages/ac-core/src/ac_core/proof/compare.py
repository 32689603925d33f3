"""Comparing the outcomes of two steps, bit for bit."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ac_core.proof.restore import local, same_bits


@dataclass(frozen=True)
class Difference:
    """One thing of which two steps differ.

    kind: `loss`, `gradients`, `buffers` or `rng`. name: the parameter, buffer, attribute or generator. what: how they
    differ. max_abs: the largest absolute difference of two elements. max_rel: that over the largest magnitude of the
    expected tensor. Both are `None` where nothing can be subtracted, and infinite where one side alone is not finite.
    """

    kind: str
    name: str
    what: str
    max_abs: float | None = None
    max_rel: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, which has no infinity: that is `"inf"`."""
        return {name: "inf" if value == math.inf else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        size = "" if self.max_abs is None else f": max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}"
        return f"{self.name} {self.what}{size}"


@dataclass(frozen=True)
class Comparison:
    """The things of one kind. True where all are equal, in which nothing to compare counts as equal.

    compared: how many there were. differences: those that differ.
    """

    compared: int
    differences: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return not self.differences

    def joined(self, later: "Comparison") -> "Comparison":
        """With the differences of a later comparison of the same things, as far as their names are not here yet."""
        new = tuple(d for d in later.differences if d.name not in self.names)
        return Comparison(max(self.compared, later.compared), self.differences + new)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what differs."""
        return tuple(difference.name for difference in self.differences)

    def __str__(self) -> str:
        return f"equal ({self.compared})" if self else "; ".join(map(str, self.differences))


def compare(
    kind: str,
    expected: Mapping[str, Any],
    got: Mapping[str, Any],
    *,
    same: Callable[[Any, Any], bool] | None = None,
    without: frozenset[str] = frozenset(),
) -> Comparison:
    """Compare what has the same name, leaving out the names in `without`. NaN equals NaN, and -0.0 differs from 0.0."""
    names = [name for name in dict.fromkeys((*expected, *got)) if name not in without]
    found = []
    for name in names:
        if name not in got:
            found.append(Difference(kind, name, "is missing"))
        elif name not in expected:
            found.append(Difference(kind, name, "is there, and should not"))
        elif not (same or _same)(expected[name], got[name]):
            found.append(_difference(kind, name, expected[name], got[name]))
    return Comparison(len(names), tuple(found))


def _same(expected: Any, got: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        return same_bits(expected, got) or _same_but_for_kinds_of_nan(expected, got)
    return type(expected) is type(got) and repr(expected) == repr(got)  # which tells NaN and -0.0 as well


def _same_but_for_kinds_of_nan(expected: Tensor, got: Tensor) -> bool:
    expected, got = local(expected), local(got)
    if (expected.shape, expected.dtype) != (got.shape, got.dtype) or not expected.is_floating_point():
        return False
    nan = expected.isnan()
    return torch.equal(nan, got.isnan()) and same_bits(expected.masked_fill(nan, 0), got.masked_fill(nan, 0))


def _difference(kind: str, name: str, expected: Any, got: Any) -> Difference:
    if kind == "rng":
        return Difference(kind, name, "is left in another state")
    if not (isinstance(expected, Tensor) and isinstance(got, Tensor)):
        return Difference(kind, name, f"is {_short(got)} instead of {_short(expected)}")
    expected, got = local(expected), local(got)
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return Difference(kind, name, f"is {_short(got)} instead of {_short(expected)}")
    number = torch.complex128 if expected.is_complex() else torch.float64
    before, now = expected.to(number), got.to(number)
    # Equal infinities have no difference, and two NaN none either; a NaN or infinity against a number has any.
    same = (before == now) | (before.isnan() & now.isnan())
    apart = (now - before).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    scale = before.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    return Difference(kind, name, "differs", apart, apart / scale if scale else (math.inf if apart else 0.0))


def _short(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
