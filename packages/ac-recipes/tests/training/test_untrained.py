"""What the data never reaches is refused, before anything is trained."""

import pytest
import torch
from torch import nn

from ac_core.discovery.parts import LANGUAGE, part_of
from ac_recipes.data.prepare import prepare_here
from ac_recipes.errors import UsageError
from ac_recipes.training.loss import attach_loss
from ac_recipes.training.model import build_model, trainable_model
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.untrained import check_all_get_gradients, check_towers

CPU = torch.device("cpu")
VLM = (
    "model.config={model_type: smolvlm, text_config: {model_type: llama, hidden_size: 32, intermediate_size: 48, "
    "num_hidden_layers: 1, num_attention_heads: 4}, vision_config: {hidden_size: 16, intermediate_size: 32, "
    "num_hidden_layers: 1, num_attention_heads: 2, image_size: 16, patch_size: 4}}"
)


def test_text_trains_no_tower(tiny):
    recipe = tiny(VLM)
    model = build_model(recipe.model, 300, 0, CPU)
    with pytest.raises(UsageError, match=r"dataset\.kind: 'text' shows no images, so the connector and vision of Smol"):
        check_towers(model, recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(model, name) != "vision")
    with pytest.raises(UsageError, match=r"so the connector of SmolVLM\w+ would get no gradient .*'digits', or train"):
        check_towers(model, recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(model, name) == LANGUAGE)
    check_towers(model, recipe)
    assert model.training


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp2", 2), ("ddp", 1)])
def test_ddp_needs_a_gradient_of_everything(tiny, strategy, ranks):
    recipe = tiny(f"distributed.strategy={strategy}")
    data = prepare_here(recipe)
    model, _ = trainable_model(recipe, data, CPU)
    arguments = (attach_loss(model, recipe.loss_fn), data, recipe, Ranks(0, ranks, CPU))
    check_all_get_gradients(model, *arguments)
    model.model.layers[0].spare = nn.Linear(2, 2, bias=False)
    if (strategy, ranks) != ("ddp", 2):
        check_all_get_gradients(model, *arguments)
        return
    with pytest.raises(UsageError, match=r"'ddp' waits .* gives 1 of \d+ none, among them model\.layers\.0\.spare\."):
        check_all_get_gradients(model, *arguments)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
