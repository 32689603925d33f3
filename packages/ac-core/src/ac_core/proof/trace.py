"""Which ops of the checkpointed blocks are saved and which are recomputed: watched, op by op, in a real step."""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ac_core.proof.meters import FORMULAS
from ac_core.region.watch import add_watcher, remove_watcher
from ac_core.selective.kept import current_kept_call
from ac_core.sizes import counted

Choice = Literal["SAVE", "RECOMPUTE", "NEITHER", "ALTERNATE"]

_VARIABLE = "NEMO_SELECTIVE_AC_TRACE"
_LOGGER = logging.getLogger("ac_core.trace")
_ALIASES = ("aten::detach", "aten::_unsafe_view")  # not marked as views of their input


@dataclass
class TracedOp:
    """One op in the forward of a checkpointed block.

    block, layer: the block, and the module in it that ran the op (empty: the block itself). op: such as `aten::mm`.
    shape, nbytes: of its first output; of all. flops: as torch's flop counter has them, 0 for ops that it leaves out.
    decision: `SAVE`: its output is kept, so the recompute does not run it. `RECOMPUTE`: it does. `NEITHER`: the
    recompute ended before the op, since nothing behind it is needed. reason: why.
    """

    block: str
    layer: str
    op: str
    shape: tuple[int, ...]
    nbytes: int
    flops: int
    decision: Choice
    reason: str


class Trace:
    """The ops of every checkpointed block that has run, in order. `print(trace)`: one line for each unique op.

    Whether a recompute ran an op is known when the backward has: a trace of a forward alone shows what is intended. The
    first step of `selective` watches the blocks; what later steps do may differ from it. Bytes are those of the outputs
    of ops; how much memory is held, `measure` counts.
    """

    def __init__(self) -> None:
        self.ops: list[TracedOp] = []

    @property
    def decisions(self) -> dict[str, Choice]:
        """For each unique op what becomes of its calls, by `unique_decision`."""
        by_op: dict[str, list[TracedOp]] = {}
        for traced in self.ops:
            by_op.setdefault(traced.op, []).append(traced)
        return {op: unique_decision(several) for op, several in by_op.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"decisions": self.decisions, "ops": [asdict(traced) for traced in self.ops]}

    def __str__(self) -> str:
        lines = []
        for op, decision in self.decisions.items():
            calls = [traced for traced in self.ops if traced.op == op]
            saved, again, neither = (
                [traced for traced in calls if traced.decision == which] for which in ("SAVE", "RECOMPUTE", "NEITHER")
            )
            lines.append(
                f"{decision:9}  {op:55}  {counted(len(calls), 'call')}: {len(saved)} saved, {len(again)} recomputed, "
                f"{len(neither)} neither"
                f"  {sum(t.nbytes for t in saved) / 2**20:9.2f} of {sum(t.nbytes for t in calls) / 2**20:9.2f} MiB"
                f"  {sum(t.flops for t in saved) / 1e9:9.3f} of {sum(t.flops for t in calls) / 1e9:9.3f} GFLOP saved"
            )
        return "\n".join(lines)


@contextmanager
def trace_decisions() -> Iterator[Trace]:
    """Watch every op that checkpointed blocks run inside this context.

        with ac_core.trace_decisions() as trace:
            model(**batch).loss.backward()
        print(trace)

    Each unique op is logged once, to the logger `ac_core.trace`, at level INFO. Slow: it is for one step, not for a
    run. A block that torch.compile has traced is not seen.
    """
    trace = Trace()
    with _Recorder(trace).installed():
        yield trace
    for op, decision in trace.decisions.items():
        _LOGGER.info("%s %s", decision, op)


