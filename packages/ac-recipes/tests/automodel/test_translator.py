"""A recipe of AutoModel becomes ours, or every reason against it is told at its place."""

import pytest

from ac_core import DDPConfig, FSDP2Config
from ac_recipes.automodel import written
from ac_recipes.automodel.table import KNOWN
from ac_recipes.cli import main
from ac_recipes.reader import read_recipe
from ac_recipes.recipe import Recipe

REFUSED = "a recipe is data and imports nothing; '_target_: {}' is not a known name"


def test_a_whole_recipe(read, pretrain):
    recipe, translator = read(pretrain)
    assert translator.is_automodel
    assert recipe.model.config == {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    assert recipe.model.dtype == "bfloat16"
    assert recipe.distributed == FSDP2Config(activation_checkpointing="full")
    assert recipe.loss_fn.kind == "plain"
    assert recipe.rng.seed == 1111
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.weight_decay) == (1e-5, (0.9, 0.999), 0.01)
    assert recipe.lr_scheduler.lr_decay_style == "constant"


def test_the_written_recipe_reads_back_to_the_same_and_says_what_was_left_out(read, pretrain):
    recipe, translator = read(pretrain)
    text = written(translator, "a.yaml")
    assert read_recipe(Recipe, "again.yaml", text=text) == recipe
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0] == "# a.yaml, translated by ac-recipes import."
    assert "#   line 6: dist_env (a mapping): ranks use nccl on GPUs and gloo on CPUs, with torch's timeout" in comments
    assert "#   line 12: rng.ranked (true): what ranks draw differs always" in comments
    assert "_target_" not in text


def test_our_own_recipes_pass_unchanged(translate):
    text = "model: {config: {model_type: llama}}\ndist_env: none\noptimizer: {lr: 1}"
    data, left_out, mistakes = translate(text)
    assert data == {"model": {"config": {"model_type": "llama"}}, "dist_env": "none", "optimizer": {"lr": 1}}
    assert (left_out, mistakes) == ({}, [])


def test_a_known_name_in_our_own_recipe_is_translated_without_automodels_defaults(read):
    text = """
model: {config: {model_type: llama}}
loss_fn:
  _target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy
  logit_softcapping: 30
"""
    recipe, translator = read(text)
    assert not translator.is_automodel
    assert (recipe.loss_fn.kind, recipe.loss_fn.logit_softcapping) == ("fused", 30.0)
    assert (recipe.optimizer.weight_decay, recipe.lr_scheduler.lr_decay_style) == (0.1, "cosine")


def test_a_known_name_further_down_in_our_own_recipe_is_translated_too(translate):
    backend = "{_target_: nemo_automodel.components.models.common.BackendConfig, dispatcher: hybridep}"
    data, _, mistakes = translate(f"model: {{config: {{model_type: qwen3_moe}}, backend: {backend}}}")
    assert data == {"model": {"config": {"model_type": "qwen3_moe"}, "backend": {"dispatcher": "hybridep"}}}
    assert mistakes == []
    (line,) = translate("run: {extra: [{_target_: torch.optim.AdammW}]}")[2]
    assert line.startswith("a.yaml:1:26: run.extra[0]._target_: a recipe is data")
    assert line.endswith("did you mean 'torch.optim.AdamW'?")


@pytest.mark.parametrize(
    ("name", "config"),
    [("fsdp2.FSDP2Manager", FSDP2Config), ("ddp.DDPManager", DDPConfig)],
)
def test_managers_are_strategies(read, pretrain, name, config):
    manager = f"_target_: nemo_automodel.components.distributed.{name}"
    assert isinstance(read(pretrain.replace("strategy: fsdp2", manager))[0].distributed, config)


def test_megatron_fsdp_with_selective_is_refused_at_the_value(mistakes, pretrain):
    text = pretrain.replace("strategy: fsdp2", "strategy: megatron_fsdp").replace(": true\nloss", ": selective\nloss")
    (line,) = mistakes(text)
    assert line.startswith("a.yaml:24:29: distributed.activation_checkpointing: 'selective' is not supported with")
    assert "'fsdp2' or 'ddp'" in line


