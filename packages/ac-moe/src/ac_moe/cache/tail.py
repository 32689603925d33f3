"""The output of a down projection under `moe_tail`: marked, and readable by the dispatcher's combine alone."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ac_moe.cache.modes import dynamo_is_tracing
from ac_moe.errors import MoETailError

# NOTE [ The only reader ]
#
# Under `moe_tail` the recompute does not make the output of the down projection. That is right only if the one thing
# that reads it is a combine that the recompute serves.
#
# 1. So it is handed out as a tensor that refuses every operation, in the forward already, before any gradient is made:
#    a bias added, a router weight applied after, LoRA, a norm for a log. What is asked of its shape or dtype is
#    answered. A detached alias, which bookkeepers of tensors take, is another such tensor. The same tensor object
#    changes its class, so there is no node, no copy and no operator of this.
# 2. Combine opens it, and closes it again behind itself: a later reader is refused as well.
# 3. Combine takes nothing else in a forward under `moe_tail`. What a block made of the output in a way that is not
#    seen here (C++ code) is another tensor, and refused there.
# 4. A region notes the number of each projection that one of its combines has read and kept. The recompute skips
#    those alone. (The down projection may stand in a checkpoint of its own, with the combine outside.)
# 5. While dynamo traces a compiled block it may look at the tensor as it likes. What it compiles is refused as it runs.
# 6. In the recompute the tensor is a NaN that is one element large. If it slips through everything, nothing plausible
#    comes of it.
# 7. Fake tensors, which have no values to be read, are marked and stay of their class.


class Mark(NamedTuple):
    """Which down projection made the rows, and whether their values are a placeholder."""

    number: int
    skipped: bool


numbers = itertools.count()


class DownProjectionRows(torch.Tensor):
    """`[rows, hidden]`, for the dispatcher's combine alone; see NOTE [ The only reader ]."""

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        if name not in _HARMLESS and not dynamo_is_tracing():
            raise MoETailError(
                f"moe_tail: `{name}` reads the output of the down projection, which the recompute does not make. Its "
                "only reader must be the dispatcher's combine: no bias or LoRA on it, no router weight after it, no "
                "cast, no statistics of it. Apply the router weight inside the activation, or use mode 'combine'.",
                (f"{name} reads the output of the down projection",),
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return mark(result, *args[0]._ac_moe_mark) if name == "detach" else result


# What tells of a tensor, or of its gradient, without reading its values.
_HARMLESS_NAMES = """
    detach shape dtype device layout ndim size dim ndimension numel nelement stride storage_offset is_contiguous
    itemsize nbytes element_size names is_cpu is_cuda is_meta is_mps is_xpu is_mkldnn is_nested is_quantized is_sparse
    get_device is_floating_point is_complex is_inference requires_grad grad grad_fn is_leaf output_nr
    register_hook untyped_storage _base _version _is_view __len__ __hash__ __repr__ __format__
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


def mark(output: torch.Tensor, number: int, skipped: bool) -> torch.Tensor:
    """Gives `output`, a plain tensor, its mark, and closes it for other readers."""
    output._ac_moe_mark = Mark(number, skipped)
    if not isinstance(output, FakeTensor):
        output.__class__ = DownProjectionRows
    return output


@contextlib.contextmanager
def opened(rows: torch.Tensor) -> Iterator[Mark | None]:
    """The mark of `rows`, if it is what a down projection returned; until the exit it is an ordinary tensor."""
    if type(rows) is not DownProjectionRows:
        yield getattr(rows, "_ac_moe_mark", None) if isinstance(rows, FakeTensor) else None
        return
    rows.__class__ = torch.Tensor
    try:
        yield rows._ac_moe_mark
    finally:
        rows.__class__ = DownProjectionRows
