"""The loss of a step: the model's own, cross-entropy on its logits, or a fused one that never has them all.

NOTE [ Memory of the fused loss ]
What is modelled is a loss that goes through the `N` tokens in chunks, as ac-loss's `torch` backend does, and makes the
gradients of hidden states `[N, H]` and weight `[V, H]` in the forward, when a chunk's logits are there:

    product    = the dtype of matrix products: that of the weight, but fp32 for bfloat16 on a CPU that is slow in it
    rows       = tokens of a chunk: at most 256 (512 for 2-byte products), at most what 128 MiB of logits hold but never
                 below 128, and evenly spread over the chunks; but all of at most 512 in one where that takes less
                 than the sum below
    forward    = rows x V logits, in the dtype of the products
               + if that is not fp32: an fp32 block of at most 64 MiB of them (16 MiB on a CPU)
               + if that is not the weight's: rows x H hidden states and 4 MiB of the weight in it
               + gradient of hidden, N x H; of a chunk of it, rows x H
               + gradient of the weight, V x H, summed over chunks in fp32, where there are several, and then converted
                 to the dtype of the weight while both exist
               + if a product is not in the dtype of that sum: a slab of it of at most 64 MiB (4 MiB on a CPU, which
                 converts it to fp32 before it adds it)
    kept       = gradients of hidden and weight, in their dtypes
    backward   = nothing more: they are multiplied by the gradient of the loss in place

For "cpu" the CPU that is asked is the one that estimates.
"""

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ac_core.errors import ActivationCheckpointingError

MIB = 2**20
_ROWS = {True: 512, False: 256}  # by whether the dtype is narrow
_FLOOR = 128
_LOGITS = 128 * MIB
_ROWS_ALONE = 512
_WIDE_TOKENS = 64
_BLOCK = {"cpu": 16 * MIB, "cuda": 64 * MIB}
_SLAB = {"cpu": 4 * MIB, "cuda": 64 * MIB}


def product_dtype(dtype: torch.dtype, device: str, tokens: int) -> torch.dtype:
    """In which dtype a weight of `dtype` is multiplied with so many tokens."""
    wide = dtype == torch.bfloat16 and device == "cpu" and tokens >= _WIDE_TOKENS and cpu_is_slow_in_bfloat16()
    return torch.float32 if wide else dtype


@functools.cache
def cpu_is_slow_in_bfloat16() -> bool:
    """Whether ac-loss multiplies bfloat16 in fp32 on this CPU: x86 without AMX, and not AMD's with AVX512_BF16."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64" or has.get("amx_bf16"):
        return False
    return not has.get("avx512_bf16") or "intel" in str(has.get("cpu_name", "")).lower()


def chunk_rows(tokens: int, vocab: int, itemsize: int, *, sum_bytes: int) -> int:
    """Tokens of a chunk; see NOTE [ Memory of the fused loss ].

    Args:
        tokens: in all.
        vocab: rows of the weight.
        itemsize: bytes of a logit.
        sum_bytes: of the sum of the weight's gradient over several chunks, where it is not what is kept.
    """
    most = max(_FLOOR, min(_ROWS[itemsize < 4], _LOGITS // (vocab * itemsize)))
    rows = max(1, -(-tokens // max(1, -(-tokens // most))))
    alone = rows < tokens <= _ROWS_ALONE and (tokens - rows) * vocab * itemsize < sum_bytes
    return tokens if alone else rows


def block_rows(device: str, row_bytes: int) -> int:
    """Rows of fp32 logits at a time."""
    return max(1, _BLOCK[device] // max(1, row_bytes))


def slab_rows(device: str, row_bytes: int) -> int:
    """Rows of the weight's gradient that are added up in fp32 at a time."""
    return max(1, _SLAB[device] // max(1, row_bytes))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, device: str) -> Tensor:
        """hidden `[N, H]`, weight `[V, H]`, device: whose sizes to take -> the loss of each token, `[N]`."""
        of_hidden, of_weight, _ = ctx.needs_input_grad
        (tokens, width), (vocab, _) = hidden.shape, weight.shape
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = product_dtype(weight.dtype, device, tokens)
        sum_bytes = vocab * width * wide.itemsize if of_weight and weight.dtype != wide else 0
        rows = chunk_rows(tokens, vocab, product.itemsize, sum_bytes=sum_bytes)
        slab = min(vocab, slab_rows(device, width * product.itemsize))
        losses = hidden.new_empty(tokens, dtype=wide)
        sweep = [weight.new_empty(rows, vocab, dtype=product)]
        if product != wide:
            sweep.append(weight.new_empty(min(rows, block_rows(device, vocab * wide.itemsize)), vocab, dtype=wide))
        if product != weight.dtype:
            sweep += [weight.new_empty(n, width, dtype=product) for n in (rows, slab)]
        gradients = [torch.empty_like(hidden) if of_hidden else None, None]
        if of_hidden:
            sweep.append(hidden.new_empty(rows, width, dtype=product))
        total = None
        if of_weight:
            several = rows < tokens
            total = weight.new_empty(vocab, width, dtype=wide if several else weight.dtype)
            if total.dtype != product:
                sweep.append(weight.new_empty(slab, width, dtype=product))
                if several and device == "cpu":
                    sweep.append(weight.new_empty(slab, width, dtype=wide))
        sweep.clear()
        if total is not None:
            gradients[1] = total.to(weight.dtype)
        ctx.save_for_backward(*gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return *ctx.saved_tensors, None


def use_fused_loss(model: nn.Module, device: str) -> None:
    """Have the head of a model of fake tensors make the loss of each token, `[..., 1]`, in the place of logits.

    Raises:
        ActivationCheckpointingError: it is not known which module is the head.
    """
    head = find_head(model)
    head.forward = partial(_losses, head, device)  # type: ignore[assignment]


def _losses(head: nn.Module, device: str, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    losses = _FusedLoss.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight, device)
    return losses.reshape(*hidden.shape[:-1], 1).clone()  # of a view FSDP2 warns that it may be changed in place


_HEADS = ("lm_head", "head", "output", "embed_out")


def find_head(model: nn.Module) -> nn.Module:
    """The projection from hidden states to logits: `get_output_embeddings()`, else a module called as heads are.

    Raises:
        ActivationCheckpointingError: there is none.
    """
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None:
        named = [module for name, module in model.named_modules() if name.rpartition(".")[2] in _HEADS]
        head = next((m for m in named if isinstance(getattr(m, "weight", None), Tensor) and m.weight.dim() == 2), None)
    if head is None:
        raise ActivationCheckpointingError(
            f"loss: 'fused' needs the projection to logits, and {type(model).__name__} has neither "
            "get_output_embeddings() nor a linear 'lm_head'; give a loss of your own, a function of the model's output"
        )
    return head


def sum_of_logits(output: Any) -> Tensor:
    """What a fused head has made, added up."""
    return _logits(output).sum()


def cross_entropy(labels: Tensor, output: Any) -> Tensor:
    """The usual loss of a language model that has none of its own: cross-entropy in fp32 on logits `[..., V]`."""
    logits = _logits(output).float()
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    if isinstance(found := getattr(output, "logits", None), Tensor):
        return found
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ActivationCheckpointingError(
        f"loss: no logits in the model's output ({type(output).__name__}); give a loss of your own, a function of it"
    )


def own_loss(output: Any) -> Tensor:
    """The loss that a model has computed from the labels it was given."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor):
        raise ActivationCheckpointingError(
            f"loss: the model was given labels, and its output ({type(output).__name__}) has no loss; give a loss of "
            "your own, a function of it"
        )
    return loss
