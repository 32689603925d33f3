"""Putting the fused loss on a model, and taking it off."""

from typing import Any

from torch import Tensor, nn

from ac_loss.config import LossConfig
from ac_loss.huggingface.errors import FusedLossError
from ac_loss.huggingface.forward import FusedForward, attached_forward
from ac_loss.huggingface.head import find_heads, vocab_size
from ac_loss.huggingface.report import FusedLossReport

_DECIDED_BY_THE_MODEL = ("ignore_index", "logit_softcapping")


def use_fused_loss(model: nn.Module, config: LossConfig | None = None) -> FusedLossReport:
    """Train a Hugging Face model without its logits. The model is changed in place; its loss stays its own.

    In a forward in training mode, with gradients on and with ``labels``, the head returns `LazyLogits`, which carry
    what the model does to them to its own cross-entropy; the rest of the model's loss (shift, ignored labels,
    ``num_items_in_batch``, auxiliary losses) is computed by the model's own code. Every other forward is as ever.
    Calling it again with an equal config changes nothing.

    Args:
        model: a ``*ForCausalLM`` or ``*ForConditionalGeneration`` (any module with ``get_output_embeddings()`` and
            ``labels`` in its forward), bare: before DDP or ``torch.compile`` wrap it. FSDP2's ``fully_shard`` and PEFT
            may come before or after.
        config: ``backend`` and ``accum``; ``label_smoothing`` and ``z_loss`` are added to the model's loss. The rest is
            decided by the model.

    Raises:
        FusedLossError: the model's head cannot be found, or its forward takes no labels.
        TypeError: the config is something else.
        ValueError: the config is of the plain loss, sets what the model decides, or differs from the one in use.
    """
    config = LossConfig() if config is None else config
    if not isinstance(config, LossConfig):
        raise TypeError(f"config: an ac_loss.LossConfig is needed, got {type(config).__name__}")
    if config.kind != "fused":
        raise ValueError(f"kind: {config.kind!r} is not 'fused'; for the plain loss leave the model as it is")
    for name in _DECIDED_BY_THE_MODEL:
        if getattr(config, name) != getattr(LossConfig(), name):
            raise ValueError(f"{name}: the model's own loss decides it, {getattr(config, name)!r} cannot; leave it out")
    attached = attached_forward(model)
    if attached is not None:
        if attached.config != config:
            raise ValueError(
                f"config: the model has the fused loss with {attached.config}; call remove_fused_loss first"
            )
        return _report(model, config)
    forward = FusedForward(model, config)
    report = _report(model, config)
    parameters = forward.__signature__.parameters.values()
    if not any(parameter.name == "labels" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise FusedLossError(
            f"{type(model).__name__}: its forward takes no labels and so computes no loss; call "
            "ac_loss.linear_cross_entropy with its hidden states and its head's weight"
        )
    model.forward = forward
    return report


def remove_fused_loss(model: nn.Module) -> None:
    """Undo `use_fused_loss`. Does nothing to a model that does not have the fused loss.

    Raises:
        FusedLossError: another tool has wrapped the forward since.
    """
    attached = attached_forward(model)
    if attached is not None:
        del model.forward
        if attached.replaced is not None:
            model.forward = attached.replaced
        return
    wrapped = model.__dict__.get("forward")
    while wrapped is not None:
        wrapped = getattr(wrapped, "__wrapped__", None) or getattr(wrapped, "__func__", None)
        if isinstance(wrapped, FusedForward):
            raise FusedLossError(
                f"{type(model).__name__}: its forward was wrapped by another tool after use_fused_loss; undo that "
                "first (with Accelerate: accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
            )


def _report(model: nn.Module, config: LossConfig) -> FusedLossReport:
    heads = find_heads(model)
    head = next(iter(heads.values()))
    vocab = vocab_size(head)
    if vocab is None:
        raise FusedLossError(
            f"{type(model).__name__}: its head {', '.join(heads)} ({type(head).__name__}) has no weight [vocab, "
            "hidden_size]"
        )
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    scale, softcap = _scale_and_softcap(getattr(model, "config", None))
    return FusedLossReport(
        model=type(model).__name__,
        heads=tuple(heads),
        head_class=type(head).__name__,
        vocab_size=vocab,
        hidden_size=head.weight.shape[1],
        bias=isinstance(getattr(head, "bias", None), Tensor),
        tied=any(embedding.weight is head.weight for embedding in embeddings),
        logit_scale=scale,
        softcap=softcap,
        backend=config.backend,
        accum=config.accum,
    )


def _scale_and_softcap(config: Any) -> tuple[float | None, float | None]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = getattr(text, "logit_scale", None)  # Cohere
    divisor = getattr(text, "logits_scaling", None)  # Granite
    if scale is None and divisor:
        scale = 1 / divisor
    return scale, getattr(text, "final_logit_softcapping", None)
