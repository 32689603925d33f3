"""The callable that stands in for the forward of a model with the fused loss."""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ac_loss.config import LossConfig
from ac_loss.huggingface.errors import FusedLossError
from ac_loss.huggingface.head import find_heads, lazy_heads
from ac_loss.huggingface.origin import Origin

# NOTE [ Attachment ]
# A model has the fused loss when a `FusedForward` is in its instance as `forward`. The module tree, the names and the
# class stay as they were, and callers that go by the forward alone (PEFT calls `model.forward`) meet it too. It is an
# object that refers to the model, not a closure: `copy.deepcopy` and `pickle` follow the reference to the copy.
# Accelerate takes what it finds for a function and binds it to the model once more; the model is then the first
# argument.


class FusedForward:
    """Runs the forward of `model`, its head answered by lazy logits in a training forward: one in training mode, with
    gradients on, and with labels."""

    def __init__(self, model: nn.Module, config: LossConfig) -> None:
        self.model = model
        self.config = config
        self.replaced = model.__dict__.get("forward")  # an instance's own forward, put there by another tool
        self.running: int | None = None  # the thread in which a training forward runs
        self.warned = False

    @property
    def __signature__(self) -> inspect.Signature:
        # The Trainer reads it to learn which columns of a dataset the model takes.
        return inspect.signature(self._original)

    @property
    def _original(self) -> Callable[..., Any]:
        # Looked up at each call: `fully_shard` changes the class of the model.
        return self.replaced or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:
            args = args[1:]
        if not (self.model.training and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        if torch.compiler.is_compiling():
            from ac_loss.huggingface._uncompiled import refuse_compiled

            refuse_compiled(self.model)
        if self.running == threading.get_ident():
            return self._original(*args, **kwargs)
        if not self._has_labels(args, kwargs):
            self._warn_of_logits()
            return self._original(*args, **kwargs)
        return self._train(args, kwargs)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = type(self.model).__name__
        origin = Origin(name, self.config)
        with lazy_heads(self.model, find_heads(self.model), origin):
            self.running = origin.thread
            try:
                output = self._original(*args, **kwargs)
            finally:
                self.running, origin.running = None, False
        if not origin.losses:
            what = "computed no loss from its head's output" if origin.made else "did not run its head"
            raise FusedLossError(
                f"{name}: was called with labels in training and {what}, so its loss is not fused. Take the fused loss "
                "off with ac_loss.huggingface.remove_fused_loss(model)"
            )
        return output

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if "labels" in kwargs or not args:
            return kwargs.get("labels") is not None
        return self.__signature__.bind_partial(*args).arguments.get("labels") is not None

    def _warn_of_logits(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{type(self.model).__name__} has the fused loss and was called in training without labels: it "
                "computes logits in full, as without the fused loss. Pass labels. (The Trainer takes them out of the "
                "batch for label_smoothing_factor and compute_loss_func; LossConfig(label_smoothing=...) is the fused "
                "way.)",
                stacklevel=4,
            )


def attached_forward(model: nn.Module) -> FusedForward | None:
    """The `FusedForward` that `model` calls, None without."""
    forward = model.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)
    return forward if isinstance(forward, FusedForward) else None
