"""What every autograd function of this backend begins with, and how a backward takes what its forward saved."""

import contextlib
import sys

import torch


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Dtypes are chosen here; autocast must not choose again, in a backward run under it either."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def refuse_double_backward() -> None:
    # Gradients are enabled inside a backward only under create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "ac_loss: a backward with create_graph=True needs second derivatives, and what is computed without logits "
            "has none; use the function of the same name in ac_loss.reference, which holds [tokens, vocab] logits"
        )


# NOTE [ Saved gradients are scaled in place only when nobody else can see them ]
# Gradients finished in the forward are returned times the upstream gradient. A copy would need [vocab, hidden_size]
# a second time when memory is at its fullest, at the start of the backward; scaling in place would spoil the next
# backward over a graph that is kept. Two questions decide, and where either cannot be asked the answer is a copy:
# 1. Is the graph freed with this backward? `maybe_clear_saved_tensors` drops the saved tensors if so, as autograd
#    itself does a moment later; what is dropped cannot be read again. Whether it was is asked of the packed tensors:
#    unpacking once more runs the hooks once more, and some (offloading, checkpoints) have given theirs away.
# 2. Does anybody else hold them? Saved-tensor hooks may have kept what they were given, as the same tensor (its Python
#    references tell), as another on the same storage (the storage's count tells), or as that storage (its Python
#    references tell: one object stands for it however many hold it).


def take_saved(ctx: torch.autograd.function.FunctionCtx) -> tuple[list[torch.Tensor | None], bool]:
    """The saved tensors of a backward, and whether they may be changed: nobody will ever see them again."""
    saved = list(ctx.saved_tensors)
    # Private: nothing public says whether the graph is kept. torch's own compiled backward relies on the first.
    if not hasattr(ctx, "maybe_clear_saved_tensors") or not hasattr(type(ctx), "_raw_saved_tensors"):
        return saved, False
    ctx.maybe_clear_saved_tensors()
    with contextlib.suppress(RuntimeError):
        ctx._raw_saved_tensors  # noqa: B018 - raises once they are gone
        return saved, False
    return saved, _unshared(saved)


def _unshared(tensors: list[torch.Tensor | None]) -> bool:
    # Private: nothing public counts the tensors on a storage.
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return False

    def holders(owners: list[torch.Tensor | None], index: int) -> tuple[int, int, int]:
        storage = owners[index].untyped_storage()
        return sys.getrefcount(owners[index]), count(storage._cdata), sys.getrefcount(storage)

    nobody_else = holders([torch.empty(0)], 0)
    return all(tensors[i] is None or holders(tensors, i) == nobody_else for i in range(len(tensors)))
