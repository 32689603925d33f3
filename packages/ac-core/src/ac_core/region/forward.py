"""The callable that stands in for the forward of a checkpointed block."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, cuda, equal, get_rng_state, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.contexts import ComposedContextFn, ContextFn

# NOTE [ Attachment ]
# A block is checkpointed by putting a `CheckpointedForward` into its instance as `forward`. That keeps everything
# else of the model as it was:
# 1. The module tree, the parameter names, the `state_dict` keys and the class of the block do not change. A wrapper
#    module changes all but the keys.
# 2. Module hooks stay outside the region: FSDP2 gathers and casts once around the block, not inside its recompute.
# 3. It is an object that refers to the module, not a closure. `copy.deepcopy` and `pickle` follow the reference to
#    the copy of the module; a closure would go on calling the original's weights from the copy, silently.


class CheckpointedForward:
    """Runs the forward of `module` in a checkpoint region whenever gradients are on.

    Whether a region is opened depends on grad mode and not on `module.training`: `model.eval()` with gradients saves
    activations like any other forward, and a validation pass under `torch.no_grad()` saves none.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        preserve_rng_state: bool,
        early_stop: bool,
        context_fn: ContextFn | None,
        state_fn: ContextFn,
    ) -> None:
        self.module = module
        self.name = name
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.context_fn = context_fn
        self._state_and_context_fn = ComposedContextFn([state_fn] if context_fn is None else [state_fn, context_fn])
        self.enabled = True
        self.replaced = module.__dict__.get("forward")  # an instance's own forward, put there by another tool

    @property
    def __signature__(self) -> inspect.Signature:
        # Callers such as transformers read it to learn which arguments a forward takes.
        return inspect.signature(self._original)

    @property
    def _original(self) -> Callable[..., Any]:
        # Looked up at each call: `fully_shard` changes the class of the module after it has been attached to.
        return self.replaced or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.enabled and is_grad_enabled()):
            return self._original(*args, **kwargs)
        self._refuse_double_checkpointing()
        for name, value in (*enumerate(args), *kwargs.items()):
            self._refuse_cache(name, value)
        # Keyword arguments travel as positional ones. So `checkpoint` saves their tensors as it saves all its inputs,
        # with a version check and through outer saved-tensor hooks, and no name collides with one of its own options.
        # The block's state is kept in eager mode alone. No `context_fn` rather than the one that does nothing:
        # torch.compile can trace only the former.
        context_fn = self.context_fn if is_compiling() else self._state_and_context_fn
        contexts = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint(
            self._run,
            tuple(kwargs),
            *kwargs.values(),
            *args,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            early_stop=self.early_stop,
            **contexts,
        )

    def _run(self, names: tuple[str, ...], *values: Any) -> Any:
        kwargs = dict(zip(names, values, strict=False))
        if is_compiling():
            return self._original(*values[len(names) :], **kwargs)
        random = None if self.preserve_rng_state else _random_states()
        output = self._original(*values[len(names) :], **kwargs)
        if random is not None and not all(map(equal, random, _random_states())):
            raise ActivationCheckpointingError(
                f"block '{self.name}' draws random numbers (a dropout, a jitter), and with preserve_rng_state=False "
                "its recompute would draw others and give wrong gradients; leave preserve_rng_state at True"
            )
        return output

    def _refuse_double_checkpointing(self) -> None:
        if getattr(self.module, "gradient_checkpointing", False):
            raise ActivationCheckpointingError(
                f"block '{self.name}' is checkpointed by ac-core and by Hugging Face (gradient_checkpointing=True), "
                "which would run it three times a step; call model.gradient_checkpointing_disable()"
            )

    def _refuse_cache(self, name: str | int, value: object) -> None:
        # A key/value cache is recognised by what it can do. The recompute would append to it a second time.
        if callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None)):
            raise ActivationCheckpointingError(
                f"block '{self.name}' was given a key/value cache (argument {name}) while gradients are on; its "
                "recompute would append the same keys again. Call the model with use_cache=False, or under "
                "torch.no_grad()"
            )


# Where torch.compile cannot put a region into its graph (a block that counts up an attribute), it leaves the call to
# Python. It would then compile `__call__` by itself, for which `is_compiling()` holds, and so leave the state out of a
# region that runs in Python. As part of a larger frame `__call__` is traced as before. Nothing public says this.
_dynamo = torch._C._dynamo.eval_frame
if hasattr(_dynamo, "set_code_exec_strategy"):
    _dynamo.set_code_exec_strategy(
        CheckpointedForward.__call__.__code__,
        _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT),
    )


def checkpointed_forwards(model: nn.Module) -> list[tuple[nn.Module, CheckpointedForward]]:
    """Every module of `model` that is checkpointed, with what stands in for its forward."""
    pairs = ((module, module.__dict__.get("forward")) for module in model.modules())
    return [(module, forward) for module, forward in pairs if isinstance(forward, CheckpointedForward)]


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """The blocks of `model` run as if checkpointing were off; the key/value cache stays off."""
    forwards = [forward for _, forward in checkpointed_forwards(model)]
    before = [forward.enabled for forward in forwards]
    try:
        for forward in forwards:
            forward.enabled = False
        yield
    finally:
        for forward, enabled in zip(forwards, before, strict=True):
            forward.enabled = enabled


def _random_states() -> list[Tensor]:
    states = [get_rng_state()]
    if cuda.is_initialized():
        states.append(cuda.get_rng_state())
    return states