@pytest.mark.parametrize("name", ["os.getpid", "builtins.exec", "torch.optim.SGD"])
@pytest.mark.parametrize("section", ["optimizer", "ci", "dist_env", "new"])
def test_any_other_name_is_refused_also_in_what_would_be_left_out(mistakes, pretrain, section, name):
    text = "".join(f"{block}\n" for block in pretrain.splitlines() if not block.startswith(("ci", "  recipe_owner")))
    if section == "optimizer":
        text = text.replace("torch.optim.AdamW", name)
        place = "a.yaml:28:13"
    else:
        text = text.replace("dist_env:\n  backend: nccl\n  timeout_minutes: 1\n", "") if section == "dist_env" else text
        line = len(text.splitlines()) + 2
        text += f"{section}:\n  _target_: {name}\n"
        place = f"a.yaml:{line}:13"
    assert any(told.startswith(f"{place}: {section}._target_: {REFUSED.format(name)}") for told in mistakes(text))


def test_a_class_that_moved_is_suggested(mistakes, pretrain):
    text = pretrain.replace("components.loss.masked_ce.Masked", "losses.Masked")
    (line,) = mistakes(text)
    assert line.startswith("a.yaml:26:13: loss_fn._target_: ")
    assert line.endswith("did you mean 'nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy'?")


def test_everything_that_is_not_supported_is_listed(mistakes, pretrain):
    text = pretrain.replace("MaskedCrossEntropy", "MaskedCrossEntropy\n  fp32_upcast: false").replace(
        "tp_size: 1", "sequence_parallel: true\n  pipeline: {pp_schedule: 1f1b}\n  shard_size: 3"
    )
    assert mistakes(text) == [
        "a.yaml:23:3: distributed.sequence_parallel: not supported: sequence parallelism",
        "a.yaml:24:3: distributed.pipeline: not supported: pipeline parallelism",
        "a.yaml:25:3: distributed.shard_size: unknown field for strategy 'fsdp2'; did you mean 'dp_size'?",
        "a.yaml:29:3: loss_fn.fp32_upcast: not supported: the loss is computed in fp32",
    ]


def test_values_from_the_environment_are_refused(mistakes, pretrain):
    (line,) = mistakes(pretrain.replace("lr: 1.0e-5", "lr: ${LR,1e-4}"))
    assert line == "a.yaml:29:7: optimizer.lr: AutoModel takes this from the environment; write the value itself"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("checkpoint: {checkpoint_dir: '${CKPT}/runs'}", "32:30: checkpoint.checkpoint_dir"),  # a renamed key
        ("dataset: {seq_length: $LENGTH}", "32:23: dataset.seq_length"),
        ("peft: {target_modules: [q_proj, '${MODULE}']}", "32:24: peft.target_modules"),  # in a list
        ("distributed_extra: {a: {b: '${X}'}}", "32:28: distributed_extra.a.b"),
    ],
)
def test_the_environment_is_refused_wherever_a_string_is(mistakes, pretrain, text, place):
    lines = mistakes(f"{pretrain}{text}\n")
    assert any(line.startswith(f"a.yaml:{place}") and "takes this from the environment" in line for line in lines)


@pytest.mark.parametrize(
    "text",
    ["quantization: {load_in_4bit: true}", "fp8: {enabled: true}", "qat: {a: 1}", "peft: {use_dora: true}"],
)
def test_what_is_not_supported_is_told_as_that_and_with_a_remedy(mistakes, pretrain, text):
    (line,) = mistakes(f"{pretrain}{text}\n")
    assert ": not supported: " in line
    assert "leave it out" in line


def test_an_unknown_dataset_is_refused_with_what_to_write(mistakes, pretrain):
    (line,) = mistakes(f"{pretrain}dataset: {{_target_: my_package.my_dataset, path: x}}\n")
    assert line.endswith("; write its records as JSON Lines, and name the file with kind: records")


def test_one_thing_said_twice(read, mistakes, pretrain):
    assert read(pretrain + "seed: 1111\n")[0].rng.seed == 1111
    assert mistakes(pretrain + "seed: 7\n") == ["a.yaml:32:1: rng.seed: is given twice; line 11 says it too"]


def test_a_section_of_the_wrong_kind_is_a_mistake(mistakes, pretrain):
    text = pretrain.replace("  strategy: fsdp2\n  dp_size: none\n  tp_size: 1\n  activation_checkpointing: true\n", "")
    assert any("distributed: expected a mapping, got nothing" in line for line in mistakes(text))
    assert any("model: expected a mapping, got a list" in line for line in mistakes("recipe: x\nmodel: [1]\nrng: {}"))


def test_a_name_like_no_other_is_told_where_the_known_ones_are_listed(mistakes, capsys):
    (told,) = [line for line in mistakes("model: {_target_: my.own.Model}") if "_target_" in line]
    assert told.endswith(f"{REFUSED.format('my.own.Model')}; ac-recipes import --help lists those")
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert set(capsys.readouterr().out.split()) >= KNOWN
