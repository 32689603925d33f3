"""What `use_fused_loss` found."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FusedLossReport:
    """What was found, and what runs when.

    Attributes:
        model: class of the model.
        heads: path of the head, or of each of them.
        head_class: class of the head.
        vocab_size, hidden_size: shape of its weight.
        bias: whether the head has a bias.
        tied: whether the weight is that of the input embeddings too.
        logit_scale, softcap: what the configuration says is applied to the logits. Information only: the loss follows
            what the forward does.
        backend, accum: of the loss.
    """

    model: str
    heads: tuple[str, ...]
    head_class: str
    vocab_size: int
    hidden_size: int
    bias: bool
    tied: bool
    logit_scale: float | None
    softcap: float | None
    backend: str
    accum: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        extras = [
            f"weight [{self.vocab_size}, {self.hidden_size}]",
            "with a bias" if self.bias else "no bias",
            *(["tied to the input embeddings"] if self.tied else []),
            *([f"logits scaled by {self.logit_scale:g}"] if self.logit_scale is not None else []),
            *([f"softcap {self.softcap:g}"] if self.softcap is not None else []),
        ]
        return (
            f"fused loss on {self.model}: head {', '.join(self.heads)} ({self.head_class}), {', '.join(extras)}\n"
            f"  training with labels    fused, backend {self.backend}, accum {self.accum}; outputs.logits is lazy\n"
            "  training without labels logits in full, with a warning\n"
            "  eval, no_grad, generate logits in full"
        )
