"""The callable that stands in for the forward of a checkpointed block."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, compiler, cuda, equal, get_rng_state, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from ac_core.errors import ActivationCheckpointingError
from ac_core.mismatch.guard import MismatchGuard
from ac_core.region.cache import is_cache, only_reads_cache
from ac_core.region.contexts import ComposedContextFn, ContextFn
from ac_core.region.foreign import checkpointing_flag, other_tool
from ac_core.region.offload import Offload
from ac_core.region.tracing import is_traced, never_compiled_alone
from ac_core.region.watch import watched, watching
from ac_core.trainability import needs_gradient

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
    activations like any other forward, and a validation pass under `torch.no_grad()` saves none. Nor does a forward in
    which neither a parameter nor an input needs a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        block: nn.Module | None = None,
        preserve_rng_state: bool,
        early_stop: bool,
        state_fn: ContextFn,
        context_fn: ContextFn | None,
        compiled_context_fn: ContextFn | None,
        offload: Offload | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.block = block or module  # differs where a block is checkpointed in pieces
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.context_fn = context_fn
        self.compiled_context_fn = compiled_context_fn
        self.offload = offload
        self._mismatch_guard = MismatchGuard(module, name)
        self.state_fn = state_fn
        self._state_and_context_fn = ComposedContextFn([state_fn] if context_fn is None else [state_fn, context_fn])
        self.enabled = True
        self.called = False  # with gradients on, since somebody last asked
        self.first = True
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
        self.called = True
        if not needs_gradient(self.module, (*args, *kwargs.values())):
            return self._original(*args, **kwargs)
        self._refuse_double_checkpointing()
        for name, value in (*enumerate(args), *kwargs.items()):
            self._refuse_cache(name, value)
        # State and guard are for eager mode alone. No `context_fn` rather than the one that does nothing: torch.compile
        # can trace only the former.
        if is_traced():
            if self.offload is not None:
                _refuse_compiled_offload(self.name)
            if isinstance(self.compiled_context_fn, ComposedContextFn):
                _refuse_compiled_contexts(self.name)
            contexts = {} if self.compiled_context_fn is None else {"context_fn": self.compiled_context_fn}
            return self._checkpoint(args, kwargs, in_context=False, **contexts)
        if self.offload is None:
            context_fn = partial(self._mismatch_guard, self._state_and_context_fn)
            return self._checkpoint(args, kwargs, in_context=True, context_fn=context_fn)
        made = self._mismatch_guard(self._state_and_context_fn)  # which asks for hooks of others, and not for these
        with self.offload.moving():
            return self._checkpoint(args, kwargs, in_context=True, context_fn=lambda: made)

    def _checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_context: bool, **contexts: Any) -> Any:
        # Keyword arguments travel as positional ones. So `checkpoint` saves their tensors as it saves all its inputs,
        # with a version check and through outer saved-tensor hooks, and no name collides with one of its own options.
        return checkpoint(
            self._run,
            _Run(in_context=in_context),
            tuple(kwargs),
            *kwargs.values(),
            *args,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            early_stop=self.early_stop,
            **contexts,
        )

    @never_compiled_alone
    def _run(self, run: "_Run", names: tuple[str, ...], *values: Any) -> Any:
        kwargs = dict(zip(names, values, strict=False))
        if is_traced():
            return self._original(*values[len(names) :], **kwargs)
        recomputing, run.started = run.started, True
        if run.in_context:
            return self._run_in_context(run, kwargs, values[len(names) :], recomputing=recomputing)
        # torch.compile could not trace the region after all and left it to Python, after `__call__` had been traced.
        run.contexts = run.contexts or self._mismatch_guard(self.state_fn)
        with run.contexts[recomputing]:
            return self._run_in_context(run, kwargs, values[len(names) :], recomputing=recomputing)

    def _run_in_context(self, run: "_Run", kwargs: dict[str, Any], args: tuple[Any, ...], *, recomputing: bool) -> Any:
        random = None if self.preserve_rng_state else _random_states()
        if watched():
            with watching(self.module, self.name, run, recomputing=recomputing):
                output = self._original(*args, **kwargs)
        else:
            output = self._original(*args, **kwargs)
        if random is not None and not all(map(equal, random, _random_states())):
            raise ActivationCheckpointingError(
                f"block '{self.name}' draws random numbers (a dropout, a jitter), and with preserve_rng_state=False "
                "its recompute would draw others and give wrong gradients; leave preserve_rng_state at True"
            )
        return output

    def _refuse_double_checkpointing(self) -> None:
        if is_traced():
            tool = checkpointing_flag(self.block)
        else:
            tool = other_tool(self.block, look_inside=self.first)
            self.first = False
        if tool:
            raise ActivationCheckpointingError(
                f"block '{self.name}' is checkpointed by ac-core and by {tool}. Both together save nothing more, "
                "may run the block three times a step, and keep nothing of what 'selective' keeps. Turn the other off: "
                "model.gradient_checkpointing_disable(), and gradient_checkpointing, activation_checkpointing or "
                "activation_checkpointing_policy in the trainer's settings; or take ac-core's off with "
                "remove_activation_checkpointing(model)"
            )

    def _refuse_cache(self, name: str | int, value: object) -> None:
        if is_cache(value) and not only_reads_cache(self.module):
            raise ActivationCheckpointingError(
                f"block '{self.name}' was given a key/value cache (argument {name}) while gradients are on; its "
                "recompute would append the same keys again. Call the model with use_cache=False (its config may have "
                "been set back to True) or under torch.no_grad(). Where the cache has to stay on, for a prefix or for "
                "keys of other layers, apply with ActivationCheckpointingConfig(keep_cache=True)"
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


# To torch.compile, an exception while it traces is one more thing that it cannot trace: it is swallowed.
# What is disabled it leaves to Python, so that these are raised where the block is called.
@compiler.disable(reason="ac-core: offload 'cpu' cannot be compiled")
def _refuse_compiled_offload(block: str) -> None:
    raise ActivationCheckpointingError(
        f"block '{block}' is compiled, and the compiler decides itself what is kept where, so that offload 'cpu' would "
        "do nothing; leave offload at 'none', or do not compile"
    )


@compiler.disable(reason="ac-core: several context functions cannot be compiled")
def _refuse_compiled_contexts(block: str) -> None:
    raise ActivationCheckpointingError(
        f"block '{block}' is compiled, and torch.compile cannot trace several context functions around one checkpoint "
        "(context_fn= beside policy 'selective' or 'budget', or a list of them); use one of them, or do not compile"
    )


class _Run:
    """One forward of a block and its recomputes. in_context: whether `checkpoint` enters the block's contexts."""

    def __init__(self, *, in_context: bool) -> None:
        self.in_context = in_context
        self.started = False
        self.contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None


def _random_states() -> list[Tensor]:
    states = [get_rng_state()]
    if cuda.is_initialized():
        states.append(cuda.get_rng_state())
    return states
