"""Settings of the loss, and the checks they share with the functions that take the same options. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

Kind = Literal["fused", "plain"]
Backend = Literal["auto", "torch", "triton", "liger", "cce", "native"]
Accum = Literal["fp32", "param", "main_grad"]
GradReduce = Literal["avg", "sum"]
GradMode = Literal["auto", "forward", "recompute"]


def check_choice(name: str, value: object, valid: Sequence[str]) -> None:
    """Raise ``ValueError`` naming the field, the value and the valid values, unless ``value`` is one of them."""
    if not isinstance(value, str) or value not in valid:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, valid))}")


def check_number(name: str, value: object, *, most: float = math.inf, above_zero: bool = False) -> None:
    """Raise ``ValueError`` naming the field, the value and the range, unless ``value`` is a finite number in it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value > most or value < 0 or (above_zero and value == 0):
        upper = "" if most == math.inf else f" and at most {most:g}"
        if isinstance(value, Real) and not isinstance(value, (int, float)):  # numpy's
            raise ValueError(f"{name}: {value!r} is not a number of Python; pass float({name})")
        raise ValueError(f"{name}: {value!r} is not a number {'above' if above_zero else 'of at least'} 0{upper}")


def check_integer(name: str, value: object) -> None:
    """Raise ``ValueError`` naming the field and the value, unless ``value`` is an integer of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        kind = f" of Python; pass int({name})" if isinstance(value, Integral) and not isinstance(value, bool) else ""
        raise ValueError(f"{name}: {value!r} is not an integer{kind}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: {value!r} does not fit into the 64 bits of a label")


def check_flag(name: str, value: object) -> None:
    """Raise ``ValueError`` naming the field and the value, unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is neither True nor False")


def check_grad_mode(grad_mode: object, reduction: str) -> None:
    """Raise ``ValueError`` unless ``grad_mode`` is one, and one that ``reduction`` can have."""
    check_choice("grad_mode", grad_mode, get_args(GradMode))
    if grad_mode == "forward" and reduction == "none":
        raise ValueError(
            "grad_mode: 'forward' finishes the gradients before the backward, and with reduction 'none' each token's "
            "upstream gradient must enter before the sum over tokens; use 'auto' or 'recompute', or reduction 'sum'"
        )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Settings of a language-model loss.

    Attributes:
        kind: ``"fused"`` computes the loss from hidden states and the head's weight; ``"plain"`` from the logits.
        backend: implementation of the fused loss. ``"auto"`` is ``"triton"`` on NVIDIA GPUs where that can compute the
            call, else ``"torch"``; one that is named and cannot is an error.
        accum: where the weight gradient is summed over chunks of tokens: ``"fp32"``; ``"param"``, in the parameter's
            own dtype (less memory; in bf16 the error grows with the number of chunks); ``"main_grad"``, added to the
            fp32 ``main_grad`` that the weight's owner keeps (Megatron-core's DistributedDataParallel).
        grad_mode: ``"forward"`` computes the gradients with the loss and keeps them; ``"recompute"`` computes the
            logits again in the backward and keeps nothing but the inputs; ``"auto"`` is ``"forward"`` where possible.
        ignore_index: label of the tokens that do not count.
        logit_softcapping: ``c`` of ``c * tanh(logits / c)``; 0 for none.
        label_smoothing: share of the target taken from the label and spread evenly over the vocabulary, 0 to 1.
        z_loss: coefficient of ``logsumexp(logits) ** 2``; 0 for none.
        logit_scale: positive number that multiplies the logits, before the softcap.

    Raises:
        ValueError: a value is not valid; the message begins with the name of the field.
    """

    kind: Kind = "fused"
    backend: Backend = "auto"
    accum: Accum = "fp32"
    grad_mode: GradMode = "auto"
    ignore_index: int = -100
    logit_softcapping: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("backend", self.backend, get_args(Backend))
        check_choice("accum", self.accum, get_args(Accum))
        check_choice("grad_mode", self.grad_mode, get_args(GradMode))
        check_integer("ignore_index", self.ignore_index)
        check_number("logit_softcapping", self.logit_softcapping)
        check_number("label_smoothing", self.label_smoothing, most=1.0)
        check_number("z_loss", self.z_loss)
        check_number("logit_scale", self.logit_scale, above_zero=True)
