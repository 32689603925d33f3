"""The policy `budget`: each block by what a plan says of it."""

import pytest
import torch
from torch import nn

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError

MIX = {"layers.0": "none", "layers.1": "full", "layers.2": ["attention", "mlp.gate"], "layers.3": "full"}
BACKEND = "aot_eager"


def planned(plan, **options):
    return ActivationCheckpointingConfig(policy="budget", plan=plan, **options)


def test_every_block_is_checkpointed_as_its_plan_says(decoder, matmuls, train_step):
    model = decoder()
    assert len(model.layers) == 4
    report = ac_core.apply_activation_checkpointing(model, planned(MIX))
    assert [(group.label, group.asked, group.applied) for group in report.groups] == [
        ("layers.0", "none", "none"),
        ("layers.1", "full", "full"),
        ("layers.2", "keep attention, mlp.gate", "keep attention, mlp.gate"),
        ("layers.3", "full", "full"),
    ]
    assert "asked budget (scope all) -> applied to 3 of 4 blocks" in str(report)
    for _ in range(2):
        train_step(model)
    plain = len(matmuls(lambda: train_step(decoder())))
    # Of seven products and an attention, `full` runs all again but the last, the third block not two of those.
    assert len(matmuls(lambda: train_step(model))) - plain == 7 + 5 + 7
    ac_core.remove_activation_checkpointing(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "plan",
    [
        MIX,
        dict.fromkeys(MIX, "none"),
        dict.fromkeys(MIX, "full"),
        dict.fromkeys(MIX, ("*.attention", "mlp.gate", "mlp.up")),
        dict.fromkeys(MIX, ("attention", *(f"attention.{name}" for name in "qkvo"))),
        {"layers.0": ["matmul"], "layers.1": ["aten::mm"], "layers.2": ["attention"], "layers.3": "none"},
    ],
)
def test_the_numbers_are_those_without_checkpointing(decoder, plan):
    ids = torch.arange(24).reshape(2, 12)
    assert ac_core.verify(decoder(), ids, planned(plan)).equal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.4": "full"}, r"^plan: 'layers\.4' is no block of this model in scope and layers; near: 'layers\.\d'"),
        ({"layers.2": ["mlp.gat"]}, r"^plan: 'mlp\.gat' is no family and matches no module in block 'layers\.2'"),
        ({"layers.2": ["aten::nothing_of_that_name"]}, r"^plan: for 'layers.2': .*no op 'aten::nothing"),
        ({"layers.2": []}, r"^plan: for 'layers\.2': an empty list"),
        ({"layers.2": "ful"}, r"^plan: 'ful' for 'layers\.2' is not 'none', 'full'"),
        ({"layers.2": None}, r"^plan: for 'layers\.2': nothing is said"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(decoder, change, message):
    model = decoder()
    with pytest.raises((ActivationCheckpointingError, ValueError), match=message):
        ac_core.apply_activation_checkpointing(model, planned({**MIX, **change}))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_plan_that_leaves_a_block_open_is_refused(decoder):
    with pytest.raises(ActivationCheckpointingError, match=r"^plan: it has nothing for block 'layers\.1', and nothing"):
        ac_core.apply_activation_checkpointing(decoder(), planned({"layers.0": "full"}))


def test_blocks_outside_of_layers_are_not_planned(decoder):
    report = ac_core.apply_activation_checkpointing(decoder(), planned({"layers.0": "full"}, layers="0"))
    assert [(group.label, group.applied, group.reason) for group in report.groups] == [
        ("layers.0", "full", ""),
        ("layers.1-3", "none", "not among the layers"),
    ]


def test_a_plan_for_the_bare_model_fits_a_wrapped_one(decoder):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    report = ac_core.apply_activation_checkpointing(Wrapper(decoder()), planned(MIX))
    assert report.applied_blocks == ("module.layers.1", "module.layers.2", "module.layers.3")


def test_a_plan_without_any_checkpointing_is_applied_and_taken_off(decoder):
    model = decoder()
    config = planned(dict.fromkeys(MIX, "none"))
    assert ac_core.apply_activation_checkpointing(model, config).applied_blocks == ()
    with pytest.raises(ActivationCheckpointingError, match="already checkpoints"):
        ac_core.apply_activation_checkpointing(model, config)
    ac_core.remove_activation_checkpointing(model)
    ac_core.apply_activation_checkpointing(model, config)


def test_it_holds_under_torch_compile_where_no_module_is_named(decoder, train_step):
    torch._dynamo.reset()
    _, expected = train_step(decoder())
    model = decoder()
    ac_core.apply_activation_checkpointing(model, planned({**MIX, "layers.2": ["attention"]}))
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    for _ in range(2):
        _, gradients = train_step(model)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name])


def test_a_named_module_is_refused_under_torch_compile(decoder):
    torch._dynamo.reset()
    model = decoder()
    ac_core.apply_activation_checkpointing(model, planned(MIX))
    model.layers[2].compile(backend=BACKEND)
    with pytest.raises(Exception, match="names modules, which torch.compile does not see"):
        model(torch.zeros(1, 4, dtype=torch.long))
