"""Checkpointing by other tools of a block that ac-core checkpoints too.

Two checkpoints of one block save nothing that one does not. A reentrant outer one makes the block run three times a
step, and under any outer one `selective` keeps nothing and is `full`. Trainers switch their own on late, from a setting
far from the model, so it is looked for where it shows:

* when checkpointing is applied, by the flags and wrappers that tools leave on modules;
* in a block's first forward, by the same marks inside the block, which may be newer than ours;
* in every forward, by the checkpoint that the block runs in, whoever opened it and however.

An outer checkpoint around several blocks, or a block and other modules, is another thing: a choice that trades time for
memory. It is left to work.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch._C import _current_graph_task_id as current_backward

from ac_core.selective.observe import top_hooks

# `_current_graph_task_id` is private: nothing public tells whether a forward runs inside a backward.

_FLAGS = {
    "gradient_checkpointing": "Hugging Face (model.gradient_checkpointing_enable)",
    "grad_checkpointing": "its own code (grad_checkpointing=True, as in timm)",
}

_EMPTY_CELL = CellType()

Marks = dict[str, tuple[nn.Module, str]]
"""Modules that carry the mark of a tool, by name, with the tool."""


def checkpointing_flag(module: nn.Module) -> str:
    """The tool whose flag is set on `module`; empty where none is."""
    for flag, tool in _FLAGS.items():
        if getattr(module, flag, False) is True:
            return tool
    return ""


def checkpointing_mark(module: nn.Module) -> str:
    """The tool that says on `module`, by a flag or as a wrapper, that it checkpoints it; empty where none does."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
        return "torch's checkpoint_wrapper"
    return checkpointing_flag(module)


def marks(model: nn.Module) -> Marks:
    """Every module of `model` that carries the mark of a tool, by its name."""
    named = ((name, module, checkpointing_mark(module)) for name, module in model.named_modules())
    return {name: (module, tool) for name, module, tool in named if tool}


def mark_about(name: str, block: nn.Module, marked: Marks) -> tuple[str, str] | None:
    """What among `marks` checkpoints the block called `name`, or a module in it: its name and the tool.

    A flag on a module around the block means that module itself where its class declares the flag (a stage that is a
    `GradientCheckpointingLayer`). On any other it means the loop over its layers, unless these have flags of their own.
    """
    decides_itself = any(hasattr(block, flag) for flag in _FLAGS)
    for other, (module, tool) in marked.items():
        label = other or type(module).__name__
        if other == name or other.startswith(f"{name}."):
            return label, tool
        if other and not name.startswith(f"{other}."):
            continue
        declares = any(hasattr(type(module), flag) for flag in _FLAGS)
        if _wraps(module, block) or (checkpointing_flag(module) and (declares or not decides_itself)):
            return label, tool
    return None


def other_tool(block: nn.Module, *, look_inside: bool) -> str:
    """The other tool that checkpoints this forward of `block`; empty where none does.

    look_inside: go through the modules in the block as well, which takes too long for every forward.
    """
    if look_inside:
        tool = next(filter(None, map(checkpointing_mark, block.modules())), "")
    else:
        set_on_block = block.__dict__  # a failing `getattr` on a module takes longer than all the rest of this
        tool = next((tool for flag, tool in _FLAGS.items() if set_on_block.get(flag) is True), "")
    return tool or ("a checkpoint that another tool has put around it" if _checkpoint_around(block) else "")


def _checkpoint_around(block: nn.Module) -> bool:
    """Whether this forward of `block` runs in a checkpoint that somebody has opened for this very block."""
    hooks = top_hooks(True)
    if hooks is not None and _is_alone(block, _run_by(hooks[0])):
        return True
    return current_backward() != -1 and any(_is_alone(block, [function]) for function in _run_again())


def _is_alone(block: nn.Module, values: list[Any]) -> bool:
    """Whether `block` is the one module that a checkpoint runs, told by its function and arguments."""
    modules = list(dict.fromkeys(_modules_in(values)))
    return len(modules) == 1 and _wraps(modules[0], block)


def _wraps(module: nn.Module, block: nn.Module) -> bool:
    """Whether `module` is the block, or wrappers with one child each around it."""
    while module is not block:
        children = list(module.children())
        if len(children) != 1:
            return False
        module = children[0]
    return True


def _run_by(pack_hook: object) -> list[Any]:
    """Function and arguments of a non-reentrant checkpoint, told by the saved-tensor hook that it has installed.

    torch keeps that in closures and offers no way to ask. Where a torch has other names for it, nothing is seen here.
    """
    frame = _closure(pack_hook).get("frame")
    inside = _closure(getattr(frame, "recompute_fn", None))
    return [inside.get("fn"), *getattr(frame, "saved_args", ())]


def _run_again() -> Iterator[Any]:
    """The functions that reentrant checkpoints run again, told by their `backward` on the stack of this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward" and "ctx" in frame.f_code.co_varnames:
            yield getattr(frame.f_locals.get("ctx"), "run_function", None)
        frame = frame.f_back


def _modules_in(values: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules that callables stand for: `layer`, `layer.__call__`, `partial(layer, ...)`, `lambda x: layer(x)`."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, MethodType):
            yield from _modules_in([value.__self__])
        elif isinstance(value, partial):
            yield from _modules_in([value.func, *value.args])
        elif isinstance(value, FunctionType):
            yield from _modules_in(cell for cell in _closure(value).values() if not isinstance(cell, FunctionType))


def _closure(function: object) -> dict[str, Any]:
    if not isinstance(function, FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != _EMPTY_CELL}