def trace_if_asked() -> None:
    """Honour the environment switch: log each unique op once, when the first block that runs it has run."""
    asked = os.environ.get(_VARIABLE, "").lower()
    if asked not in ("", "0", "false", "off", "no", "1", "true", "on", "yes"):
        warnings.warn(f"{_VARIABLE}={asked!r} is neither 1 nor 0 and does nothing", stacklevel=3)
    if asked in ("1", "true", "on", "yes") and not _Standing.on:
        _Standing.on = True
        if not _LOGGER.hasHandlers():
            _LOGGER.addHandler(logging.StreamHandler())
        _LOGGER.setLevel(logging.INFO)
        _Standing(Trace()).install()


def unique_decision(several: Iterable[TracedOp]) -> Choice:
    """One word for several calls: theirs; `ALTERNATE` where some are saved and some recomputed.

    Calls that are `NEITHER` count only where all are.
    """
    choices = {traced.decision for traced in several}
    choices = choices - {"NEITHER"} or choices
    return choices.pop() if len(choices) == 1 else "ALTERNATE"


class _Recorder:
    """Writes a trace while it is installed."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._modules: list[nn.Module] = []
        self._forwards: WeakKeyDictionary[object, list[TracedOp]] = WeakKeyDictionary()
        self._handles: list[Any] = []

    def install(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._modules.append(module)),
            register_module_forward_hook(lambda *_: self._modules and self._modules.pop() and None, always_call=True),
        ]
        add_watcher(self._watch)

    @contextmanager
    def installed(self) -> Iterator[None]:
        self.install()
        try:
            yield
        finally:
            remove_watcher(self._watch)
            for handle in self._handles:
                handle.remove()

    @contextmanager
    def _watch(self, block: nn.Module, name: str, run: object, recomputing: bool) -> Iterator[None]:
        paths = {module: path for path, module in block.named_modules()}
        mode = _Ops(lambda: next((paths[m] for m in reversed(self._modules) if m in paths), ""))
        try:
            with mode:
                yield
        finally:
            for traced in mode.seen:
                traced.block = name
            if recomputing:
                self._recomputed(run, mode.seen)
            else:
                self._ran(run, mode.seen)

    def _ran(self, run: object, seen: list[TracedOp]) -> None:
        self._forwards[run] = seen
        self.trace.ops += seen

    def _recomputed(self, run: object, seen: list[TracedOp]) -> None:
        """Corrects what the rows of the forward say by what the recompute really ran."""
        ran = Counter((traced.layer, traced.op) for traced in seen)
        for traced in self._forwards.get(run, []):
            place = traced.layer, traced.op
            if traced.decision == "SAVE":
                continue
            if ran[place]:
                ran[place] -= 1
            else:
                traced.decision = "NEITHER"
                traced.reason = "nothing behind it is needed: the recompute ends before it"


class _Standing(_Recorder):
    """Logs what is new after each block, and keeps no more of it."""

    on = False

    def _ran(self, _run: object, seen: list[TracedOp]) -> None:
        new = Trace()
        new.ops = [traced for traced in seen if traced.op not in self._logged()]
        for op, decision in new.decisions.items():
            _LOGGER.info("%s %s", decision, op)
        self.trace.ops += [next(t for t in new.ops if t.op == op) for op in new.decisions]

    def _recomputed(self, _run: object, _seen: list[TracedOp]) -> None:
        pass  # logged already

    def _logged(self) -> set[str]:
        return {traced.op for traced in self.trace.ops}


class _Ops(TorchDispatchMode):
    """Every op of a block's run that makes a new tensor."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._layer = layer
        self.seen: list[TracedOp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = str(func._schema.name)
        if any(output.numel() for output in outputs) and not func.is_view and name not in _ALIASES:
            counter = FORMULAS.get(func._overloadpacket)
            kept = current_kept_call()
            self.seen.append(
                TracedOp(
                    block="",
                    layer=self._layer(),
                    op=name,
                    shape=tuple(outputs[0].shape),
                    nbytes=sum(output.numel() * output.element_size() for output in outputs),
                    flops=0 if counter is None else int(counter(*args, **kwargs, out_val=result)),
                    decision="RECOMPUTE" if kept is None else "SAVE",
                    reason="recomputed in the backward" if kept is None else f"in the kept call {kept}",
                )
            )
        return result
