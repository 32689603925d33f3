"""The loss, computed where the hidden states meet the head."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ac_loss import LossConfig, explain, linear_cross_entropy, reference
from ac_recipes.errors import RunError, UsageError
from ac_recipes.recipe import Recipe
from ac_recipes.their_words import said

# NOTE [ The loss inside the head's forward ]
# The fused loss needs the hidden states and the head's weight. `HeadLoss` computes it as the forward of the head, for
# two reasons:
# 1. Under FSDP2 the weight is whole only inside the forward of the unit that owns it, and only there do gradients
#    reach the unit's reduce-scatter. Gathering it outside with `full_tensor()` gives a wrong gradient, silently.
# 2. The model's own forward is called as ever, so DDP's and FSDP2's hooks, and activation checkpointing, see one
#    ordinary forward. Without labels the head returns logits: generation and evaluation are untouched.


_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What transformers' configurations call the weight of an auxiliary loss."""


class HeadLoss:
    """Stands in for the forward of `head`, an `nn.Linear` over the vocabulary.

    Inside `with head_loss.labels(...)` a forward of the model returns the scalar loss in place of its logits.
    """

    def __init__(self, head: nn.Linear, config: LossConfig) -> None:
        self.head = head
        self.config = config
        self.auxiliary_coefficient = 0.0
        """What the model adds to its loss is this much of its `aux_loss`."""
        self.logits: Callable[[Tensor], Tensor] | None = None
        """The forward that gives whole logits, where the head's own does not (a head sharded over ranks)."""
        self._labels: tuple[Tensor, int] | None = None
        self._calls = 0

    @contextmanager
    def labels(self, labels: Tensor, num_label_tokens: int) -> Iterator[None]:
        """For one forward: `labels` int64 `[batch, sequence]`, aligned with the hidden states, not shifted;
        the loss is summed over them and divided by `num_label_tokens`."""
        self._labels, self._calls = (labels, num_label_tokens), 0
        try:
            yield
        finally:
            self._labels = None
        if self._calls != 1:
            raise RunError(f"the model called its head {self._calls} times in one forward; the loss needs exactly one")

    def total(self, output: Any, auxiliary_share: float = 1.0) -> Tensor:
        """The loss of a forward inside of `labels` whose output is `output`, and `auxiliary_share` of the loss that a
        model adds to balance its experts."""
        if not (self.auxiliary_coefficient and auxiliary_share):
            return output.logits
        return output.logits + self.auxiliary_coefficient * auxiliary_share * output.aux_loss

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self.logits(hidden) if self.logits else type(self.head).forward(self.head, hidden)
        self._calls += 1
        labels, num_label_tokens = self._labels
        shared: dict[str, Any] = {
            "bias": self.head.bias,
            "ignore_index": self.config.ignore_index,
            "reduction": "sum",
            "softcap": self.config.logit_softcapping or None,
            "label_smoothing": self.config.label_smoothing,
            "z_loss": self.config.z_loss,
            "logit_scale": self.config.logit_scale,
            "num_label_tokens": num_label_tokens,
        }
        if self.config.kind == "plain":
            shared["bias"] = _whole(self.head.bias)
            return reference.linear_cross_entropy(hidden, _whole(self.head.weight), labels, **shared)
        return linear_cross_entropy(
            hidden,
            self.head.weight,
            labels,
            backend=self.config.backend,
            accum=self.config.accum,
            grad_mode=self.config.grad_mode,
            **shared,
        )


def _whole(tensor: Tensor | None) -> Tensor | None:
    """A head's weight or bias that tensor parallelism has sharded, gathered; every rank computes the same with it."""
    if not isinstance(tensor, DTensor):
        return tensor
    replicated = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=replicated).to_local(grad_placements=replicated)


def check_backend(recipe: Recipe, device: torch.device) -> None:
    """Refuse a backend of the loss that cannot run on `device`, before there is a model.

    Raises:
        UsageError: with the reasons and the remedy.
    """
    weight = torch.empty(256, 64, dtype=getattr(torch, recipe.model.dtype), device="meta")
    _check_backend(recipe.loss_fn, weight, None, device)


