"""Sections refuse values that cannot train, by field, value and remedy."""

import re

import pytest
import torch

from ac_core import ActivationCheckpointingConfig, DDPConfig, FSDP2Config
from ac_recipes.freeze_config import FreezeConfig
from ac_recipes.lora import PeftConfig
from ac_recipes.model_config import check_model_config
from ac_recipes.parallel.fit import check_fit
from ac_recipes.reader import RecipeError, dump, read_recipe, to_plain
from ac_recipes.recipe import LRSchedulerConfig, ModelConfig, Recipe, StepSchedulerConfig
from ac_recipes.training.model import build_model


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("distributed.strategy=megatron_fsdp --distributed.activation_checkpointing=selective", "'selective'"),
        ("distributed.strategy=megatron_fsdp --distributed.ep_size=2", "distributed.ep_size: 2 is not available"),
        ("distributed.cp_size=2", "distributed.cp_size: 2: context parallelism splits each sequence"),
        ("distributed.cp_size=2 --distributed.pp_size=4", "long sequences. Also pp_size: 4: the pipeline stages"),
        ("distributed.pp_size=2", "distributed.pp_size: 2: the pipeline stages of transformers"),
        ("distributed.dp_size=6 --distributed.dp_replicate_size=4", "distributed.dp_replicate_size: 4 does not divide"),
        ("distributed.dp_size=6 --distributed.ep_size=4", "distributed.ep_size: 4 does not divide dp_size 6"),
        ("distributed.tp_size=2 --distributed.ep_size=2", "distributed.ep_size: 2 together with tp_size 2"),
        ("distributed.strategy=ddp --distributed.dp_replicate_size=2", "distributed.dp_replicate_size: 2 belongs"),
        ("distributed.strategy=ddp --distributed.dp_size=2 --distributed.tp_size=2", "distributed.tp_size: 2 with"),
        ("compile.mode=max-autotune --compile.backend=eager", "compile.mode: 'max-autotune' is a mode of backend"),
        ("compile.enabled=true --distributed.ep_size=2", "compile: is on, and ep_size is 2"),
        (
            "compile.enabled=true --distributed.activation_checkpointing=full "
            "--distributed.activation_checkpointing_offload=cpu",
            "compile: is on, and activation_checkpointing_offload is 'cpu'; a compiler decides",
        ),
        (
            "compile.enabled=true --distributed.activation_checkpointing={policy: full, offload: cpu}",
            "compile: is on, and activation_checkpointing_offload is 'cpu'; a compiler decides",
        ),
        (
            "compile.enabled=true --distributed.activation_checkpointing={policy: selective, save: [mlp.up_proj]}",
            "compile: is on, and what activation checkpointing keeps is named by the module 'mlp.up_proj'",
        ),
        ("distributed.activation_checkpointing=budget", "'budget' needs a budget"),
        ("dataset.sequence_length=0", "dataset.sequence_length: 0 is below 1"),
        ("dataset.validation_fraction=1.0", "dataset.validation_fraction: 1.0 is not in [0, 1)"),
        ("dataset.text=[]", "dataset.text: the list of files is empty"),
        ("tokenizer.vocab_size=100", "tokenizer.vocab_size: 100 is not between 257"),
        ("optimizer.lr=-1", "optimizer.lr: -1.0 is not in [0, 3.4e+38]"),
        ("optimizer.lr=1e300", "optimizer.lr: 1e+300 is not in"),
        ("tokenizer.vocab_size=1000000000000000000000", "tokenizer.vocab_size: 1000000000000000000000 is not between"),
        ("rng.seed=-1", "rng.seed: -1 is not in"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas: (0.9, 1.0) are not both in [0, 1)"),
        ("lr_scheduler.min_lr=1", "lr_scheduler.min_lr: 1.0 is above optimizer.lr 0.005"),
        ("step_scheduler.local_batch_size=3", "step_scheduler.global_batch_size: 4 is not a multiple of"),
        ("step_scheduler.max_steps=0", "step_scheduler.max_steps: 0 is below 1"),
        ("step_scheduler.val_every_steps=0", "step_scheduler.val_every_steps: 0 is below 1"),
        ("clip_grad_norm.max_norm=0", "clip_grad_norm.max_norm: 0.0 is not positive"),
        ("model.backend={dispatcher: alltoall}", "model.backend: says how experts run that are shared out"),
        ("model.config={}", "model.config: needs a model_type"),
        ("loss_fn.backend=trition", "loss_fn.backend: expected one of"),
    ],
)
def test_refused_at_the_field(tiny, setting, message):
    with pytest.raises(RecipeError) as caught:
        tiny(*setting.split(" --"))
    assert message in str(caught.value)
    assert re.match(r"(command line|.*tiny\.yaml):\d+:\d+: ", str(caught.value))


