"""Which backend would compute a call, why the others would not, and what it costs. Nothing is computed."""

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from ac_loss import backends
from ac_loss._functional import Reduction, check_float16, check_options
from ac_loss._validation import autocast_dtype, check_tensors, is_sharded, select_rows
from ac_loss.backends import Request
from ac_loss.backends.torch_backend import product_dtype
from ac_loss.config import Accum, Backend, GradMode, check_flag

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GIB = 2**30

# fp32 logits, their copy for the softmax, its output and the gradient, forward and backward together, beside narrow
# logits: what cross-entropy on logits holds when these are converted to fp32, as losses of language models do.
PLAIN_BYTES_PER_LOGIT = 14


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What :func:`explain` found; ``str()`` is a table, ``to_dict()`` plain data.

    Attributes:
        backend: the one that would run.
        device: type of device it would run on.
        reasons: for each other backend, why not.
        extra_bytes: what it would hold at most, forward and backward, beyond inputs and returned gradients.
        plain_bytes: the same of cross-entropy on logits, 14 bytes for each.
        gradient_bytes: of the returned gradients.
        tokens: rows of hidden.
        counted: rows whose label is not ignored; all of them where labels were not given, or are on ``meta``.
        vocab: rows of weight.
        hidden_size: columns of weight.
        dtype: of the matrix products' operands.
        product_dtype: what these are multiplied in: another one where backend ``"torch"`` runs on a CPU that is slow in
            ``dtype``.
    """

    backend: str
    device: str
    reasons: dict[str, tuple[str, ...]]
    extra_bytes: int
    plain_bytes: int
    gradient_bytes: int
    tokens: int
    counted: int
    vocab: int
    hidden_size: int
    dtype: str
    product_dtype: str

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; bytes are integers."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            (f"{self.backend}, beyond inputs and gradients", self.extra_bytes),
            ("cross-entropy on logits, the same", self.plain_bytes),
            ("the gradients themselves", self.gradient_bytes),
        ]
        width = max(len(name) for name, _ in rows)
        wide = "" if self.product_dtype == self.dtype else f" multiplied in {self.product_dtype}, faster on this CPU"
        lines = [
            f"linear_cross_entropy on {self.device}: backend {self.backend!r}",
            f"{self.tokens} tokens ({self.counted} count), vocabulary {self.vocab}, hidden size {self.hidden_size}, "
            f"{self.dtype}{wide}",
            *(f"  {name:<{width}}  {_gib(size):>10}" for name, size in rows),
            "not used:",
        ]
        column = max(map(len, self.reasons))
        for name, reasons in self.reasons.items():
            told = [part for reason in reasons for part in textwrap.wrap(f"- {reason}", 96, subsequent_indent="  ")]
            lines += [f"  {'' if i else name:<{column}}  {part}" for i, part in enumerate(told)]
        return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: int) -> str:
    value = size / GIB
    return f"{value:.0f} GiB" if value >= 100 else f"{value:.3g} GiB"


def explain(  # noqa: PLR0917 - as the function that it explains
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_label_tokens: int | torch.Tensor | None = None,
    backend: Backend = "auto",
    accum: Accum = "fp32",
    *,
    logit_scale: float = 1.0,
    grad_mode: GradMode = "auto",
    strict_nan: bool = False,
    vocab_parallel_group: "ProcessGroup | None" = None,
    device: torch.device | str | None = None,
) -> Explanation:
    """What :func:`ac_loss.linear_cross_entropy` would do with the same arguments.

    The gradients counted are those of the tensors that require one, under the present grad mode and autocast. Tensors
    may be on the ``meta`` device: nothing but their shapes and dtypes is looked at, but for the labels.

    Args:
        hidden: ``[..., hidden_size]``.
        weight: ``[vocab, hidden_size]``.
        labels: ``[...]``; None, or on ``meta``, to take every token for one that counts.
        bias: as in the call; likewise ``ignore_index`` to ``strict_nan``.
        vocab_parallel_group: as in the call; ``weight`` and ``bias`` are then the rows that one rank has.
        device: where the call would be made; None for where ``hidden`` is, and for tensors on ``meta`` the accelerator
            of this machine, or its CPU.

    Raises:
        IndexError: a label is neither in range nor ``ignore_index``.
        TypeError: a tensor argument is not a tensor.
        ValueError: what the call would raise: an option, shape or dtype is wrong, or the backend that is asked for by
            name cannot compute it.
    """
    objective = check_options(
        backend=backend,
        accum=accum,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        grad_mode=grad_mode,
        num_label_tokens=num_label_tokens,
    )
    check_flag("strict_nan", strict_nan)
    _refuse_sharded(hidden=hidden, weight=weight, labels=labels, bias=bias)
    place = _place(hidden, device)
    autocast = autocast_dtype(hidden, place.type)
    check_tensors(hidden, weight, labels, bias, autocast)
    gemm_dtype = autocast or hidden.dtype
    check_float16(grad_mode, gemm_dtype, hidden, weight, bias)
    tokens = hidden.shape[:-1].numel()
    counted = tokens
    shard = vocab_parallel_group is not None
    if labels is not None and not labels.is_meta:
        counted = int((labels != ignore_index).sum())
        if not shard:
            select_rows(labels, ignore_index, weight.shape[0], None)
    enabled = torch.is_grad_enabled()
    request = Request(
        tokens=tokens,
        counted=counted,
        hidden_size=weight.shape[1],
        vocab=weight.shape[0],
        shard=shard,
        hidden_dtype=hidden.dtype,
        weight_dtype=weight.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        gemm_dtype=gemm_dtype,
        device=place,
        reduction="none" if reduction == "none" else "sum",
        objective=objective,
        accum=accum,
        grad_mode=grad_mode,
        grad_hidden=enabled and hidden.requires_grad,
        grad_weight=enabled and weight.requires_grad,
        grad_bias=enabled and bias is not None and bias.requires_grad,
    )
    chosen = backends.choose(request, backend)
    returned = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad and enabled]
    return Explanation(
        backend=chosen,
        device=place.type,
        reasons={name: _reasons(request, name, backend, chosen) for name in backends.NAMES if name != chosen},
        extra_bytes=backends.load(chosen).extra_bytes(request),
        plain_bytes=PLAIN_BYTES_PER_LOGIT * tokens * request.vocab,
        gradient_bytes=sum(t.numel() * t.element_size() for t in returned),
        tokens=tokens,
        counted=counted,
        vocab=request.vocab,
        hidden_size=request.hidden_size,
        dtype=_name(request.gemm_dtype),
        product_dtype=_name(product_dtype(gemm_dtype, place.type, counted) if chosen == "torch" else gemm_dtype),
    )


def _refuse_sharded(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise ValueError(
                f"{name}: is a DTensor (placements {tensor.placements}); pass a tensor on 'meta' in the shape that a "
                "rank computes with: whole where the weight is gathered, its own rows in a vocab_parallel_group"
            )


def _place(hidden: torch.Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device: {device!r} is no device of torch; give one such as 'cpu' or 'cuda'") from error
    if isinstance(hidden, torch.Tensor) and not hidden.is_meta:
        return hidden.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _reasons(request: Request, name: str, asked: str, chosen: str) -> tuple[str, ...]:
    found = backends.objections(name, request)
    if (opt_in := backends.load(name).OPT_IN) is not None:
        found = [*found, f"only if asked for by name: {opt_in}"]
    if not found:
        found = [f"{chosen!r} is preferred where it can run" if asked == "auto" else f"{asked!r} was asked for"]
    return tuple(found)
