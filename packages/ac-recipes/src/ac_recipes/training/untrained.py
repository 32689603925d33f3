"""Parameters that are to be trained and that the data gives no gradient."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from ac_core import DDPConfig
from ac_core.discovery.parts import LANGUAGE, part_of
from ac_recipes.data.prepare import Prepared
from ac_recipes.errors import UsageError
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.recipe import Recipe
from ac_recipes.training.ranks import Ranks

if TYPE_CHECKING:
    from ac_recipes.training.loss import HeadLoss


def check_towers(model: nn.Module, recipe: Recipe) -> None:
    """Refuse to train a tower by data that never reaches it, such as a vision tower by text.

    What text reaches is found out by running the model on a few tokens.

    Raises:
        UsageError: naming the parts and the remedy.
    """
    if isinstance(recipe.dataset, DigitsDatasetConfig):
        return
    towers = {
        name: part
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (part := part_of(model, name)) != LANGUAGE
    }
    if not towers:
        return
    reached = _reached_by_text(model)
    idle = {part for name, part in towers.items() if name not in reached}
    if idle:
        remedy = "leave it out of peft.target_modules" if recipe.peft is not None else "train a language model"
        raise UsageError(
            f"dataset.kind: {recipe.dataset.kind!r} shows no images, so the {' and '.join(sorted(idle))} of "
            f"{type(model).__name__} would get no gradient and never be trained; use dataset.kind 'digits', or {remedy}"
        )


def check_all_get_gradients(
    model: nn.Module, head_loss: "HeadLoss", data: Prepared, recipe: Recipe, ranks: Ranks
) -> None:
    """Refuse DDP, which waits for a gradient of every parameter, where an example of the data does not give one.

    Raises:
        UsageError: naming the first such parameter and the remedy.
    """
    if not isinstance(recipe.distributed, DDPConfig) or recipe.distributed.tp_size > 1 or ranks.world_size == 1:
        return
    batch = {name: tensor.to(ranks.device) for name, tensor in data.train[torch.tensor([0])].items()}
    labels = batch.pop("labels")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.eval()
    with head_loss.labels(labels, 1):
        loss = head_loss.total(model(**batch, use_cache=False))
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    model.train()
    idle = [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
    if idle:
        raise UsageError(
            "distributed.strategy: 'ddp' waits for a gradient of every trainable parameter in every step, and an "
            f"example of the data gives {len(idle)} of {len(trained)} none, among them {idle[0]}; use strategy "
            "'fsdp2', or do not train them (freeze_config)"
        )


@torch.no_grad()
def _reached_by_text(model: nn.Module) -> set[str]:
    """Names of the parameters of those modules that run when the model gets tokens alone; all where it cannot, as
    `attach_loss` then tells."""
    running: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: running.add(name))
        for name, module in model.named_modules()
    ]
    try:
        tokens = torch.tensor([[1, 2, 3, 4]], device=next(model.parameters()).device)
        model.eval()(input_ids=tokens, use_cache=False)
    except Exception:  # noqa: BLE001 - whatever a model has against tokens alone
        return {name for name, _ in model.named_parameters()}
    finally:
        model.train()
        for handle in handles:
            handle.remove()
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if name.rpartition(".")[0] in running}
