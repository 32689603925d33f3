"""The loss as a method of the head, where FSDP2 has the weight whole."""

from typing import Any

import torch
from torch import nn

from ac_loss._functional import linear_cross_entropy


def add_loss_method(head: nn.Linear, name: str = "loss", **options: Any) -> None:
    """Give a head ``head.loss(hidden, labels)``, which FSDP2 treats as a forward of the head.

    When ``head`` is an FSDP2 unit, its weight is gathered for the method, freed after it, and gathered again where the
    backward needs it; its gradient is reduced with the unit's other gradients, under the unit's mixed precision and
    gradient divisor. Call this after ``fully_shard(head)``. For any other head the method passes the weight to
    :func:`ac_loss.linear_cross_entropy` as it is.

    Args:
        head: an ``nn.Linear`` over the vocabulary.
        name: of the method.
        options: of :func:`ac_loss.linear_cross_entropy`, fixed for all calls; a call may give more.

    The method raises ``ValueError`` where the unit would round the loss (``mp_policy.output_dtype``).

    Raises:
        TypeError: ``head`` is not an ``nn.Linear`` with the forward of one (adapters add to it, and the method would
            pass them by).
        ValueError: ``head`` has an attribute of that name.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise TypeError(
            f"head: {type(head).__name__} is not a plain nn.Linear, and the loss would not be that of its output; "
            "merge an adapter first, or write the method yourself and register it with "
            "torch.distributed.fsdp.register_fsdp_forward_method"
        )
    if hasattr(head, name):
        raise ValueError(f"name: {type(head).__name__} has an attribute {name!r}; choose another name")

    in_unit = f"_{name}_in_unit"

    def compute(self: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor, **given: Any) -> torch.Tensor:
        return linear_cross_entropy(hidden, self.weight, labels, self.bias, **given)

    def loss(self: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        given = options | more
        number = given.get("num_label_tokens")
        if isinstance(number, torch.Tensor) and number.is_floating_point() and not number.dim():
            # The unit casts every floating-point tensor it is given, and 100001 in bfloat16 is 99840.
            given["num_label_tokens"] = number.item()
        value = getattr(self, in_unit)(hidden, labels, **given)
        if value.dtype.itemsize < 4:
            raise ValueError(
                f"{name}: the FSDP2 unit of the head rounds the loss to {value.dtype}, which would cost it its "
                "accuracy; give that unit an mp_policy without output_dtype"
            )
        return value

    setattr(head, in_unit, compute.__get__(head))
    setattr(head, name, loss.__get__(head))
    if torch.distributed.is_available():
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(head, in_unit)