def _check_backend(config: LossConfig, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
    """As `check_backend`, for a head with `weight` `[vocab, hidden]` and `bias` `[vocab]`, which may be on "meta"."""
    if config.kind == "plain":
        return
    try:
        explain(
            torch.empty_like(weight[:1], device="meta").requires_grad_(),
            torch.empty_like(weight, device="meta").requires_grad_(),
            bias=None if bias is None else torch.empty_like(bias, device="meta").requires_grad_(),
            ignore_index=config.ignore_index,
            reduction="sum",
            softcap=config.logit_softcapping or None,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            num_label_tokens=1,
            backend=config.backend,
            accum=config.accum,
            logit_scale=config.logit_scale,
            grad_mode=config.grad_mode,
            device=device,
        )
    except ValueError as error:
        raise UsageError(f"loss_fn.{_in_recipe_words(str(error))}") from error


def _in_recipe_words(refusal: str) -> str:
    """What ac-loss says of a call, on one line, and of the section `loss_fn`: its options are fields there."""
    text = refusal.replace(":\n  - ", ": ").replace("\n  - ", "; ").replace("\nor use", "; or set")
    text = text.replace("cannot compute this call", "cannot compute this loss")
    return re.sub(r"\b(?:pass )?(\w+)=('?\w+'?)", lambda found: f"loss_fn.{found[1]}: {found[2].strip(chr(39))}", text)


def attach_loss(model: nn.Module, config: LossConfig) -> HeadLoss:
    """Put a `HeadLoss` on the head of a Hugging Face causal language model.

    Raises:
        UsageError: the loss of this model is not the cross-entropy of its head's output, token by token. That is proven
            by running it on a few tokens and not looked up: what the head returns must be what the model returns, and
            may not depend on later tokens.
    """
    if config.accum == "main_grad":
        raise UsageError(
            "loss_fn.accum: 'main_grad' is for parameters whose owner keeps a main_grad beside them, which no strategy "
            "of a recipe does; use 'fp32' or 'param'"
        )
    name = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise UsageError(f"model.config: {name} has no plain nn.Linear over the vocabulary to compute the loss in")
    _check_backend(config, head.weight, head.bias, head.weight.device)
    returned: list[Tensor] = []
    handle = head.register_forward_hook(lambda _module, _inputs, output: returned.append(output))
    was_training = model.training
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=head.weight.device)  # they differ in the last token alone
    try:
        with torch.no_grad(), torch.random.fork_rng():
            output = model.eval()(input_ids=ids, use_cache=False)
    except Exception as error:
        raise UsageError(
            f"model.config: this {name} does not run: it was tried on two texts of four tokens, and {said(error)}; "
            "sizes among its fields do not fit one another; mend them, or leave them out for transformers' defaults"
        ) from error
    finally:
        handle.remove()
        model.train(was_training)
    if len(returned) != 1 or getattr(output, "logits", None) is not returned[0]:
        raise UsageError(
            f"model.config: {name} changes the output of its head (a softcap, a scale or a cast), so a loss computed "
            "in the head would differ from the model's own; this version cannot train it"
        )
    first, second = returned[0][:, :-1].float()
    if (first - second).abs().max() > 8 * torch.finfo(head.weight.dtype).eps * first.abs().max():
        raise UsageError(
            f"model.config: {name} sees the token that it is to predict (its attention is not causal); set "
            "model.config.is_decoder to true if it has that field, or choose a causal model"
        )
    loss = HeadLoss(head, config)
    if getattr(output, "aux_loss", None) is not None:
        loss.auxiliary_coefficient = _auxiliary_coefficient(model, ids)
    head.forward = loss  # type: ignore[assignment]
    return loss


@torch.no_grad()
def _auxiliary_coefficient(model: nn.Module, ids: Tensor) -> float:
    """How much of its `aux_loss` a model adds to its loss: what its configuration says, if the model's loss agrees."""
    config = model.config.get_text_config()
    coefficient = next((getattr(config, name) for name in _COEFFICIENTS if hasattr(config, name)), None)
    was_training = model.training
    output = model.eval()(input_ids=ids, labels=ids, use_cache=False)
    model.train(was_training)
    tokens = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    told = None if coefficient is None else tokens + coefficient * output.aux_loss
    if told is None or not torch.isclose(output.loss.float(), told, rtol=1e-2):
        raise UsageError(
            f"model.config: {type(model).__name__} has an auxiliary loss, and how it is added cannot be told from its "
            "configuration; set model.config.output_router_logits to false to train without it"
        )
    return float(coefficient)
