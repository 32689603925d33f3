"""Low-rank adapters: the section `peft` of a recipe, put on a model by the peft library (extra `peft`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ac_recipes.errors import UsageError
from ac_recipes.extras import install_extra
from ac_recipes.section import Section, at_least

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedModel

    from ac_recipes.training.ranks import Ranks


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

    lora = _lora_config(config)
    from peft import inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(lora, model)
    except (ValueError, ImportError) as error:
        raise UsageError(f"peft: {' '.join(str(error).split())[:300]}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)


def save_adapter(model: "nn.Module", config: PeftConfig, base: str | None, folder: Path, ranks: "Ranks") -> None:
    """Write the adapters alone to `folder`, as `peft.PeftModel.from_pretrained` reads them. Every rank calls it.

    Args:
        model: as `add_lora` has left it, wrapped or not.
        base: where the model came from, for the adapters' own record.
    """
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if ranks.is_first:
        # In a PeftModel the model stands below `base_model.model`, and its files leave the adapter's name out.
        tensors = {
            f"base_model.model.{name.replace('.default.', '.')}": tensor.contiguous()
            for name, tensor in state.items()
            if "lora_" in name
        }
        folder.mkdir(exist_ok=True)
        lora = _lora_config(config)
        lora.base_model_name_or_path = base
        lora.save_pretrained(folder)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    ranks.wait()


def _lora_config(config: PeftConfig) -> "LoraConfig":
    """The settings as peft has them.

    Raises:
        UsageError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UsageError(f"peft: LoRA needs the peft library; {install_extra('peft')}") from error
    return LoraConfig(
        r=config.dim,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules),
        task_type="CAUSAL_LM",
    )
