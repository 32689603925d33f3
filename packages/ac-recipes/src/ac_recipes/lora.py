"""Low-rank adapters: the section `peft` of a recipe, put on a model by the peft library (extra `peft`)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ac_recipes.errors import UsageError
from ac_recipes.section import Section, at_least

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class PeftConfig(Section):
    """Train low-rank adapters (LoRA) and leave the model's own weights as they are.

    dim: rank of the adapters. alpha: they are scaled by alpha / dim. dropout: on the adapters' inputs.
    target_modules: names of the linear layers that get one, or `all-linear`: all but the head.
    """

    name: Literal["lora"] = "lora"
    dim: int = 8
    alpha: int = 32
    dropout: float = 0.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "dim")
        at_least(1, self, "alpha")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout!r} is not in [0, 1)")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            raise ValueError(f"target_modules: {self.target_modules!r} is neither 'all-linear' nor a list of names")
        if not self.target_modules:
            raise ValueError("target_modules: the list of names is empty")


def add_lora(model: "PreTrainedModel", config: PeftConfig, seed: int) -> None:
    """Put adapters on `model`, in place; from then on they are its only trainable parameters.

    They have the dtype of the model's weights, which FSDP2 needs to shard them together, and are drawn from `seed`: the
    same on every rank.

    Raises:
        UsageError: peft is not installed, or finds none of the modules.
    """
    import torch

    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError("peft: needs the peft library; pip install 'ac-recipes[peft]'") from error
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    lora = LoraConfig(
        r=config.dim,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(lora, model)
    except (ValueError, ImportError) as error:
        raise UsageError(f"peft: {' '.join(str(error).split())[:300]}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
