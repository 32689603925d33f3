"""transformers' models, split, checkpointed and wrapped as a `DistributedSetup` says.

setup = ac_recipes.DistributedSetup.build(strategy="fsdp2", activation_checkpointing="selective")
model = ac_recipes.AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", distributed_setup=setup)
print(model.ac_report)
"""

from typing import Any, ClassVar

import torch
import transformers
from torch import nn

from ac_recipes.parallel.setup import DistributedSetup
from ac_recipes.training.ranks import ranks_here


class _AutoModel:
    _auto: ClassVar[Any]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        *args: Any,
        distributed_setup: DistributedSetup | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        """As transformers' class of this name, then in training mode, on this rank's device, and set up.

        Under torchrun every rank calls it; the process group is made if there is none. All ranks load the same weights.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the hub.
            distributed_setup: what to do with the model. None: nothing, as transformers gives it.
            kwargs: of transformers' `from_pretrained`. The weights' dtype is float32 unless `dtype` says otherwise.

        Returns:
            The model of transformers; inside `DistributedDataParallel` with `strategy="ddp"` on several ranks. Its
            `ac_report` is the report of activation checkpointing, asked and applied.

        Raises:
            UsageError: the model or this machine cannot be what was asked for.
        """
        kwargs.setdefault("dtype", torch.float32)
        return _set_up(cls._auto.from_pretrained(pretrained_model_name_or_path, *args, **kwargs), distributed_setup)

    @classmethod
    def from_config(
        cls, config: transformers.PreTrainedConfig, *, distributed_setup: DistributedSetup | None = None, **kwargs: Any
    ) -> nn.Module:
        """As `from_pretrained`, with new weights. Seed every rank alike before: all ranks must draw the same ones."""
        return _set_up(cls._auto.from_config(config, **kwargs), distributed_setup)


class AutoModelForCausalLM(_AutoModel):
    """Language models."""

    _auto = transformers.AutoModelForCausalLM


class AutoModelForImageTextToText(_AutoModel):
    """Models that read images and text and write text."""

    _auto = transformers.AutoModelForImageTextToText


def _set_up(model: nn.Module, setup: DistributedSetup | None) -> nn.Module:
    if setup is None:
        return model
    ranks = ranks_here()
    parallel = setup.apply(model.to(ranks.device).train(), ranks)
    parallel.model.ac_report = parallel.report  # type: ignore[assignment]
    return parallel.model
