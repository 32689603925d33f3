"""Who saves what: an account of the tensors that autograd saves while a block runs.

It costs Python work for every call and every saved tensor. Nothing here runs in a normal step: it is for finding out
why a recompute went wrong, and for `check_recompute`.
"""

import linecache
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_TORCH_LAYERS = os.path.join(os.path.dirname(torch.__file__), "nn", "modules") + os.sep
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})


class Meta(NamedTuple):
    """What a checkpoint compares of a saved tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {self.device}"


@dataclass
class Saved:
    """A saved tensor and what saved it.

    call: the torch function called from Python. node: the autograd node that holds the tensor. module: path inside the
    block, empty for the block itself. place: file, line, function and source line. autocast: the dtype of autocast on
    the tensor's device, `None` where it is off. fingerprint: of the tensor's bits, where asked for.
    """

    meta: Meta
    call: str
    module: str
    place: str
    autocast: torch.dtype | None
    fingerprint: tuple[int, int] | None = None
    node: str = ""

    def __str__(self) -> str:
        node, module = self.node and f" ({self.node})", self.module and f" in '{self.module}'"
        return f"{self.call}{node}{module}"


class Choice(NamedTuple):
    """An op whose outcome follows from the values of a tensor. position: how many tensors had been saved before it."""

    op: str
    place: str
    position: int


class CommunicationRefusedError(Exception):
    """Repeating a collective on one rank alone would wait for the others for ever."""


class Recording:
    """What a run of `block` saves, in order. Enter `hooks` around the run, or `everything` where nobody else's saved
    tensor hooks have to see it. cut: the run was ended before a collective."""

    def __init__(self, block: nn.Module, *, fingerprints: bool = False) -> None:
        self.saved: list[Saved] = []
        self.choices: list[Choice] = []
        self.cut = False
        self.paused = False
        self._block = block
        self._names = {id(module): name for name, module in block.named_modules()}
        self._fingerprints = fingerprints
        self._call: Callable[..., Any] | None = None
        self._autocast: dict[str, torch.dtype | None] = {}
        self._unnamed: list[tuple[Saved, object]] = []

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Records, keeps no tensor alive, and refuses to communicate with other ranks."""
        with ExitStack() as stack:
            stack.enter_context(self.hooks(lambda _: object(), lambda _: None))
            stack.enter_context(_Ops(self))
            yield

    @contextmanager
    def hooks(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Any]) -> Iterator[None]:
        """Records, and hands each tensor on to the hooks of another."""

        def record(tensor: Tensor) -> Any:
            saved = self._describe(tensor)
            self.saved.append(saved)
            packed = pack(tensor)
            if self._call is not None:
                self._unnamed.append((saved, packed))
            return packed

        with _Calls(self), saved_tensors_hooks(record, unpack):
            yield

    def _describe(self, tensor: Tensor) -> Saved:
        bits = None
        if self._fingerprints:
            self.paused = True
            bits = fingerprint(tensor)
            self.cut = False
        self.paused = False
        return Saved(Meta.of(tensor), *self._where(), self._autocast.get(tensor.device.type), bits)

    def _where(self) -> tuple[str, str, str]:
        """The call in progress, the module it is in, and the line of the model's own code that it comes from."""
        call = "" if self._call is None else _name(self._call)
        module = user = layer = None
        for frame in _frames():
            owner = frame.f_locals.get("self")
            if module is None:
                module = self._names.get(id(owner))
            if not call and frame.f_code.co_name == "apply" and isinstance(frame.f_locals.get("cls"), type):
                call = f"{frame.f_locals['cls'].__name__}.apply"
            if user is None and not frame.f_code.co_filename.startswith(_LIBRARIES):
                user = frame
            elif layer is None and frame.f_code.co_filename.startswith(_TORCH_LAYERS):
                layer = frame
            if owner is self._block:
                break
        return call or "autograd", module or "", _line(user or layer)

    def calling(self, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Sets the call in progress; returns the one before."""
        self._call, before = call, self._call
        # Read here: inside a call that autocast has cast for, autocast is off.
        self._autocast = {device: _autocast_dtype(device) for device in _AUTOCAST_DEVICES}
        return before

    def called(self, out: object) -> None:
        """The call in progress is over: which nodes of its graph hold what it saved?"""
        if self._unnamed:
            roots = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            nodes = nodes_holding(roots, [packed for _, packed in self._unnamed], limit=64)
            for saved, packed in self._unnamed:
                saved.node = nodes.get(id(packed), "")
            self._unnamed.clear()


class _Calls(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recording.paused:
            return func(*args, **(kwargs or {}))
        outer = self._recording.calling(func)
        try:
            out = func(*args, **(kwargs or {}))
            self._recording.called(out)
            return out
        finally:
            self._recording.calling(outer)


class _Ops(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        ranks = torch.distributed
        self._alone = not (ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._alone and getattr(func, "namespace", "") in _COLLECTIVES:
            self._recording.cut = True
            raise CommunicationRefusedError(str(func))
        recording = self._recording
        if not recording.paused and _chooses(func, args):
            name = str(func).removesuffix(".default").replace(".", "::", 1)
            recording.choices.append(Choice(name, recording._where()[2], len(recording.saved)))
        return func(*args, **(kwargs or {}))


def nodes_holding(roots: Iterable[Node | None], packed: Iterable[object], *, limit: int = 4096) -> dict[int, str]:
    """The names of the nodes at or before `roots` that hold `packed`, outcomes of a pack hook: `id(outcome)` -> name.

    Looks at no more than `limit` nodes. What none of them holds is left out.
    """
    wanted, found = {id(outcome) for outcome in packed}, dict[int, str]()
    todo, seen = deque(root for root in roots if root is not None), set()
    while todo and len(seen) < limit and len(found) < len(wanted):
        node = todo.popleft()
        if node in seen:
            continue
        seen.add(node)
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                try:
                    held = getattr(node, attribute)
                except RuntimeError:  # freed already
                    continue
                for saved in held if isinstance(held, (tuple, list)) else (held,):
                    outcome = id(getattr(saved, "data", None))
                    if outcome in wanted:
                        found[outcome] = node.name()
        todo.extend(before for before, _ in node.next_functions if before is not None)
    return found


def fingerprint(tensor: Tensor) -> tuple[int, int] | None:
    """Two checksums of the bits of a tensor, the same in whatever order they are summed; None where it has no bits to
    look at (sparse, fake, on the meta device)."""
    try:
        with torch.no_grad():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
            local = torch.view_as_real(local) if local.is_complex() else local
            local = local.contiguous().reshape(-1)
            bits = local.view(_INTEGERS[local.element_size()]).to(torch.int64)
            weights = torch.arange(1, bits.numel() + 1, device=bits.device).mul_(0x9E3779B97F4A7C1)
            return int(bits.sum()), int((bits * weights).sum())
    except (RuntimeError, NotImplementedError, KeyError, TypeError):
        return None


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


_AUTOCAST_DEVICES = ("cpu", "cuda")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _chooses(func: Any, args: tuple[Any, ...]) -> bool:
    tags = getattr(func, "tags", ())
    if func is torch.ops.aten.index.Tensor:  # tagged for what it does with a mask
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return (
        torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags
        or func is torch.ops.aten.topk.default
    )


def _name(call: Callable[..., Any]) -> str:
    return resolve_name(call) or getattr(call, "__qualname__", None) or repr(call)


def _frames() -> Iterator[FrameType]:
    """The frames above the caller. Not the caller's own: a frame whose `f_locals` holds it lives until the garbage
    collector runs, and with it the tensors of all frames that it refers to."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number).strip()
    return f"{file}:{number} in {frame.f_code.co_name}{text and f': {text}'}"
