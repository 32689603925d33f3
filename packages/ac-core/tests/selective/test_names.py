"""A name in `save` or in a plan that fits nothing, everywhere or in some blocks, is told or refused."""

import warnings

import pytest
import torch

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError


@pytest.fixture
def mixed(decoder):
    """Four layers, of which the last two have experts and a router."""
    model = decoder()
    for index in (2, 3):
        model.layers[index] = decoder(moe=True).layers[index]
    return model


def trained(model, train_step, steps=2):
    for _ in range(steps):
        train_step(model)


@pytest.mark.parametrize("name", ["attention", "aten::convolution", "router"])
def test_a_name_that_no_call_matches_is_an_error(decoder, selective, train_step, name):
    model = selective(decoder(fused=False), (name, "matmul"))
    train_step(model)
    for _ in range(2):  # trying again does not get past it
        with pytest.raises(ActivationCheckpointingError, match=f"^save: '{name}' matches no call of layers.0-3"):
            train_step(model)


def test_unless_it_is_not_to_be_strict(decoder, selective, train_step):
    model = selective(decoder(), ("router", "matmul"), strict=False)
    with pytest.warns(UserWarning, match="save: 'router' matches no call of layers.0-3 that could be kept"):
        trained(model, train_step)


def test_collectives_are_up_to_the_ranks(decoder, selective, train_step):
    model = selective(decoder(), ("collective", "matmul"))
    with pytest.warns(UserWarning, match="save: 'collective' matches no call"):
        trained(model, train_step)


def test_blocks_that_lack_what_others_have_are_named(mixed, selective, train_step):
    with pytest.warns(UserWarning, match=r"^save: 'router' matches no call of layers\.0-1 that could be kept$"):
        trained(selective(mixed, ("router", "attention")), train_step)


def test_what_a_plan_says_of_a_block_has_to_be_in_that_block(mixed, train_step):
    plan = {"layers.0": "full", "layers.1": ["attention", "router"], "layers.2": ["router"], "layers.3": "none"}
    ac_core.apply_activation_checkpointing(mixed, ActivationCheckpointingConfig(policy="budget", plan=plan))
    with pytest.raises(ActivationCheckpointingError, match=r"^plan: 'router' matches no call of layers\.1 that"):
        trained(mixed, train_step)


def test_nothing_is_said_of_what_is_there_or_of_the_rule_without_names(mixed, selective, train_step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(selective(mixed, ("attention", "aten::mm", "mlp")), train_step)
        ac_core.remove_activation_checkpointing(mixed)
        trained(selective(mixed), train_step)


def test_the_report_names_blocks_without_such_a_module(mixed):
    config = ActivationCheckpointingConfig(policy="selective", save=("mlp.router", "attention.q"))
    report = ac_core.apply_activation_checkpointing(mixed, config)
    assert report.notes == (
        "save: 'mlp.router' matches no module in 2 of 4 blocks, which keep nothing for it: layers.0-1",
    )


def test_around_a_cache_attention_counts_as_kept(train_step):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32)).train()
    config = ActivationCheckpointingConfig(policy="selective", save=("attention", "matmul"), keep_cache=True)
    report = ac_core.apply_activation_checkpointing(model, config)
    assert {group.applied for group in report.groups} == {"sub-modules"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            ids = torch.arange(12).reshape(2, 6)
            model(ids, labels=ids).loss.backward()
