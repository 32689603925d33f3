"""Models from Python, as a `DistributedSetup` says."""

import subprocess
import sys

import pytest
import torch
import transformers

import ac_recipes
from ac_core import find_blocks
from ac_recipes.errors import UsageError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64)


def test_a_local_folder_is_loaded_and_checkpointed_with_the_same_gradients(tmp_path):
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "model")
    setup = ac_recipes.DistributedSetup.build(strategy="fsdp2", activation_checkpointing="selective")
    model = ac_recipes.AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), distributed_setup=setup)
    plain = ac_recipes.AutoModelForCausalLM.from_pretrained(str(tmp_path / "model")).train()
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.training
    assert model.ac_report.applied_blocks == ("model.layers.0", "model.layers.1")
    assert not hasattr(plain, "ac_report")
    tokens = torch.arange(24).reshape(2, 12)
    for each in (model, plain):
        each(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    theirs = dict(plain.named_parameters())
    assert all(torch.equal(weight.grad, theirs[name].grad) for name, weight in model.named_parameters())


def test_a_multimodal_model_with_a_scope():
    text = {**SIZES, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 64}
    vision = {**SIZES, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    setup = ac_recipes.DistributedSetup.build(activation_checkpointing=True, activation_checkpointing_scope="vision")
    model = ac_recipes.AutoModelForImageTextToText.from_config(config, distributed_setup=setup)
    blocks = find_blocks(model)
    assert {block.part for block in blocks} >= {"language", "vision"}
    assert set(model.ac_report.applied_blocks) == {block.name for block in blocks if block.part == "vision"}


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="cp_size: 2: context parallelism splits each sequence"):
        ac_recipes.DistributedSetup.build(cp_size=2)
    with pytest.raises(ValueError, match="'fsdp3' is not one of 'fsdp2', 'ddp', 'megatron_fsdp'"):
        ac_recipes.DistributedSetup.build(strategy="fsdp3")
    with pytest.raises(ValueError, match="'selective' is not supported with strategy 'megatron_fsdp'"):
        ac_recipes.DistributedSetup.build(strategy="megatron_fsdp", activation_checkpointing="selective")
    two = ac_recipes.DistributedSetup.build(tp_size=2)
    with pytest.raises(UsageError, match=r"tp_size: the run has 1 rank, .*start it with --nproc-per-node 2"):
        ac_recipes.AutoModelForCausalLM.from_config(CONFIG, distributed_setup=two)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_megatron_fsdp_is_refused_without_a_gpu():
    setup = ac_recipes.DistributedSetup.build(strategy="megatron_fsdp", activation_checkpointing=True)
    with pytest.raises(UsageError, match=r"'megatron_fsdp' needs CUDA GPUs, and this machine has none; use 'fsdp2' or"):
        ac_recipes.AutoModelForCausalLM.from_config(CONFIG, distributed_setup=setup)


def test_importing_the_package_loads_neither_torch_nor_transformers():
    script = "import sys, ac_recipes; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
