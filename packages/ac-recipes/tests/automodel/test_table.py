"""What single keys become. First what must never be lost: checkpointing, scope, loss, dispatcher, experts."""

import pytest

from ac_recipes.automodel.table import KNOWN

LOSS = "nemo_automodel.components.loss"
HEAD = "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"


@pytest.mark.parametrize("written", ["true", "false", "full", "selective", "'full'", "off", "null", "none"])
@pytest.mark.parametrize("manager", ["strategy: ddp", "_target_: nemo_automodel.components.distributed.ddp.DDPManager"])
def test_checkpointing_is_kept_as_written(translate, written, manager):
    read_alone = translate(f"x: {written}")[0]["x"]
    data, left_out, mistakes = translate(f"{HEAD}distributed:\n  {manager}\n  activation_checkpointing: {written}\n")
    assert data["distributed"] == {"strategy": "ddp", "activation_checkpointing": read_alone}
    assert [path for path in left_out if path.startswith("distributed")] == mistakes == []


@pytest.mark.parametrize(
    ("written", "scope"),
    [
        ("language", "language"),
        ("[language, vision]", ["language", "vision"]),
        ("language+vision", ["language", "vision"]),
        ("'Language, audio'", ["language", "audio"]),
        ("auto", "all"),
        ("[language, language]", "language"),
        ("langauge", "langauge"),  # for the strict reader to refuse
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_the_scope_is_kept_in_every_spelling(translate, written, scope):
    data, _, mistakes = translate(f"{HEAD}distributed:\n  activation_checkpointing_scope: {written}\n")
    assert data["distributed"] == {"activation_checkpointing_scope": scope}
    assert mistakes == []


@pytest.mark.parametrize(
    ("name", "beside", "fields"),
    [
        ("linear_ce.FusedLinearCrossEntropy", "", {"kind": "fused"}),
        ("linear_ce.FusedLinearCrossEntropy", "ignore_index: 0", {"kind": "fused", "ignore_index": 0}),
        ("linear_ce.FusedLinearCrossEntropy", "logit_softcapping: 30.0", {"kind": "fused", "logit_softcapping": 30.0}),
        ("linear_ce.FusedLinearCrossEntropy", "reduction: sum", {"kind": "fused"}),
        ("masked_ce.MaskedCrossEntropy", "fp32_upcast: true", {"kind": "plain"}),
        ("chunked_ce.ChunkedCrossEntropy", "chunk_len: 32", {"kind": "fused"}),
    ],
)
def test_losses(translate, name, beside, fields):
    data, _, mistakes = translate(f"{HEAD}loss_fn:\n  _target_: {LOSS}.{name}\n  {beside}\n")
    assert (data["loss_fn"], mistakes) == (fields, [])


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("linear_ce.FusedLinearCrossEntropy", "reduction: mean"),
        ("masked_ce.MaskedCrossEntropy", "fp32_upcast: false"),
        ("te_parallel_ce.TEParallelCrossEntropy", ""),
    ],
)
def test_losses_that_are_refused(translate, name, beside):
    (mistake,) = translate(f"{HEAD}loss_fn:\n  _target_: {LOSS}.{name}\n  {beside}\n")[2]
    assert "loss_fn." in mistake
    assert "not supported: " in mistake


@pytest.mark.parametrize("cache", ["none", "combine", "moe_tail"])
@pytest.mark.parametrize("dispatcher", ["hybridep", "deepep", "alltoall"])
def test_dispatcher_experts_and_cache_are_kept(translate, dispatcher, cache):
    text = f"""{HEAD}model:
  backend:
    _target_: nemo_automodel.components.models.common.BackendConfig
    linear: te
    fake_balanced_gate: false
    dispatcher: {dispatcher}
    experts: gmm
    dispatcher_recompute_cache: {cache}
"""
    data, left_out, mistakes = translate(text)
    kept = {"dispatcher": dispatcher, "experts": "gmm", "dispatcher_recompute_cache": cache}
    assert (data["model"]["backend"], mistakes) == (kept, [])
    assert {"model.backend.linear", "model.backend.fake_balanced_gate"} <= left_out.keys()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("model", "base_activation_checkpointing: true"),
        ("model", "backend: {fake_balanced_gate: true}"),
        ("distributed", "moe: {ignore_router_for_ac: true}"),
        ("distributed", "mp_policy: {param_dtype: bfloat16}"),
        ("optimizer", "_target_: torch.optim.Adam\n  weight_decay: 0.1"),
        ("checkpoint", "enabled: true\n  save_consolidated: final"),
        ("lr_scheduler", "init_lr: 1.0e-6"),
    ],
)
def test_what_would_change_the_run_is_refused(translate, section, key):
    (mistake,) = translate(f"{HEAD}{section}:\n  {key}\n")[2]
    assert f": {section}." in mistake
    assert "not supported: " in mistake