def test_the_strategy_picks_the_config(tiny):
    assert isinstance(tiny().distributed, FSDP2Config)
    assert isinstance(tiny("distributed.strategy=ddp").distributed, DDPConfig)


@pytest.mark.parametrize("text", ["true", "full", '"full"', "yes", "{policy: full}"])
def test_spellings_of_full(tiny, text):
    assert tiny(f"distributed.activation_checkpointing={text}").distributed.checkpointing.policy == "full"


@pytest.mark.parametrize("text", ["false", "off", "null", "none", "no"])
def test_spellings_of_none(tiny, text):
    assert tiny(f"distributed.activation_checkpointing={text}").distributed.checkpointing.policy == "none"


@pytest.mark.parametrize(
    "text",
    [
        "{policy: budget, memory_budget: 24GiB}",
        "{policy: budget, memory_budget: 0.5, scope: language}",
        "{policy: budget, memory_budget: 30000000000}",
        '{policy: budget, plan: {model.layers.0: none, model.layers.1: full, "layers.2": [attention, mlp.up_proj]}}',
    ],
)
def test_a_budget_and_a_plan_are_read_and_written_and_read_again(tiny, text):
    recipe = tiny(f"distributed.activation_checkpointing={text}")
    config = recipe.distributed.checkpointing
    assert config.policy == "budget"
    if config.plan is not None:
        assert list(config.plan.values()) == ["none", "full", ("attention", "mlp.up_proj")]
    assert read_recipe(Recipe, "again.yaml", text=dump(recipe)) == recipe


def test_a_bad_budget_is_refused_at_its_place(tiny):
    with pytest.raises(RecipeError, match=r"activation_checkpointing\.memory_budget: '24gib' has no unit of memory"):
        tiny("distributed.activation_checkpointing={policy: budget, memory_budget: 24gib}")


def test_a_section_made_in_python_checks_its_choices():
    with pytest.raises(ValueError, match="^lr_decay_style: 'cosin' is not one of 'constant', 'cosine', 'linear'"):
        LRSchedulerConfig(lr_decay_style="cosin")
    with pytest.raises(ValueError, match="^max_steps: 0"):
        StepSchedulerConfig(max_steps=0)


def test_what_cannot_go_together_is_refused():
    lora = {"model": ModelConfig(config={"model_type": "llama"}), "peft": PeftConfig()}
    with pytest.raises(ValueError, match=r"^peft: adapters cannot be split over distributed\.tp_size 2 ranks"):
        Recipe(**lora, distributed=FSDP2Config(tp_size=2))
    with pytest.raises(ValueError, match=r"^freeze_config: with peft "):
        Recipe(**lora, freeze_config=FreezeConfig())
    budget = FSDP2Config(activation_checkpointing=ActivationCheckpointingConfig(policy="budget", memory_budget="1GiB"))
    with pytest.raises(ValueError, match=r"^compile: is on, and policy 'budget' has no plan yet"):
        Recipe(model=lora["model"], distributed=budget, compile=True)


def test_reading_and_building_leave_the_recipe_as_it_is():
    """transformers completes nested settings such as these in place, and a resumed run would find another model."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    fields = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
              "num_attention_heads": 2, "rope_scaling": scaling}  # fmt: skip
    recipe = Recipe(model=ModelConfig(config=fields), distributed=FSDP2Config(tp_size=2))
    before = to_plain(recipe)
    assert [*check_model_config(recipe), *check_fit(recipe)] == []
    build_model(recipe.model, 300, 0, torch.device("cpu"))
    assert to_plain(recipe) == before
