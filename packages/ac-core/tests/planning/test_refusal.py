"""What is advised where nothing fits is not in use yet."""

import pickle

import pytest
import torch

import ac_core
from ac_core import BudgetError
from ac_core.advice import FUSED_LOSS, OFFLOADED, SHARDED, SPREAD
from ac_core.estimation.assumptions import Setting
from ac_core.planning.refusal import too_small

BACKWARD, LOSS, STEP = "backward of layers.1", "backward of head and loss", "optimizer step"
SMALLER = "a smaller batch or shorter sequences"


@pytest.fixture
def advised(of_decoder):
    """The advice for a step of this setting that is highest at this moment."""
    _, _, plain = of_decoder

    def advise(moment, **setting):
        object.__setattr__(step := pickle.loads(pickle.dumps(plain)), "peak_moment", moment)
        return too_small(1024, step, Setting(**setting))

    return advise


@pytest.mark.parametrize(
    ("moment", "setting", "change"),
    [
        (BACKWARD, {"offload": "cpu"}, OFFLOADED),
        (BACKWARD, {"strategy": "fsdp2", "dp_size": 8}, SPREAD),
        (LOSS, {"loss": "fused"}, FUSED_LOSS),
        (STEP, {"strategy": "fsdp2", "dp_size": 8}, SPREAD),
    ],
)
def test_a_setting_is_advised_unless_it_is_so_already(advised, moment, setting, change):
    assert change in advised(moment).parts
    assert change not in advised(moment, **setting).parts
    assert str(change) not in str(advised(moment, **setting))


@pytest.mark.parametrize("moment", [BACKWARD, LOSS])
def test_a_batch_of_one_is_not_to_be_smaller(advised, moment):
    assert str(advised(moment, rows=8)).count(SMALLER) == str(advised(moment, rows=None)).count(SMALLER) == 1
    alone = str(advised(moment, rows=1))
    assert "batch or" not in alone
    assert "or shorter sequences" in alone


def test_an_optimizer_without_state_is_not_to_have_less(advised):
    assert "less state" in str(advised(STEP, optimizer="adamw"))
    for optimizer in ("sgd", "none"):
        assert "less state" not in str(advised(STEP, optimizer=optimizer))


def test_what_shards_already_can_have_more_ranks(advised):
    for moment in (BACKWARD, STEP):
        assert SHARDED in advised(moment, strategy="ddp", dp_size=8).parts
        for strategy in ("none", "ddp", "fsdp2"):  # one rank has nobody to share with
            assert "(strategy='fsdp2', dp_size=2, or more)" in str(advised(moment, strategy=strategy))
        assert "more ranks" in str(advised(moment, strategy="fsdp2", dp_size=8))
        assert "more ranks" not in str(advised(moment, strategy="ddp", dp_size=8))


def test_the_public_verb_knows_what_is_in_use(decoder, batch):
    row = {name: tokens[:1] for name, tokens in batch.items()}
    settings = {"batch": row, "dtype": torch.float32, "optimizer": "none", "device": "cpu", "offload": "cpu"}
    with pytest.raises(BudgetError, match=r"no plan fits into 50\.00 KiB") as told:
        ac_core.plan(decoder, budget="50KiB", **settings)
    assert OFFLOADED not in told.value.advice.parts
    assert "smaller batch" not in str(told.value)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