def test_a_section_that_is_turned_off_is_left_out_but_never_one_with_a_say(translate):
    text = "compile: {enabled: false}\nwandb: {enable: false, project: p}\ncheckpoint: {enabled: false}\n"
    data, left_out, mistakes = translate(HEAD + text + "distributed: {enabled: false, activation_checkpointing: true}")
    assert {"compile", "wandb"} <= left_out.keys()
    assert data["checkpoint"] == {"enabled": False}
    assert data["distributed"] == {"enabled": False, "activation_checkpointing": True}
    assert mistakes == []


def test_records(translate):
    text = f"""{HEAD}dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: train
  seq_length: 512
  truncation: true
  padding: false
  limit_dataset_samples: none
  tokenizer: {{_target_: transformers.AutoTokenizer.from_pretrained, pretrained_model_name_or_path: a/b}}
validation_dataset: none
dataloader: {{shuffle: false, num_workers: 4, collate_fn: torch.utils.data.default_collate}}
"""
    data, left_out, mistakes = translate(text)
    records = {"kind": "records", "path_or_dataset_id": "rajpurkar/squad", "split": "train", "sequence_length": 512}
    assert data["dataset"] == {**records, "truncation": "right"}
    assert data["tokenizer"] == {"pretrained_model_name_or_path": "a/b"}
    assert {"validation_dataset", "dataloader.shuffle", "dataset.padding"} <= left_out.keys()
    assert mistakes == []


def test_instructions_name_their_columns(translate):
    module = "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset"
    name = f"{module}.ColumnMappedTextInstructionDataset"
    text = f"dataset:\n  _target_: {name}\n  column_mapping: {{question: q, answer: a}}"
    assert translate(HEAD + text)[0]["dataset"]["column_mapping"] == {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"lr_decay_style": "constant"}),
        ("lr_scheduler: {lr_warmup_steps: 0, min_lr: 0}", {"lr_warmup_steps": 0, "min_lr": 0}),
        ("lr_scheduler: {}\noptimizer: {lr: 1e-4}", {"min_lr": 1e-6, "lr_warmup_steps": "auto"}),
    ],
)
def test_automodels_defaults_of_the_learning_rate_are_written_out(translate, text, expected):
    assert translate(HEAD + text)[0]["lr_scheduler"] == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("max_steps: 5", {"max_steps": 5}),
        ("max_steps: 5\n  num_epochs: 2", {"max_steps": 5, "num_epochs": 2}),
        ("num_epochs: 2", {"max_steps": 1_000_000_000, "num_epochs": 2}),
        ("ckpt_every_steps: 5", {"max_steps": 1_000_000_000, "num_epochs": 10, "ckpt_every_steps": 5}),
    ],
)
def test_automodels_epochs(translate, written, expected):
    assert translate(f"{HEAD}step_scheduler:\n  {written}\n")[0]["step_scheduler"] == expected


def test_names_are_names_of_code_and_none_is_imported():
    assert all("." in name or name[0].isupper() for name in KNOWN)


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("written", "modules"),
    [
        ("'*_proj'", PROJECTIONS),
        ("['*.q_proj', '*v_proj', out]", ["q_proj", "v_proj", "out"]),
        ("all-linear", "all-linear"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_modules_of_adapters_are_ends_of_names(translate, written, modules):
    text = f"peft:\n  _target_: nemo_automodel.components._peft.lora.PeftConfig\n  target_modules: {written}"
    data, _, mistakes = translate(HEAD + text)
    assert (data["peft"], mistakes) == ({"target_modules": modules}, [])


def test_other_globs_are_refused(translate):
    (mistake,) = translate(f"{HEAD}peft: {{target_modules: ['*.layers.*.q_proj']}}")[2]
    assert mistake == "a.yaml:2:8: peft.target_modules: not supported: globs other than *.NAME and *_proj"
