"""The callable that stands in for the forward of a checkpointed block."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, cuda, equal, get_rng_state, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.cache import is_cache, only_reads_cache
from ac_core.region.contexts import ContextFn
from ac_core.region.foreign import checkpointing_flag, other_tool
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
    activations like any other forward, and a validation pass under `torch.no_grad()` saves none. With `dormant`, it
    takes a parameter or an input that needs a gradient as well.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        block: nn.Module | None = None,
        preserve_rng_state: bool,
        early_stop: bool,
        context_fn: ContextFn | None,
        compiled_context_fn: ContextFn | None,
        dormant: bool = False,
    ) -> None:
        self.module = module
        self.name = name
        self.block = block or module  # differs where a block is checkpointed in pieces
        self.dormant = dormant
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.context_fn = context_fn
        self.compiled_context_fn = compiled_context_fn
        self.enabled = True
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
        if self.dormant and not needs_gradient(self.module, (*args, *kwargs.values())):
            return self._original(*args, **kwargs)
        self._refuse_double_checkpointing()
        for name, value in (*enumerate(args), *kwargs.items()):
            self._refuse_cache(name, value)
        # Keyword arguments travel as positional ones. So `checkpoint` saves their tensors as it saves all its inputs,
        # with a version check and through outer saved-tensor hooks, and no name collides with one of its own options.
        # No `context_fn` rather than the one that does nothing: torch.compile can trace only the former.
        context_fn = self.compiled_context_fn if is_compiling() else self.context_fn
        contexts = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint(
            self._run,
            _Call(),
            tuple(kwargs),
            *kwargs.values(),
            *args,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            early_stop=self.early_stop,
            **contexts,
        )

    def _run(self, call: "_Call", names: tuple[str, ...], *values: Any) -> Any:
        kwargs = dict(zip(names, values, strict=False))
        if is_compiling():
            return self._original(*values[len(names) :], **kwargs)
        recomputing = call.check_parameters(self)
        random = None if self.preserve_rng_state else _random_states()
        if watched():
            with watching(self.module, self.name, call, recomputing=recomputing):
                output = self._original(*values[len(names) :], **kwargs)
        else:
            output = self._original(*values[len(names) :], **kwargs)
        if random is not None and not all(map(equal, random, _random_states())):
            raise ActivationCheckpointingError(
                f"block '{self.name}' draws random numbers (a dropout, a jitter), and with preserve_rng_state=False "
                "its recompute would draw others and give wrong gradients; leave preserve_rng_state at True"
            )
        return output

    def _refuse_double_checkpointing(self) -> None:
        if is_compiling():
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


class _Call:
    """One forward of a block and its recomputes: they have to see the same parameters.

    Without checkpointing autograd notices a parameter that was edited between forward and backward by its version. A
    recompute would silently use the edited one, or another one where `torch.func.functional_call` had put it in.
    """

    def __init__(self) -> None:
        self._parameters: list[tuple[str, Tensor, int]] | None = None

    def check_parameters(self, forward: CheckpointedForward) -> bool:
        """Raises if a recompute would see other parameters than the forward; returns whether this is a recompute."""
        now = [(name, p, p._version) for name, p in forward.module.named_parameters()]
        if self._parameters is None:
            self._parameters = now
            return False
        present = {name: (p, version) for name, p, version in now}
        for name, was, version in self._parameters:
            # FSDP1 has no parameters at all in the backward, but plain views of its flat one in their place.
            p, now_version = present.get(name, (was, version))
            if p is not was or now_version != version:
                how = "is another tensor" if p is not was else "was modified in place"
                raise ActivationCheckpointingError(
                    f"parameter '{name}' of block '{forward.name}' {how} since the forward, so the recompute would "
                    "give gradients of another function; run backward before the optimizer's step, and inside the same "
                    "torch.func.functional_call as the forward"
                )
        return True


def _random_states() -> list[Tensor]:
    states = [get_rng_state()]
    if cuda.is_initialized():
        states.append(cuda.get_rng_state())
    return states
