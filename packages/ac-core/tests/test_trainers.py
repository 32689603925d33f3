"""The Hugging Face Trainer with checkpointed blocks is the run that it is without them."""

import json

import pytest
import torch

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing, remove_activation_checkpointing

transformers = pytest.importorskip("transformers", reason="ac-core alone does not need transformers")
pytest.importorskip("accelerate", reason="the Trainer needs it: hatch run examples:test")

IDS = torch.arange(12)
DATA = [{"input_ids": (IDS * 7 + i) % 64, "labels": (IDS * 7 + i) % 64} for i in range(16)]


def llama(policy=False):
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**fields, num_attention_heads=2, attention_dropout=0.1)
    model = transformers.LlamaForCausalLM(config)
    apply_activation_checkpointing(model, policy)
    return model


def trainer(model, folder, steps=4, **settings):
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_steps=2, **settings
    )
    return transformers.Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA)


def assert_same_weights(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_run_and_a_resumed_run_have_the_weights_of_the_plain_one(tmp_path, policy):
    plain, model, resumed = llama(), llama(policy), llama(policy)
    trainer(plain, tmp_path / "plain").train()
    run = trainer(model, tmp_path / "ours")
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    run.train()
    assert len(calls) == 2 * 4
    run.evaluate()
    assert len(calls) == 2 * 4 + 2  # two batches, without gradients
    assert_same_weights(model, plain)
    trainer(resumed, tmp_path / "on").train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert_same_weights(resumed, plain)


def test_remove_before_saving_writes_the_config_as_it_was(tmp_path):
    model = llama("full")
    run = trainer(model, tmp_path, steps=1)
    run.train()
    run.save_model(tmp_path / "on")
    remove_activation_checkpointing(model)
    run.save_model(tmp_path / "off")
    saved = [json.loads((tmp_path / name / "config.json").read_text())["use_cache"] for name in ("on", "off")]
    assert saved == [False, True]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "on")
    assert again.generation_config.use_cache
    assert_same_weights(again, model)


def test_a_cache_turned_on_by_the_settings_is_refused(tmp_path):
    run = trainer(llama("full"), tmp_path, use_cache=True)
    with pytest.raises(ActivationCheckpointingError, match="was given a key/value cache"):
        run.train()
