"""``accum="main_grad"``: the weight's gradient goes into the buffer that the owner of the weight keeps for it.

Megatron-core's ``DistributedDataParallel`` gives every parameter a ``main_grad``, a view into the fp32 buffers that it
reduces over the ranks, and frameworks alike do the same. A gradient that is added there needs no tensor of its own in
the parameter's dtype, and loses no digits to it over microbatches.
"""

import torch


def main_grad_of(weight: torch.Tensor) -> torch.Tensor:
    """``weight.main_grad``, known to be able to take the gradient of ``weight``.

    Raises:
        ValueError: it cannot, or ``weight`` is not a leaf; says why, and what to do.
    """
    if not weight.is_leaf:
        raise ValueError(
            "accum: 'main_grad' adds to the main_grad of a parameter, and this weight is the result of an operation "
            f"({type(weight.grad_fn).__name__}), so what it was made from would get no gradient; pass the parameter "
            "itself, or use accum='fp32'"
        )
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError(
            "accum: 'main_grad' is not for parameters of Megatron-FSDP, which allocates main_grad anew in each "
            "backward; use accum='fp32'"
        )
    buffer = getattr(weight, "main_grad", None)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    remedy = f"it must be a {dtype} tensor {list(weight.shape)} on {weight.device}, kept by the weight's owner"
    if not isinstance(buffer, torch.Tensor):
        found = "absent" if buffer is None else type(buffer).__name__
        raise ValueError(
            f"accum: 'main_grad' needs weight.main_grad, which is {found}; "
            f"{remedy} (Megatron-core's DistributedDataParallel sets it); without one use accum='fp32'"
        )
    if buffer.shape != weight.shape or buffer.dtype != dtype or buffer.device != weight.device:
        raise ValueError(
            f"accum: 'main_grad' found weight.main_grad as {buffer.dtype} {list(buffer.shape)} on {buffer.device}; "
            f"{remedy} (in Megatron-core: grad_reduce_in_fp32=True)"
        )
    return buffer


def mark_added(weight: torch.Tensor) -> None:
    """Tell the owner's hooks, where they ask, that the gradient is in ``main_grad`` already."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
