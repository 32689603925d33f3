import pytest
import torch

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (("atention",), "'atention' is no family and matches no module.*'attention'"),
        (("mlp.gatee",), "near matches: 'mlp.gate'"),
        (("no_such_lib::op",), "import the library that registers it"),
    ],
)
def test_a_name_that_fits_nothing_is_refused_before_anything_changes(decoder, save, message):
    model = decoder()
    with pytest.raises(ActivationCheckpointingError, match=f"^save: .*{message}"):
        ac_core.apply_activation_checkpointing(model, ActivationCheckpointingConfig(policy="selective", save=save))
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("save", "message"),
    [
        ((torch.ops.aten.mm,), "write 'aten::mm'"),
        (("aten.mm",), "write 'aten::mm'"),
        (("torch.ops.aten.mm",), "write 'aten::mm'"),
        (("aten::adddmm",), "near matches: 'aten::addmm'"),
        (("atem::mm",), "did you mean 'aten'"),
        ((), "keeps nothing; use policy 'full'"),
        ((torch.ops.aten.mm.default,), "write 'aten::mm'"),
        (3, "is not a list of names"),
        (("",), "is not a family"),
    ],
)
def test_a_bad_name_is_refused_when_the_config_is_read(save, message):
    with pytest.raises(ValueError, match=f"^save: .*{message}"):
        ActivationCheckpointingConfig(policy="selective", save=save)


def test_save_without_selective_is_refused():
    with pytest.raises(ValueError, match=r"^save: .*policy 'selective'"):
        ActivationCheckpointingConfig(policy="full", save=("attention",))


def test_scopes_have_a_budget_each_and_frozen_parts_none(decoder, plan_of, train_step):
    model = decoder()
    report = ac_core.apply_activation_checkpointing(model, "selective")
    assert {group.applied for group in report.groups} == {"selective"}
    assert plan_of(model, 0).decision is not None
