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


def freeze_first(model):
    """No gradient reaches the first two blocks."""
    for module in (model.embed, *model.layers[:2]):
        module.requires_grad_(False)


def use_all(model, *, last=True, behind=True):
    """last: the last block runs. behind: and what comes out of it is used, as of a tower's last block mostly is not."""

    def forward(ids):
        hidden = model.embed(ids)
        for layer in model.layers[:-1]:
            hidden = layer(hidden)
        out = model.layers[-1](hidden) if last else hidden
        return model.head(out if behind else hidden)

    model.forward = forward


UNLEARNT = {
    "no gradient reaches it": (freeze_first, r"layers\.2-3"),
    "never called": (lambda model: use_all(model, last=False), r"layers\.0-2"),
    "called for nothing": (lambda model: use_all(model, behind=False), r"layers\.0-2"),
}


@pytest.mark.parametrize("unlearnt", UNLEARNT)
@pytest.mark.parametrize("field", ["save", "plan"])
def test_blocks_that_show_no_calls_are_not_waited_for(decoder, train_step, field, unlearnt):
    prepare, where = UNLEARNT[unlearnt]
    model = decoder(fused=False)
    prepare(model)
    rule = {"save": ("attention",)} if field == "save" else {"plan": {f"layers.{i}": ["attention"] for i in range(4)}}
    policy = "selective" if field == "save" else "budget"
    ac_core.apply_activation_checkpointing(model, ActivationCheckpointingConfig(policy=policy, **rule))
    train_step(model)
    with pytest.raises(ActivationCheckpointingError, match=f"^{field}: 'attention' matches no call of {where} that"):
        train_step(model)


def test_blocks_that_show_their_calls_later_are_judged_then(mixed, decoder, selective, train_step):
    mixed.layers[3] = decoder().layers[3]
    use_all(mixed, last=False)
    selective(mixed, ("router", "attention"))
    with pytest.warns(UserWarning, match=r"^save: 'router' matches no call of layers\.0-1 that could be kept$"):
        trained(mixed, train_step, 3)
    use_all(mixed)
    with pytest.warns(UserWarning, match=r"^save: 'router' matches no call of layers\.3 that could be kept$") as told:
        trained(mixed, train_step, 3)
    assert len(told) == 1


def test_a_block_that_learns_anew_still_counts_as_one_that_has_it(mixed, decoder, selective, plan_of, train_step):
    mixed.layers[3] = decoder().layers[3]
    use_all(mixed, last=False)
    selective(mixed, ("router",))
    with pytest.warns(UserWarning, match=r"layers\.0-1 "):
        trained(mixed, train_step)
    use_all(mixed)
    train_step(mixed)
    plan_of(mixed, 2).met("mlp.experts.0.late")
    with pytest.warns(UserWarning, match=r"layers\.3 "):  # and not: nowhere, an error
        train_step(mixed)


def test_blocks_with_backwards_of_their_own_are_judged_when_the_first_begins_again(mixed, selective):
    selective(mixed, ("router",))
    x = torch.randn(2, 3, 16)
    for layer in mixed.layers:
        layer(x).sum().backward()
    with pytest.warns(UserWarning, match=r"layers\.0-1 "):
        mixed.layers[0](x)


def test_one_step_judges_and_strict_is_how_to_go_on(decoder, selective, plan_of, train_step):
    model = decoder(depth=2)
    use_all(model, last=False)
    model.layers[1] = decoder(depth=2, moe=True).layers[1]
    selective(model, ("router",))
    train_step(model)
    use_all(model)
    with pytest.raises(ActivationCheckpointingError, match=r"layers\.0 that .* turn 'strict' off, .* a later step"):
        train_step(model)
    ac_core.remove_activation_checkpointing(model)
    selective(model, ("router",), strict=False)
    use_all(model, last=False)
    with pytest.warns(UserWarning, match=r"layers\.0 that"):
        trained(model, train_step)
    use_all(model)
    trained(model, train_step)
    assert {site.kind.family for site in plan_of(model, 1).sites.values()} >= {"router"}
    assert any(what == "topk" for _, what, _ in plan_of(model, 1).decision.calls)


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


def test_a_block_in_pieces_is_judged_by_those_that_run():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32)).train()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].input_layernorm.requires_grad_(False)  # so that nothing in this piece needs a gradient
    plan = {"model.layers.0": ["router"], "model.layers.1": "full"}
    config = ActivationCheckpointingConfig(policy="budget", plan=plan, keep_cache=True)
    ac_core.apply_activation_checkpointing(model, config)
    ids = torch.arange(12).reshape(2, 6)
    model(ids, labels=ids).loss.backward()
    with pytest.raises(ActivationCheckpointingError, match=r"^plan: 'router' matches no call of model\.layers\.0 that"):
        model(ids, labels=ids)
