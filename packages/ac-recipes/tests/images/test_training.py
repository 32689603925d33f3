"""A vision-language model trains on images, and no scope of checkpointing changes a bit of it."""

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ac_recipes.errors import UsageError
from ac_recipes.freeze_config import FreezeConfig
from ac_recipes.training.checkpoint import whole_checkpoints
from ac_recipes.training.freeze import freeze
from ac_recipes.training.model import build_model
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import train

pytest.importorskip("sklearn")

CPU = torch.device("cpu")


def losses(result):
    return [line["loss"] for line in RunFolder(result.run).read_metrics() if "loss" in line]


def weights(result):
    dcp_to_torch_save(whole_checkpoints(result.run / "checkpoints")[-1].path, result.run / "weights.pt")
    return torch.load(result.run / "weights.pt")["model"]


@pytest.fixture(scope="module")
def off(vlm):
    """The run without checkpointing."""
    return train(vlm("distributed.activation_checkpointing=false"), "vlm")


@pytest.mark.parametrize(
    ("asked", "applied"),
    [
        (("full", "all"), {"vision": "full", "text": "full"}),
        (("full", "language"), {"vision": "none", "text": "full"}),
        (("full", "multimodal"), {"vision": "full", "text": "none"}),
        (("selective", "vision"), {"vision": "selective", "text": "none"}),
        (("selective", "[language, vision]"), {"vision": "selective", "text": "selective"}),
    ],
)
def test_no_scope_changes_a_bit(vlm, off, capsys, asked, applied):
    fields = ("distributed.activation_checkpointing", "distributed.activation_checkpointing_scope")
    result = train(vlm(*map("=".join, zip(fields, asked, strict=True))), "vlm")
    assert losses(result) == losses(off)
    with_checkpointing, without = weights(result), weights(off)
    assert all(torch.equal(with_checkpointing[name], without[name]) for name in without)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if ".layers." in line]
    assert {part: row[2] for row in rows for part in applied if part in row[0]} == applied


def test_the_fused_loss_is_the_loss_from_logits(vlm, off):
    plain = train(vlm("loss_fn.kind=plain"), "vlm")
    assert losses(plain) == pytest.approx(losses(off), rel=1e-5)


def test_a_frozen_tower_stays_as_it_is_and_out_of_checkpointing(vlm, capsys):
    recipe = vlm(
        "distributed.activation_checkpointing=full",
        "freeze_config.freeze_embeddings=false",
        "model.config.model_type=idefics3",  # the other family, for good measure
    )
    result = train(recipe, "vlm")
    out = capsys.readouterr().out.splitlines()
    (tower,) = [line for line in out if "vision_model" in line]
    assert tower.split()[1:3] == ["full", "none"]
    assert "frozen" in tower
    (row,) = [line for line in out if line.startswith("frozen")]
    assert row.split()[1:5] == ["vision", "tower"] * 2
    after = weights(result)
    vocabulary = len(after["lm_head.weight"])
    before = build_model(recipe.model, vocabulary, recipe.rng.seed, CPU, {"image_token_id": 1}).state_dict()
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == {name for name in before if "vision_model" not in name}


def test_it_resumes_to_the_bit(vlm, off):
    constant = "lr_scheduler.lr_decay_style=constant"
    half = train(vlm("step_scheduler.max_steps=1", constant), "vlm")
    resumed = train(vlm("step_scheduler.max_steps=2", constant), "vlm", resume=half.run)
    assert losses(resumed) == losses(train(vlm("step_scheduler.max_steps=2", constant), "vlm"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze_audio_tower": True}, r"freeze_config\.freeze_audio_tower: SmolVLM\w+ has no audio tower; set it to"),
        ({"freeze_language_model": True}, None),
    ],
)
def test_what_can_be_frozen(vlm, fields, message):
    model = build_model(vlm().model, 326, 0, CPU, {"image_token_id": 1})
    if message is not None:
        with pytest.raises(UsageError, match=message):
            freeze(model, FreezeConfig(**fields))
        assert all(parameter.requires_grad for parameter in model.parameters())
        return
    freeze(model, FreezeConfig(**fields))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "model.connector.modality_projection.proj.weight"
    ]


def test_something_is_left_to_train(tiny):
    model = build_model(tiny().model, 300, 0, CPU)
    assert freeze(model, None) == []
    with pytest.raises(UsageError, match="language model are all that LlamaForCausalLM has; nothing is left"):
        freeze(model, FreezeConfig(freeze_vision_tower=False, freeze_language_model=True))
